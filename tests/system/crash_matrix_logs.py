"""A shard with a store in a recovery log, in a process of the crash matrix."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from pathlib import Path
from typing import Any

from crash_matrix_control import Control, StoppingClient

from coranto.client import AppendResult, Chunk
from coranto.coordination.etcd import KeyValue, Op, Put, TxnResult
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.effects import SystemClock
from coranto.errors import Fenced, Unavailable
from coranto.messages import Checkpoint
from coranto_consumers.recoverylog.hint_store import HintKeys
from coranto_consumers.recoverylog.recorder import Recorder
from coranto_consumers.recoverylog.standby import HINTS_EVERY_S, LogStandby
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores import JsonFileStore, SqliteStore, Store

SCHEMA = "CREATE TABLE IF NOT EXISTS counts (n INTEGER PRIMARY KEY, count INTEGER NOT NULL)"


class LogClient(StoppingClient):
    """A client that also stops around and during appends to the recovery log."""

    log: str

    async def read(self, journal: str, *arguments: Any, **options: Any) -> AsyncGenerator[Chunk]:  # type: ignore[override]
        if journal == self.log:
            async for chunk in super(StoppingClient, self).read(journal, *arguments, **options):
                yield chunk
            return
        async for chunk in super().read(journal, *arguments, **options):
            yield chunk

    async def append(self, journal: str, content: Any, **options: Any) -> AppendResult:
        if journal != self.log:
            return await super().append(journal, content, **options)
        unstopped = super(StoppingClient, self).append
        pieces = [content] if isinstance(content, bytes) else content
        if not any(pieces):
            return await unstopped(journal, content, **options)
        if "check_registers" not in options:
            await self.control.passing("handoff.before")
            result = await unstopped(journal, content, **options)
            await self.control.passing("handoff.after")
            return result
        await self.control.passing("fence.before")
        try:
            result = await unstopped(journal, self._in_steps(pieces), **options)
        except Unavailable:
            # A client repeats ordinary appends, too.
            result = await unstopped(journal, content, **options)
        await self.control.passing("commit.after")
        return result

    async def _in_steps(self, pieces: Sequence[bytes]) -> AsyncGenerator[bytes]:
        """Stop after the fence check, which precedes the content, and before the commit, which follows it."""
        await self.control.passing("fence.after")
        for piece in pieces:
            yield piece
        await self.control.passing("commit.before")


class HintClock(SystemClock):
    """A clock that delays hints until the application sets `due`."""

    def __init__(self) -> None:
        self.due = asyncio.Event()
        self.written = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds < HINTS_EVERY_S:  # The wait before a retry.
            await super().sleep(seconds)
            return
        await self.due.wait()
        self.due.clear()


class StoppingCoordinator(EtcdCoordinator):
    """A coordinator that stops around writes to etcd: claims of the log, and hints."""

    control: Control
    hint_clock: HintClock

    async def txn(self, compares: Any, ops: Sequence[Op], **options: Any) -> TxnResult:
        step = next((self._step(op) for op in ops if isinstance(op, Put)), "")
        await self.control.passing(f"{step}.before")
        try:
            result = await super().txn(compares, ops, **options)
            await self.control.passing(f"{step}.after")
        finally:
            if step == "hint":
                self.hint_clock.written.set()
        return result

    def _step(self, put: Put) -> str:
        if put.key.endswith(".author"):
            owner = json.loads(put.value)
            mine = owner["handoff"] is not None and owner["handoff"]["author"] == owner["author"]
            return "confirm" if mine else "claim"
        if put.key.endswith(".primary"):
            return "hint" if self.control.is_restored else "hint1"
        return "backup"


class _Stopping(Store):
    """A store that stops around the start of a commit. Hints are written then, before anything is acknowledged."""

    control: Control
    hint_clock: HintClock
    recording: Recorder

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        await self.control.passing("record.before")
        commit = await super().start_commit(shard, checkpoint, wait_for)  # type: ignore[safe-super]
        await self.control.passing("record.after")
        if not self.control.armed:
            return commit
        self.hint_clock.due.set()
        return self._hinted(commit)

    async def _hinted(self, commit: Awaitable[None]) -> None:
        await commit
        written = asyncio.ensure_future(self.hint_clock.written.wait())
        while not written.done() and not self.recording.has_failed:  # A failed recorder writes no hints.
            await asyncio.wait((written,), timeout=0.05)
        written.cancel()


class StoppingJson(_Stopping, JsonFileStore[dict[str, int]]):
    def count(self, n: int) -> None:
        self.state[str(n)] = self.state.get(str(n), 0) + 1


class StoppingSqlite(_Stopping, SqliteStore):
    def count(self, n: int) -> None:
        self.connection.execute(
            "INSERT INTO counts VALUES (?, 1) ON CONFLICT (n) DO UPDATE SET count = count + 1", (n,)
        )


class Counting(Application[Any]):
    """An application that counts each number in the store, and publishes it to two journals."""

    def __init__(self, job: dict[str, Any], control: Control, hint_clock: HintClock) -> None:
        self._job = job
        self._control = control
        self._hint_clock = hint_clock
        self._seen: list[int] = []

    def new_store(self, shard: Any) -> StoppingJson | StoppingSqlite:
        is_json = self._job["kind"] == "json"
        store = StoppingJson(shard.recorder, {}) if is_json else StoppingSqlite(shard.recorder, SCHEMA)
        store.control, store.hint_clock, store.recording = self._control, self._hint_clock, shard.recorder
        return store

    def consume_message(self, shard: Any, store: Any, message: Any, publisher: Any) -> None:
        self._control.at("consume.before")
        n = message.message["n"]
        self._seen.append(n)
        for journal in self._job["outputs"]:
            publisher.publish(journal, {"n": n})
        self._control.at("consume.after")

    def finalize_txn(self, shard: Any, store: Any, publisher: Any) -> None:
        seen, self._seen = self._seen, []
        self._control.at("flush.before")
        for n in seen:
            store.count(n)
        self._control.at("flush.after")


async def work(job: dict[str, Any], control: Control) -> None:
    client = LogClient(job["endpoint"], retry_timeout=180)
    client.control, client.log = control, job["log"]
    coordinator = StoppingCoordinator(job["etcd"])
    coordinator.control = control
    coordinator.hint_clock = hint_clock = HintClock()
    keys = HintKeys(job["hints"], job["cell"], 1)
    guard = KeyValue(job["assignment"], create_revision=job["assigned"])
    spec = shard_spec(job["cell"], [job["input"]], max_seconds=60)
    control.say("restoring")
    if job.get("at_takeover"):
        control.arm()
    try:
        async with (
            client,
            coordinator,
            LogStandby(
                client, coordinator, keys, job["log"], Path(job["folder"]), guard=guard, clock=hint_clock
            ) as standby,
        ):
            await standby.tailing()
            async with (
                await standby.take_over() as owner,
                running_shard(Counting(job, control, hint_clock), spec, client, owner=owner) as shard,
            ):
                await control.follow(shard, job["input"])
    except Fenced:
        control.say("fenced")
