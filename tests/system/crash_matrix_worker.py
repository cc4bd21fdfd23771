"""Processes of the crash matrix. Run as a script, it imports everything once and forks for each line of input.

Each process runs one shard, and talks to the test over a socket: a word a line. A process that is told of a point stops
there in its second transaction: it dies by SIGKILL, or it waits, as a machine that hangs would, until it is told to go
on.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, event

from coranto.client import AppendResult, Chunk, JournalClient
from coranto.errors import Fenced
from coranto.messages import Flags, JsonLines, iter_messages
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores import SqlShardStore, SqlStore

_PR_SET_PDEATHSIG = 1

COUNTS = Table(
    "counts",
    MetaData(),
    Column("cell", String(100), primary_key=True),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
)


class Control:
    """The test, and where it wants this process to stop."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(job["control"])
        self._lines = self._socket.makefile("r")
        self._point = job.get("point", "")
        self._dies = job.get("dies", False)
        self.armed = False
        self.say(job["name"])

    def say(self, word: str) -> None:
        self._socket.sendall(f"{word}\n".encode())

    def hear(self) -> str:
        """The next word; the process ends when the test does."""
        word = self._lines.readline().strip()
        if not word:
            os._exit(2)
        return word

    def arm(self) -> None:
        """From now on, stop at the point, once."""
        self.armed = bool(self._point)

    def _stops_at(self, point: str) -> bool:
        if not self.armed or point != self._point:
            return False
        self.armed, self._point = False, ""
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self.say("stopped")
        return True

    def at(self, point: str) -> None:
        """In a thread that may block."""
        if self._stops_at(point):
            self.hear()

    async def passing(self, point: str) -> None:
        """On the event loop. All of it stands still meanwhile, as it does when a machine hangs."""
        self.at(point)


class StoppingClient(JournalClient):
    """Stops around reads and appends."""

    control: Control
    acks = 0

    async def read(self, *arguments: Any, **options: Any) -> AsyncGenerator[Chunk]:  # type: ignore[override]
        async for chunk in super().read(*arguments, **options):
            await self.control.passing("read.before")
            yield chunk
            await self.control.passing("read.after")

    async def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
        first = next(iter_messages(JsonLines(), journal, [b"".join(content)], 0))
        if first.flags != Flags.ACK_TXN:
            step = "publish"
        else:
            self.acks += self.control.armed
            step = f"ack{self.acks}"
        await self.control.passing(f"{step}.before")
        result = await super().append(journal, content, **options)
        await self.control.passing(f"{step}.after")
        return result


class Counting(Application[SqlShardStore]):
    """Counts in the store how often it consumed each number, and publishes it to two journals."""

    def __init__(self, job: dict[str, Any], control: Control) -> None:
        self._job = job
        self._control = control
        self._seen: list[int] = []

    def new_store(self, shard: Any) -> SqlShardStore:
        control = self._control
        control.say("restoring")

        def commit(connection: Connection) -> None:
            control.at("commit.before")
            connection.commit()
            control.at("commit.after")

        database = SqlStore(self._job["store"], commit=commit)

        @event.listens_for(database.engine, "before_cursor_execute")
        def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE gazette_checkpoints SET checkpoint"):
                control.at("fence.before")

        @event.listens_for(database.engine, "after_cursor_execute")
        def after(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE gazette_checkpoints SET checkpoint"):
                control.at("fence.after")

        return SqlShardStore(database, COUNTS)

    def consume_message(self, shard: Any, store: SqlShardStore, message: Any, publisher: Any) -> None:
        self._control.at("consume.before")
        n = message.message["n"]
        self._seen.append(n)
        for journal in self._job["outputs"]:
            publisher.publish(journal, {"n": n})
        self._control.at("consume.after")

    def finalize_txn(self, shard: Any, store: SqlShardStore, publisher: Any) -> None:
        seen, self._seen = self._seen, []
        cell = self._job["cell"]
        self._control.at("flush.before")
        for n in seen:
            mine = (COUNTS.c.cell == cell) & (COUNTS.c.n == n)
            if not store.connection.execute(COUNTS.update().where(mine).values(count=COUNTS.c.count + 1)).rowcount:
                store.connection.execute(COUNTS.insert().values(cell=cell, n=n, count=1))
        self._control.at("flush.after")


async def work(job: dict[str, Any], control: Control) -> None:
    client = StoppingClient(job["endpoint"], patience=30)
    client.control = control
    spec = shard_spec(job["cell"], [job["input"]], max_seconds=10)
    async with client, running_shard(Counting(job, control), spec, client) as shard:
        ready = asyncio.create_task(shard.primary.ready.wait())
        await asyncio.wait({ready, shard.task}, return_when=asyncio.FIRST_COMPLETED)
        control.say("restored")
        while (word := await asyncio.to_thread(control.hear)) != "finish":
            try:
                await shard.read_through({job["input"]: int(word)})
            except Fenced:
                control.say("fenced")
                return
            control.arm()
            control.say("read")
        await shard.finish()
        control.say("finished")


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the processes but the kernel.
    for line in sys.stdin:
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            job = json.loads(line)
            asyncio.run(work(job, Control(job)))
            os._exit(0)


if __name__ == "__main__":
    main()
