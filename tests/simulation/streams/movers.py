"""Programs that write transactions on several keys concurrently, and die during them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from coranto.client import JournalClient
from coranto.errors import CorantoError
from coranto.streams.writer.multi_key.transaction import MultiKeyResult
from coranto.streams.writer.multi_key.writer import MultiKeyWriter
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.timeline import Process
from tests.simulation.broker.world import Host

from .history import Attempt, Unit, UnitOutcome
from .segments import parse
from .several import committed
from .world import STREAM, StreamWorld

_TIMEOUT = 40.0


class Mover(Host):
    """A machine that runs such a program, in one process after the other. A process never retries another's units."""

    def __init__(self, world: StreamWorld, number: int) -> None:
        super().__init__(world, f"mover-{number}", "")
        options, rng = world.stream_options, world.rng
        self.finished = False
        self._world = world
        self._rng = rng
        self._pause = options.seconds / max(1, options.moves)
        keys = [f"key {key}" for key in range(options.keys)]
        self.program: list[Unit] = []
        for _ in range(options.moves):
            events = rng.randint(2, 5)
            named = tuple(rng.choice(keys) for _ in range(events))
            padding = rng.randrange(options.largest + 1)
            self.program.append(
                world.units.add(self.name, named[0], events=events, padding=padding, transaction=True, keys=named)
            )

    def left(self) -> list[Unit]:
        """Return the units without an attempt."""
        return [unit for unit in self.program if not unit.attempts]

    async def serve(self, process: Process) -> None:
        world, options, rng = self._world, self._world.stream_options, self._rng
        if rng.random() < 0.5:
            world.loop.later(rng.uniform(0.2, 3.0), process.kill)
        clock = SimClock(world.loop, process)
        client = world.journal_client(self.name, process, clock)
        writer: MultiKeyWriter[Any] = MultiKeyWriter(
            client, STREAM, retry_timeout=_TIMEOUT, clock=clock, entropy=rng.randbytes
        )
        async with writer:
            tasks: set[asyncio.Task[None]] = set()
            for unit in self.left():
                unit.attempts.append(Attempt(process.name, world.loop.time()))
                tasks.add(asyncio.create_task(self._write(writer, unit, client)))
                while len(tasks) >= options.window:
                    _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if rng.random() < 0.6:
                    await asyncio.sleep(rng.uniform(0, 2 * self._pause))
            if tasks:
                await asyncio.wait(tasks)
        self.stays_down = True
        self.finished = True

    async def _write(self, writer: MultiKeyWriter[Any], unit: Unit, client: JournalClient) -> None:
        world, rng, attempt = self._world, self._rng, unit.attempts[0]
        json_lines = world.stream_options.json_lines
        try:
            async with writer.transaction(timeout=60.0) as transaction:
                for index, key in enumerate(unit.keys):
                    transaction.write(key, unit.event(index) if json_lines else unit.content(index))
                    if rng.random() < 0.1:
                        await asyncio.sleep(rng.uniform(0, 0.05))
                if rng.random() < 0.05:
                    transaction.abort()
                    attempt.outcome, attempt.returned, attempt.error = (
                        UnitOutcome.NOT_APPLIED,
                        world.loop.time(),
                        "aborted",
                    )
                    return
                result = await transaction.commit()
        except CorantoError as error:
            attempt.outcome, attempt.returned = UnitOutcome.of(error.outcome), world.loop.time()
            attempt.error = f"{type(error).__name__}: {error}"
            world.coverage.sometimes(f"several keys: {type(error).__name__} ({error.outcome.value})")
            return
        attempt.outcome, attempt.returned = UnitOutcome.OK, world.loop.time()
        attempt.visible = result.visible
        attempt.positions = {each.segment: (each.begin, each.end) for each in result.positions}
        world.coverage.sometimes("several keys: committed")
        world.coverage.sometimes("several keys: not visible yet", not result.visible)
        world.coverage.sometimes("several keys: in several segments", len(result.positions) > 1)
        if result.visible and rng.random() < 0.3:
            await self._read_back(unit, result)

    async def _read_back(self, unit: Unit, result: MultiKeyResult) -> None:
        """Check that a read after a commit finds it committed in all of its segments, at any broker."""
        world = self._world
        other = world.journal_client("verifier")
        found: list[int] = []
        try:
            async with asyncio.timeout(_TIMEOUT):
                for each in result.positions:
                    head = await other.head(each.journal)
                    content = bytearray()
                    chunks = other.read(
                        each.journal, each.begin, end_offset=head, block=True, direct=False, fail_on_jump=True
                    )
                    async with contextlib.aclosing(chunks):
                        async for chunk in chunks:
                            content += chunk.content
                    messages = parse(bytes(content), json_lines=world.stream_options.json_lines)
                    commits = [commit.messages for commit in committed(messages)]
                    found += [m.part for each in commits for m in each if m.unit == unit.number]
        except (CorantoError, TimeoutError) as error:
            world.coverage.sometimes(f"several keys: read back: {type(error).__name__}")
            return
        world.coverage.sometimes("several keys: a commit was read back")
        if sorted(found) != list(range(unit.events)):
            world.broken.append(f"unread-commit: {unit}: readers have {sorted(found)} of it")
