"""`coranto journals …` against a fake broker, in this process and in its own processes."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from coranto.labels import label_set
from coranto.testing.command_line import CommandLine, RemoteBroker
from coranto.wire import protocol_pb2 as pb

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]
LINES = label_set({"content-type": "application/x-ndjson"})
PARTS = ("parts/part-000", "parts/part-001", "parts/part-002")


@pytest.fixture
def parts(remote: RemoteBroker) -> tuple[str, ...]:
    for name in PARTS:
        create(remote, name)
    return PARTS


def create(remote: RemoteBroker, name: str, **fields: object) -> None:
    """Create a journal with a complete spec."""
    spec = remote.fake.create(name, **{"labels": LINES, **fields}).spec
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.refresh_interval.seconds = 30


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    """Runs `coranto journals` in this process."""
    return CommandLine(capfdbinary.readouterr, "journals")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `coranto journals` in its own process."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*COMMAND, "journals", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[bytes]"]


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def interrupt(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGINT) -> bytes:
    process.send_signal(number)
    rest, errors = process.communicate(timeout=120)
    assert b"Traceback" not in errors
    return rest


def persist(remote: RemoteBroker, name: str, content: bytes, root: Path, age: float) -> Path:
    """Store a fragment with this age. Returns its file."""
    remote.write(name, content)
    journal = remote.fake.journals[name]
    journal.roll(root)
    stored = journal.stored[-1]
    stored.fragment = dataclasses.replace(stored.fragment, mod_time=int(time.time() - age))
    return root / "fragments" / stored.fragment.content_path
