"""Getting started: `coranto up` in one terminal, journals in another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-c", "import sys; from coranto.cli import main; sys.exit(main())"]

SPECS = """
name: orders/
replication: 1
labels: [{name: content-type, value: application/x-ndjson}]
fragment: {length: 4194304, compression_codec: ZSTANDARD, stores: ["file:///"], refresh_interval: 30s}
children: [{name: orders/part-000}, {name: orders/part-001}]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("CORANTO_")}
    return {**chosen, "CORANTO_DATA": str(tmp_path_factory.mktemp("up") / "data")}


@pytest.fixture(scope="module")
def up(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Return `coranto up` when it reports that it is ready."""
    with subprocess.Popen([*COMMAND, "up"], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                break
        else:
            pytest.fail("`coranto up` ended without being ready")
        yield process
        if process.poll() is None:
            process.kill()


def run(environment: dict[str, str], *words: str, input: bytes = b"") -> bytes:
    done = subprocess.run(
        [*COMMAND, *words], env=environment, input=input, capture_output=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def test_a_cluster_runs_from_up_to_an_interrupt(environment: dict[str, str], up: subprocess.Popen[str]) -> None:
    applied = run(environment, "journals", "apply", "--specs", "-", input=SPECS.encode())
    assert applied == b"create orders/part-000\ncreate orders/part-001\n"
    small, large = b'{"order": 7}\n', b'{"order": 8, "note": "and so on"}\n' * 60_000
    run(environment, "journals", "append", "orders/part-000", input=large)
    appended = run(environment, "journals", "append", "orders/part-000", input=small).decode()
    said = (
        f"orders/part-000: appended 13 bytes at [{len(large)}, {len(large) + 13}), at 1 replica in 1 zone, on disk at "
    )
    assert appended.startswith(said)
    assert run(environment, "journals", "read", "orders/part-000") == large + small
    assert run(environment, "journals", "read", "orders/part-000", "--offset", str(len(large))) == small
    assert b"orders/part-000  1/1" in run(environment, "journals", "list")
    assert str(len(large) + 13).encode() in run(environment, "journals", "fragments", "orders/part-000")

    other = subprocess.run([*COMMAND, "up"], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert other.returncode == 1
    assert other.stderr.count("\n") == 1
    assert str(up.pid) in other.stderr

    up.send_signal(signal.SIGINT)
    assert up.stdout is not None
    rest = up.stdout.read()
    assert up.wait(timeout=120) == 0
    assert rest.rstrip().endswith("stopped")
    no_cluster = subprocess.run(
        [*COMMAND, "journals", "list"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert no_cluster.returncode == 1
    assert "no cluster runs in" in no_cluster.stderr


@pytest.mark.parametrize("words", [["version"], ["broker", "--help"], ["demo", "--help"]], ids=" ".join)
def test_installed_plugins_load(environment: dict[str, str], words: list[str]) -> None:
    assert run(environment, *words)


def test_only_the_given_data_directory_is_used(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "journals", "list", "--endpoint", "127.0.0.1:1"],
        env={**environment, "CORANTO_DATA": str(tmp_path / "none")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert list(tmp_path.iterdir()) == []
