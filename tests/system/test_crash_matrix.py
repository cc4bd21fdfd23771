"""A consumer transaction is stopped at each of its steps, and another process takes the shard up.

In half of the runs the process is killed there. In the other half it hangs: the other takes over, and then the first
goes on, a zombie that knows nothing of that. Each input must count once in the store, a read-committed reader of each
output must find each message once, and the zombie must be refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import Clock, JsonLines, Sequencer, TransactionBuilder, iter_messages, new_producer_id
from coranto.messages import read_committed as committed_of
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.stores import SqlStore
from coranto_consumers.testing import MariadbServer, PostgresServer, why_no_mariadb

pytestmark = pytest.mark.system
needs_mariadb = pytest.mark.skipif(bool(why_no_mariadb()), reason=why_no_mariadb())

STEPS = ("read", "consume", "publish", "flush", "fence", "commit", "ack1", "ack2")
POINTS = [f"{step}.{side}" for step in STEPS for side in ("before", "after")]
LOCKS = {
    # A SQLite file has one writer at a time, and the store is flushed while messages are published.
    "sqlite": ("publish.before", "publish.after", "flush.after", "fence.before", "fence.after", "commit.before"),
    "postgresql": ("fence.after", "commit.before"),
    "mariadb": ("fence.after", "commit.before"),
}
"""Where a process that hangs may hold a lock which the new owner needs to raise the fence. It goes on then before that
is done, and may commit; the new owner finds what it did."""
POINTS_OF = {
    "sqlite": POINTS,
    "postgresql": POINTS,
    # What lies further from the store than these has been stopped at with the others.
    "mariadb": [point for point in POINTS if point.startswith(("flush", "fence", "commit"))],
}
PATIENCE_S = 60
AT_ONCE = 4


class Worker:
    """A process of the matrix, by the words that it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def tell(self, word: str | int) -> None:
        self._writer.write(f"{word}\n".encode())

    async def says(self, *words: str) -> str:
        """The next word, which must be one of these; none at all when the process is dead."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                said = (await self._reader.readline()).decode().strip()
            except ConnectionError:
                said = ""
        assert said in words, f"the process said {said!r}, not {words}"
        return said

    def close(self) -> None:
        self._writer.close()


class Workers:
    """Starts processes, and waits for them to call."""

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
        async with asyncio.timeout(PATIENCE_S):
            return await call

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = (await reader.readline()).decode().strip()
        self._calls.pop(name).set_result(Worker(reader, writer))


def _start_zygote() -> subprocess.Popen[str]:
    script = Path(__file__).with_name("crash_matrix_worker.py")
    return subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, text=True)


async def publish(client: JournalClient, journal: str, *numbers: int) -> int:
    """Publish a transaction, and return the journal's head behind it."""
    builder = TransactionBuilder(new_producer_id(os.urandom), Clock(time.time_ns), JsonLines())
    for n in numbers:
        builder.add(journal, {"n": n})
    ((_, content),) = builder.take_batches(1 << 20)
    builder.ack_intents()
    return (await client.append(journal, content + builder.commit()[journal])).end


async def read_committed(client: JournalClient, journal: str) -> list[int]:
    content = await client.read_all(journal, 0, await client.head(journal))

    def read(begin: int, end: int) -> Iterator[Any]:
        return iter_messages(JsonLines(), journal, [content[begin:end]], begin)

    found = committed_of(read(0, len(content)), Sequencer(), lambda wanted: read(wanted.begin, wanted.end))
    return [each.message["n"] for each in found]


async def run_cell(workers: Workers, client: JournalClient, cell: str, job: dict[str, Any]) -> None:
    source = job["input"]
    old = await workers.start(job)
    await old.says("restoring")
    await old.says("restored")
    old.tell(await publish(client, source, 1, 2))
    await old.says("read")
    old.tell(await publish(client, source, 3, 4, 5))
    # Where it dies it says nothing any more.
    await old.says("" if job["dies"] else "stopped")

    new = await workers.start({key: value for key, value in job.items() if key != "point"})
    await new.says("restoring")
    if job["dies"]:
        await new.says("restored")
    elif job["locks"]:
        old.tell("go on")
        await new.says("restored")
    else:
        await new.says("restored")
        old.tell("go on")
    last = await publish(client, source, 6)
    if not job["dies"]:
        # It says that it has read what it was told of, if it came so far; then it meets what came last.
        committed = job["locks"] or POINTS.index(job["point"]) >= POINTS.index("commit.after")
        if await old.says("read", "fenced") == "read":
            assert committed
            old.tell(last)
            await old.says("fenced")
    new.tell(last)
    await new.says("read")
    new.tell("finish")
    await new.says("finished")
    old.close()
    new.close()

    store = SqlStore(job["store"])
    with store.engine.connect() as connection:
        rows = connection.execute(text("SELECT n, count FROM counts WHERE cell = :cell ORDER BY n"), {"cell": cell})
        assert [tuple(row) for row in rows] == [(n, 1) for n in range(1, 7)]
    for journal in job["outputs"]:
        assert await read_committed(client, journal) == list(range(1, 7))


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with Workers(tmp_path) as running:
        yield running


def spec(name: str) -> pb.JournalSpec:
    made = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
    made.fragment.length = 1 << 20
    made.fragment.compression_codec = pb.NONE
    made.fragment.refresh_interval.FromSeconds(60)
    return made


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), etcd_fsync=False) as cluster:
        yield cluster.info.endpoint


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", pytest.param("mariadb", marks=needs_mariadb)])
async def test_every_step_can_be_the_last(kind: str, tmp_path: Path, endpoint: str, workers: Workers) -> None:
    with contextlib.ExitStack() as stack:
        shared = ""
        if kind != "sqlite":
            server = PostgresServer() if kind == "postgresql" else MariadbServer()
            shared = stack.enter_context(server).new_database()
        jobs = {}
        for point, dies in itertools.product(POINTS_OF[kind], (True, False)):
            cell = f"{kind}-{point}-{'killed' if dies else 'zombie'}"
            jobs[cell] = {
                "cell": cell,
                "point": point,
                "dies": dies,
                "locks": point in LOCKS[kind],
                "endpoint": endpoint,
                "input": f"{cell}/in",
                "outputs": [f"{cell}/out-a", f"{cell}/out-b"],
                # A SQLite file has one writer at a time; cells must not stand in each other's way.
                "store": shared or f"sqlite:///{tmp_path}/{cell}.db",
            }
        async with JournalClient(endpoint, patience=PATIENCE_S) as client:
            for job in jobs.values():
                names = (job["input"], *job["outputs"])
                await client.apply([pb.ApplyRequest.Change(upsert=spec(name)) for name in names])
            limit = asyncio.Semaphore(AT_ONCE)
            problems: dict[str, BaseException] = {}

            async def run(cell: str, job: dict[str, Any]) -> None:
                async with limit:
                    try:
                        await run_cell(workers, client, cell, job)
                    except (AssertionError, Exception) as error:  # noqa: BLE001 - all cells are to be told of
                        problems[cell] = error

            await asyncio.gather(*(run(cell, job) for cell, job in jobs.items()))
        assert len(jobs) == 2 * len(POINTS_OF[kind])
        assert problems == {}
