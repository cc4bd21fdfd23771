"""Writers and brokers are killed with SIGKILL while a stream is written, scaled and read.

As in the simulation of streams, no transaction is partial, duplicate or out of order, and the reader gets each of them
whole and once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import CorantoError, Outcome, StreamChanged
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Change, Merge, Split
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.stream_writer import StreamWriter

from ..simulation.streams.checker import check
from ..simulation.streams.follower import check_delivered
from ..simulation.streams.history import Attempt, History, Unit, UnitOutcome
from ..simulation.streams.segments import Segment, parse

pytestmark = pytest.mark.timeout(900)

STREAM = "kill/stream"
WORKER = Path(__file__).with_name("streams_worker.py")
WRITERS = 2
UNITS = 150
PAUSE_S = 0.03
TIMEOUT_S = 180.0
LEASE_S = 60


class Acknowledged:
    """A count of durable units that a test can wait for."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._more = asyncio.Event()

    def __int__(self) -> int:
        return sum(unit.outcome is UnitOutcome.OK for unit in self._history.units.values())

    def note(self) -> None:
        self._more.set()

    async def further(self, units: int) -> None:
        """Return once so many further units are durable, or all of them."""
        until = min(int(self) + units, len(self._history.units))
        async with asyncio.timeout(TIMEOUT_S):
            while int(self) < until:
                self._more.clear()
                await self._more.wait()


class Program:
    """A program that writes its units, in one process after the other."""

    def __init__(self, endpoint: str, name: str, units: list[Unit], acknowledged: Acknowledged) -> None:
        self._acknowledged = acknowledged
        self._endpoint = endpoint
        self._name = name
        self._units = units
        self._process: asyncio.subprocess.Process | None = None
        self._random = random.Random(name)
        self.lives = 0

    async def run(self) -> None:
        """Write until all units are durable."""
        while left := [unit for unit in self._units if unit.outcome is not UnitOutcome.OK]:
            if self.lives and self._random.random() < 0.7:
                # It does not remember that the last ones are stored.
                before = [unit for unit in self._units if unit.number < left[0].number]
                left = before[-3:] + left
            await self._live(left)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _live(self, left: list[Unit]) -> None:
        self.lives += 1
        attempts: dict[int, Attempt] = {}
        units = {unit.number: unit for unit in left}
        job = {
            "endpoint": self._endpoint,
            "stream": STREAM,
            "writer": self._name,
            "pause": PAUSE_S,
            "units": [[u.number, u.key, [u.event(i) for i in range(u.events)], u.transaction] for u in left],
        }
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(WORKER), json.dumps(job), stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                if not line.endswith(b"\n"):
                    break  # It died while writing this line.
                word, number, now, *more = json.loads(line)
                if word == "give":
                    attempts[number] = Attempt(f"{self._name}.{self.lives}", now)
                    units[number].attempts.append(attempts[number])
                    continue
                attempt = attempts[number]
                attempt.returned = now
                if word == "ok":
                    attempt.outcome = UnitOutcome.OK
                    attempt.segment, attempt.begin, attempt.end, attempt.deduplicated = more
                    self._acknowledged.note()
                else:
                    attempt.outcome, attempt.error = UnitOutcome.of(Outcome(more[0])), more[1]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def write_here(client: JournalClient, units: list[Unit]) -> None:
    """Write with a writer without an id, in this process."""
    async with StreamWriter[Any](client, STREAM, retry_timeout=TIMEOUT_S) as writer:
        for unit in units:
            attempt = Attempt("here.1", time.monotonic())
            unit.attempts.append(attempt)
            done = asyncio.ensure_future(_write_one(writer, unit))
            try:
                result = await done
            except CorantoError as error:
                attempt.outcome, attempt.error = UnitOutcome.of(error.outcome), str(error)
            else:
                attempt.outcome = UnitOutcome.OK
                attempt.segment, attempt.begin, attempt.end = result.segment, result.begin, result.end
            attempt.returned = time.monotonic()


async def _write_one(writer: StreamWriter[Any], unit: Unit) -> Any:
    if not unit.transaction:
        return await writer.write_event(unit.key, unit.event(0))
    async with writer.transaction(unit.key) as transaction:
        for index in range(unit.events):
            transaction.write(unit.event(index))
        return await transaction.commit()


class Reader:
    """The part of a reader that `check_delivered` checks."""

    name = "reader"

    def __init__(self) -> None:
        self.delivered: list[list[tuple[int, int]]] = []

    async def run(self, client: JournalClient) -> None:
        """Read until the stream is sealed and read completely."""
        async with StreamReader[Any](client, STREAM, block=True) as reader:
            async for transaction in reader.transactions():
                self.delivered.append([(each.data["unit"], each.data["index"]) for each in transaction.events])


async def scale(streams: Streams, rng: random.Random) -> None:
    active = [segment.number for segment in (await streams.describe(STREAM)).active()]
    change: Change = Merge(tuple(active[:2])) if len(active) > 2 else Split(rng.choice(active))
    with contextlib.suppress(StreamChanged):
        await streams.scale(STREAM, [change])


async def test_kills_leave_no_transaction_partial_duplicate_or_out_of_order(tmp_path: Path) -> None:
    rng = random.Random(5)
    history = History()
    names = [f"writer-{number}" for number in range(WRITERS)]
    units = {
        name: [
            history.add(
                name,
                f"key {rng.randrange(6)}",
                events=rng.randint(1, 4) if (transaction := rng.random() < 0.8) else 1,
                padding=rng.randrange(300),
                transaction=transaction,
            )
            for _ in range(UNITS)
        ]
        for name in [*names, "here"]
    }

    acknowledged = Acknowledged(history)
    with EmbeddedCluster(tmp_path, brokers=3, lease_seconds=LEASE_S, etcd_fsync=False) as cluster:
        endpoint = ",".join(cluster.info.endpoints)
        async with JournalClient(endpoint, retry_timeout=TIMEOUT_S) as client:
            streams = Streams(client)
            await streams.create(STREAM, 2, template=default_template(replication=3))
            programs = [Program(endpoint, name, units[name], acknowledged) for name in names]
            reader = Reader()
            async with asyncio.TaskGroup() as group:
                group.create_task(reader.run(client))
                work = [group.create_task(program.run()) for program in programs]
                work.append(group.create_task(write_here(client, units["here"])))
                for number in range(3):
                    await acknowledged.further(25)
                    scaling = group.create_task(scale(streams, rng))
                    await asyncio.to_thread(cluster.kill_broker, number)
                    await acknowledged.further(15)
                    programs[number % WRITERS].kill()
                    await scaling
                await asyncio.wait(work)
                stream = await streams.seal(STREAM)
            segments = []
            for segment in stream.segments.values():
                assert segment.sealed_at is not None
                content = await client.read_all(segment.journal, 0, segment.sealed_at)
                messages = parse(content, json_lines=True)
                segments.append(Segment(segment.number, segment.range, content, segment.sealed_at, messages))
    anomalies, places = check(history, segments, set(names))
    anomalies += check_delivered(history, places, reader, may_see_uncommitted=False)
    assert [str(anomaly) for anomaly in anomalies] == []
    assert int(acknowledged) > 0.95 * len(history.units)
    assert len(segments) > 4
    assert sum(program.lives for program in programs) > WRITERS
