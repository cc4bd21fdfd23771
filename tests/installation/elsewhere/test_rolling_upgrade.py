"""A rolling upgrade: brokers of an earlier commit and of this one serve the same journals, together and in turn.

It needs the earlier commit. In a shallow clone, fetch it first: `git fetch --unshallow`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coranto.client import SyncJournalClient
from coranto.cluster import EtcdServer
from coranto.cluster.brokers import serves
from coranto.cluster.processes import ChildProcess, free_port
from coranto.errors import CorantoError, WrongAppendOffset
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from tests.installation.elsewhere.environments import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

EARLIER = "9e148bb78a9d09c97d616e25dcfa2089fc317f74"
"""The last commit before brokers reported their version."""
SOURCES = ("platform", "broker")
JOURNAL = "upgrade/part-000"
TIMEOUT = 120.0


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the earlier commit."""
    command = ["git", "archive", EARLIER, *SOURCES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, f"commit {EARLIER} is not in this clone; `git fetch --unshallow` brings it"
    folder = tmp_path_factory.mktemp("earlier")
    subprocess.run(["tar", "-x", "-C", folder], input=done.stdout, check=True)
    return folder


class Brokers:
    """Two brokers in two zones, each with its own folder and port, run from the earlier or the current sources."""

    def __init__(self, folder: Path, etcd: str) -> None:
        self._folder, self._etcd = folder, etcd
        self._ports: dict[str, int] = {}
        for zone in "ab":
            self._ports[zone] = free_port(taken=self._ports.values())
        self._running: dict[str, ChildProcess] = {}

    @property
    def endpoint(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports.values())

    def start(self, zone: str, sources: Path) -> None:
        command = [
            *(sys.executable, "-P", "-m", "coranto_broker", "serve", "--etcd", self._etcd, "--zone", zone),
            *("--id", f"broker-{zone}", "--port", str(self._ports[zone]), "--lease-seconds", "30"),
            *("--data-dir", str(self._folder / zone), "--file-root", str(self._folder / "store")),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(sources / each) for each in SOURCES)}
        self._running[zone] = ChildProcess(
            f"broker {zone}", command, log=self._folder / f"{zone}.log", cwd=self._folder, environment=environment
        )
        deadline = time.monotonic() + TIMEOUT
        while not serves(f"127.0.0.1:{self._ports[zone]}"):
            assert self._running[zone].alive, self._running[zone].failure()
            assert time.monotonic() < deadline, self._running[zone].log_tail(40)
            time.sleep(0.1)

    def stop(self, zone: str) -> None:
        assert self._running[zone].stop(TIMEOUT), self._running[zone].log_tail(40)
        assert self._running[zone].exit_code == 0

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with EtcdServer(tmp_path / "etcd", fsync=False) as etcd:
        (tmp_path / "store").mkdir()
        made = Brokers(tmp_path, etcd.endpoint)
        try:
            yield made
        finally:
            made.kill()


class Writer:
    """Appends numbered lines, and records acknowledged content."""

    def __init__(self, client: SyncJournalClient) -> None:
        self._client = client
        self.content = b""
        self._register = 0

    def write(self, lines: int = 60) -> None:
        for _ in range(lines):
            line = b"%09d\n" % (len(self.content) // 10)
            self._append(line)
            self.content += line

    def _append(self, line: bytes) -> None:
        """Append at an explicit offset, so that a repeated append is applied once."""
        deadline = time.monotonic() + TIMEOUT
        begin, registers = len(self.content), label_set(lines=str(len(self.content)))
        while True:
            try:
                done = self._client.append(JOURNAL, line, offset=begin, union_registers=registers)
                assert (done.begin, done.end) == (begin, begin + len(line))
                return
            except WrongAppendOffset:  # The append whose answer was lost was applied.
                assert self._client.head(JOURNAL) == begin + len(line)
                return
            except CorantoError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def check(self) -> None:
        read = b"".join(chunk.content for chunk in self._client.read(JOURNAL, 0, end_offset=len(self.content)))
        assert read == self.content


def test_brokers_are_upgraded_one_by_one(earlier: Path, brokers: Brokers) -> None:
    brokers.start("a", earlier)
    brokers.start("b", earlier)
    with SyncJournalClient(brokers.endpoint, retry_timeout=60.0) as client:
        spec = pb.JournalSpec(name=JOURNAL, replication=2, flags=pb.JournalSpec.O_RDWR)
        spec.fragment.length = 1024
        spec.fragment.compression_codec = pb.ZSTANDARD
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.seconds = 1
        client.apply([pb.ApplyRequest.Change(upsert=spec)])
        writer = Writer(client)
        writer.write()
        assert client.heads("name=none").broker_version == ""
        for zone, sources in (("a", ROOT), ("b", earlier), ("b", ROOT), ("a", ROOT)):
            # Each broker restarts next to an earlier broker and next to a current one.
            brokers.stop(zone)
            brokers.start(zone, sources)
            writer.write()
            writer.check()
        assert client.heads("name=none").broker_version != ""
        (head,) = client.heads(f"name={JOURNAL}")
        assert head.head == len(writer.content)
        assert head.registers is not None
