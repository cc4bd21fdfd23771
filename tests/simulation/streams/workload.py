"""The programs on a stream: they write their units in order through all their crashes, scale, and follow."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable
from typing import Any

from coranto.client import JournalClient
from coranto.errors import CorantoError, PreconditionFailed, TransactionTimeout, WriterExpired, WriterFenced
from coranto.streams.control.scaling import Change, Merge, Split
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.streams.writer.transactions import Transaction, TransactionState
from coranto.streams.writer.units import CommitResult, EventPosition
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.timeline import Process
from tests.simulation.broker.world import Host

from .history import Attempt, Unit, UnitOutcome
from .segments import parse
from .world import STREAM, StreamWorld

_MAX_ACTIVE = 5
_TIMEOUT = 40.0


class _Restart(CorantoError):
    """The process must end, and another one continue."""


class WriterHost(Host):
    """A machine that runs a program, which writes its units, in one process after the other."""

    def __init__(self, world: StreamWorld, number: int, *, stable: bool) -> None:
        super().__init__(world, f"writer-{number}", "")
        options, rng = world.stream_options, world.rng
        self.stable = stable
        self.finished = False
        self._world = world
        self._rng = rng
        self._fresh = False
        self._ends: dict[str, int] = {}  # By key: the latest reported end.
        self._pause = options.seconds / options.units
        keys = [f"key {key}" for key in range(options.keys)]
        self.program = [
            world.units.add(
                self.name,
                rng.choice(keys),
                events=1 if rng.random() < 0.3 else rng.randint(1, 4),
                padding=rng.randrange(options.largest + 1) if rng.random() < 0.3 else rng.randrange(16),
                transaction=rng.random() < 0.85,
            )
            for _ in range(options.units)
        ]
        for unit in self.program:
            if not unit.transaction:
                unit.events = 1

    def usurp(self) -> None:
        """Suspend the process as if it had failed, and start another one. It resumes later, unaware of the other."""
        process = self.process
        if process is None or not process.alive or process.paused or not self.stable:
            return
        self._world.coverage.sometimes("a program was taken for dead")
        process.pause()
        self.suspended.append(process)
        self.process = None
        self.boot(0.01)
        self._world.loop.later(self._rng.uniform(0.1, 4.0), process.resume)

    def left(self) -> list[Unit]:
        """Return the units that must still be written."""
        if not self.stable:
            # The outcome of another process's attempts is unknown.
            return [unit for unit in self.program if not unit.attempts]
        return [unit for unit in self.program if unit.given_up == math.inf and unit.outcome is not UnitOutcome.OK]

    async def serve(self, process: Process) -> None:
        world, options, rng = self._world, self._world.stream_options, self._rng
        left = self.left()
        if self._fresh:
            # The stream has removed this writer, so the outcome of these can no longer be determined.
            doubtful = [unit for unit in left if unit.outcome is UnitOutcome.UNKNOWN]
            for unit in doubtful:
                unit.give_up(world.loop.time())
            left = self.left()
        elif self.stable and left and rng.random() < 0.5:
            # The program forgets that the last ones are stored, and writes them again.
            before = [unit for unit in self.program if unit.number < left[0].number and unit.given_up == math.inf]
            left = before[len(before) - rng.randint(0, 4) :] + left if len(before) > 4 else left
        clock = SimClock(world.loop, process)
        client = world.journal_client(self.name, process, clock)
        writer: StreamWriter[Any] = StreamWriter(
            client,
            STREAM,
            writer_id=self.name if self.stable else None,
            fresh=self._fresh,
            in_flight=options.in_flight,
            batch_bytes=rng.choice((1, 300, 1 << 20)),
            retry_timeout=_TIMEOUT if rng.random() < 0.7 else 1.0,
            clock=clock,
            entropy=rng.randbytes,
        )
        self._fresh = False
        async with writer:
            while not await self._write(writer, process, client, left):
                # Failed units are written again, to the same writer.
                world.coverage.sometimes("a program goes on in the same process")
                left = self.left()
        self.stays_down = True
        self.finished = True
        world.loop.note(f"{self.name} is done")

    async def _write(
        self, writer: StreamWriter[Any], process: Process, client: JournalClient, left: list[Unit]
    ) -> bool:
        """Write units. Return False if the process must write the remaining ones again."""
        options, rng = self._world.stream_options, self._rng
        waiting: dict[asyncio.Task[None], None] = {}
        failed: list[CorantoError] = []
        stops_early = not self.stable or rng.random() < 0.7  # Others check for failures only after the last unit.

        def ended(task: asyncio.Task[None]) -> None:
            waiting.pop(task, None)
            if not task.cancelled() and isinstance(error := task.exception(), CorantoError):
                failed.append(error)

        for unit in left:
            while len(waiting) >= options.window:
                await asyncio.wait(list(waiting), return_when=asyncio.FIRST_COMPLETED)
            if failed and stops_early:
                break
            if rng.random() < 0.01:
                # Serialized, so that the order of two fences is known.
                async with self._world.raising[unit.key]:
                    self._world.fences[unit.key].append(await writer.raise_fence(unit.key, "sim"))
                self._world.coverage.sometimes("a fence was raised")
            task = await self._give(writer, unit, Attempt(process.name, self._world.loop.time()), client)
            if task is not None:
                waiting[task] = None
                task.add_done_callback(ended)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.uniform(0, 4 * self._pause))
        if waiting:
            await asyncio.wait(list(waiting))
        over = any(isinstance(error, (WriterExpired, WriterFenced)) for error in failed)
        if failed and self.stable and not over and rng.random() < 0.6:
            await asyncio.sleep(rng.uniform(0, 1.0))
            return False
        if failed or self.left():
            self._world.coverage.sometimes("a program goes on in another process")
            self._fresh = any(isinstance(error, WriterExpired) for error in failed)
            raise _Restart(str(failed[0]) if failed else "there is more")
        return True

    async def _give(
        self, writer: StreamWriter[Any], unit: Unit, attempt: Attempt, client: JournalClient
    ) -> asyncio.Task[None] | None:
        """Write a unit after all earlier ones. Return a task that awaits the outcome, unless it is already known."""
        rng, world = self._rng, self._world
        unit.attempts.append(attempt)
        sequence = unit.number if self.stable else None
        events = [unit.event(i) if world.stream_options.json_lines else unit.content(i) for i in range(unit.events)]
        world.loop.note(f"{attempt.process} gives {unit.number}")
        done: Awaitable[EventPosition | CommitResult]
        kind = rng.random()
        if not unit.transaction:
            done = writer.write_event(unit.key, events[0], sequence=sequence)
        elif kind < 0.6:
            done = writer.write_events(unit.key, events, sequence=sequence)
        elif kind < 0.62 and world.fences[unit.key]:
            # Any earlier fence: all but the latest must be rejected.
            attempt.fence = rng.randrange(len(world.fences[unit.key]))
            attempt.last_fence = len(world.fences[unit.key]) - 1
            fence = world.fences[unit.key][attempt.fence]
            done = writer.write_events(unit.key, events, sequence=sequence, fence=fence)
        elif kind < 0.68 and unit.key in self._ends:
            attempt.expected_offset = max(0, self._ends[unit.key] + rng.choice((0, 0, 0, 1, -5)))
            done = writer.write_events(unit.key, events, sequence=sequence, expected_offset=attempt.expected_offset)
        else:
            opened = await self._transact(writer, unit, attempt, events, sequence)
            if opened is None:
                return None
            done = opened
        return asyncio.ensure_future(self._settle(unit, attempt, done, client))

    async def _transact(
        self, writer: StreamWriter[Any], unit: Unit, attempt: Attempt, events: list[Any], sequence: int | None
    ) -> Awaitable[CommitResult] | None:
        """Write a transaction as a block. Returns None if it ends by an exception, an abort or a timeout."""
        rng, coverage = self._rng, self._world.coverage
        chance = rng.random()
        transaction: Transaction[Any] = writer.transaction(
            unit.key, sequence=sequence, timeout=0.5 if chance < 0.05 else 60.0
        )
        try:
            await transaction.__aenter__()
        except CorantoError as error:
            await self._failed(unit, attempt, error)
            raise
        for event in events:
            transaction.write(event)
            if rng.random() < 0.2:
                await asyncio.sleep(rng.uniform(0, 0.01))
        if chance < 0.15:
            outcome = "timed out" if chance < 0.05 else "aborted" if chance < 0.1 else "left by an exception"
            coverage.sometimes(f"a transaction was {outcome}")
            if chance < 0.05:
                await asyncio.sleep(0.6)
                with contextlib.suppress(TransactionTimeout):
                    await transaction.commit()
                    self._world.broken.append(f"late-commit: {unit} was committed after its time")
            elif chance < 0.1:
                transaction.abort()
            else:
                await transaction.__aexit__(ValueError, ValueError(), None)
            attempt.outcome, attempt.returned, attempt.error = UnitOutcome.NOT_APPLIED, self._world.loop.time(), outcome
            unit.give_up(self._world.loop.time())
            return None
        commit = asyncio.ensure_future(transaction.commit())
        while transaction.raw_state is TransactionState.OPEN:  # noqa: ASYNC110  # The next unit must follow it.
            await asyncio.sleep(0)
        if chance < 0.25:
            coverage.sometimes("waiting for a commit was cancelled")
            commit.cancel()
            return transaction.commit()
        return commit

    async def _settle(
        self, unit: Unit, attempt: Attempt, done: Awaitable[EventPosition | CommitResult], client: JournalClient
    ) -> None:
        world = self._world
        try:
            result = await done
        except CorantoError as error:
            await self._failed(unit, attempt, error)
            if isinstance(error, PreconditionFailed) and error.outcome is error.outcome.NOT_APPLIED:
                unit.give_up(world.loop.time())
                return
            raise
        attempt.outcome, attempt.returned = UnitOutcome.OK, world.loop.time()
        attempt.segment, attempt.begin, attempt.end = result.segment, result.begin, result.end
        attempt.deduplicated = result.deduplicated
        world.coverage.sometimes("a fence held", attempt.fence is not None)
        self._ends[unit.key] = result.end
        world.coverage.sometimes("a unit was deduplicated", result.deduplicated)
        world.coverage.sometimes("a unit of more than 64 KiB", result.end - result.begin > 1 << 16)
        world.coverage.sometimes("a unit of more than 8 MiB", result.end - result.begin > 8 << 20)
        world.loop.note(str(unit))
        if result.begin >= 0 and self._rng.random() < 0.15:
            await self._read_back(unit, result, client)

    async def _failed(self, unit: Unit, attempt: Attempt, error: CorantoError) -> None:
        attempt.outcome, attempt.returned = UnitOutcome.of(error.outcome), self._world.loop.time()
        attempt.error = f"{type(error).__name__}: {error}"
        self._world.coverage.sometimes(f"failed: {type(error).__name__} ({error.outcome.value})")
        self._world.loop.note(str(unit))

    async def _read_back(self, unit: Unit, result: EventPosition | CommitResult, client: JournalClient) -> None:
        """Check T4: a read after a commit returns the committed content, at any broker."""
        world = self._world
        content = bytearray()
        try:
            async with asyncio.timeout(_TIMEOUT):
                other = world.journal_client("verifier")
                chunks = other.read(
                    result.journal, result.begin, end_offset=result.end, block=True, direct=False, fail_on_jump=True
                )
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        content += chunk.content
        except (CorantoError, TimeoutError) as error:
            world.coverage.sometimes(f"read back: {type(error).__name__}")
            return
        found = [message.unit for message in parse(bytes(content), json_lines=world.stream_options.json_lines)]
        world.coverage.sometimes("a commit was read back")
        if found != [unit.number] * unit.events + [-1] * unit.transaction:
            world.broken.append(f"unread-commit: {unit}: its place holds {found}")


class Operator(Host):
    """An operator that scales the stream, and sometimes dies during it. The next process finishes the change."""

    def __init__(self, world: StreamWorld) -> None:
        super().__init__(world, "operator", "")
        self._world = world
        self._rng = world.rng

    async def serve(self, process: Process) -> None:
        world, rng = self._world, self._rng
        client = world.journal_client(self.name, process, SimClock(world.loop, process))
        streams = world.streams(client)
        await streams.resume(STREAM)
        while True:
            await asyncio.sleep(rng.expovariate(1 / world.stream_options.scale_seconds))
            if rng.random() < 0.25:
                world.loop.later(rng.uniform(0, 0.05), process.kill)
            stream = await world.look(client)
            changes = self._changes([segment.number for segment in stream.active()])
            if changes:
                world.loop.note(f"scale: {changes}")
                await streams.scale(STREAM, changes)
                world.coverage.sometimes("the stream was scaled")

    def _changes(self, active: list[int]) -> list[Change]:
        rng = self._rng
        if not active:
            return []
        changes: list[Change] = []
        at = rng.randrange(len(active))
        if len(active) > 1 and (len(active) >= _MAX_ACTIVE or rng.random() < 0.5):
            at = min(at, len(active) - 2)
            changes.append(Merge(tuple(active[at : at + rng.randint(2, 3)])))
        else:
            changes.append(Split(active[at], rng.randint(2, 3)))
        return changes
