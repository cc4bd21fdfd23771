"""Fixtures of the crash matrices: a cluster, processes that stop at given steps, and messages."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines, ProducerClock, Sequencer, TransactionBuilder, iter_messages, new_producer_id
from coranto.messages import read_committed as committed_of
from coranto.wire import protocol_pb2 as pb
from tests.servers.applying import apply_specs

TIMEOUT_S = 180
LEASE_S = 60
"""No broker may lose its lease because the machine stalls: the outcome of its work at that time would be unknown."""
MAX_CONCURRENT = 6


class Worker:
    """A process of the matrix. It reports its progress in words."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, word: str | int) -> None:
        self._writer.write(f"{word}\n".encode())

    async def expect(self, *words: str) -> str:
        """Read the next word, which must be one of these; empty if the process is dead."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                said = (await self._reader.readline()).decode().strip()
            except ConnectionError:
                said = ""
        assert said in words, f"the process said {said!r}, not {words}"
        return said

    def close(self) -> None:
        self._writer.close()


class Workers:
    """The processes of the matrix: starts them, and accepts their connections."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "control")
        self._calls: dict[str, asyncio.Future[Worker]] = {}
        self._numbers = itertools.count()

    async def __aenter__(self) -> Workers:
        self._server = await asyncio.start_unix_server(self._called, self._path)
        self._zygote = _start_zygote()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        await asyncio.to_thread(self._zygote.wait)
        self._server.close()

    async def start(self, job: dict[str, Any]) -> Worker:
        name = f"worker-{next(self._numbers)}"
        call = self._calls[name] = asyncio.get_running_loop().create_future()
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps({**job, "name": name, "control": self._path}) + "\n")
        self._zygote.stdin.flush()
        async with asyncio.timeout(TIMEOUT_S):
            return await call

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        self._calls.pop(name).set_result(Worker(reader, writer))


def _start_zygote() -> subprocess.Popen[str]:
    script = Path(__file__).with_name("crash_matrix_worker.py")
    return subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, text=True)


class Matrix:
    """A client of journals, and a runner of concurrent cells."""

    def __init__(self, client: JournalClient, workers: Workers, etcd: str) -> None:
        self.client = client
        self.workers = workers
        self.etcd = etcd

    async def create(self, *journals: str, content_type: str = JSON_LINES) -> None:
        await apply_specs(self.client, [_spec(name, content_type) for name in journals])

    async def publish(self, journal: str, *numbers: int) -> int:
        """Publish a transaction, and return the journal's head after it."""
        builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
        for n in numbers:
            builder.add(journal, {"n": n})
        ((_, content),) = builder.take_batches(1 << 20)
        builder.ack_intents()
        return (await self.client.append(journal, content + builder.commit()[journal], retry_unknown=True)).end

    async def read_committed(self, journal: str) -> list[int]:
        content = await self.client.read_all(journal, 0, await self.client.head(journal))

        def read(begin: int, end: int) -> Iterator[Any]:
            return iter_messages(JsonLines(), journal, [content[begin:end]], begin)

        found = committed_of(read(0, len(content)), Sequencer(), lambda wanted: read(wanted.begin, wanted.end))
        return [each.message["n"] for each in found]

    async def run(self, cells: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Run the cells. Raises ExceptionGroup after all of them, with the errors of failed cells."""
        limit = asyncio.Semaphore(MAX_CONCURRENT)
        problems: list[Exception] = []

        async def run(name: str, cell: Callable[[], Awaitable[None]]) -> None:
            async with limit:
                try:
                    await cell()
                except Exception as error:  # noqa: BLE001 - all errors are reported
                    error.add_note(f"cell {name}")
                    problems.append(error)

        await asyncio.gather(*(run(name, cell) for name, cell in cells.items()))
        if problems:
            raise ExceptionGroup(f"{len(problems)} of {len(cells)} cells failed", problems)


def _spec(name: str, content_type: str) -> pb.JournalSpec:
    made = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: content_type}))
    made.fragment.length = 1 << 20
    made.fragment.compression_codec = pb.NONE
    made.fragment.refresh_interval.FromSeconds(60)
    return made


@pytest.fixture(scope="session")
def matrix_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), lease_seconds=LEASE_S, etcd_fsync=False) as cluster:
        yield cluster


@pytest.fixture
async def matrix(matrix_cluster: EmbeddedCluster, tmp_path: Path) -> AsyncIterator[Matrix]:
    info = matrix_cluster.info
    async with JournalClient(info.endpoint, retry_timeout=TIMEOUT_S) as client, Workers(tmp_path) as workers:
        yield Matrix(client, workers, info.etcd)
