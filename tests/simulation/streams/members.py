"""The readers of a reader group, in processes that join, leave, die and are fenced out, and the operator of the group.

The events that they got, and their own notes, are kept here for the checks of `sharing`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coranto.errors import CheckpointRefused, CorantoError, ReaderOffline, StreamNotFound
from coranto.streams.groups.group_reader import GroupReader
from coranto.streams.groups.reader_groups import ReaderGroup
from coranto.streams.model.positions import StreamPosition
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.timeline import Process
from tests.simulation.broker.world import Host

from .follower import parts_of
from .ledger import Ledger
from .world import STREAM, StreamWorld

GROUP = "sim"
_BEAT, _TIMEOUT = 0.5, 2.5


class Given(NamedTuple):
    """Events that a reader got in one call: a whole transaction, or one event."""

    token: str
    segment: int
    unit: int
    indexes: tuple[int, ...]
    whole: bool


@dataclass(slots=True)
class Notes:
    """The observations of a group. A token identifies one reader in one process."""

    given: list[Given] = field(default_factory=list)
    events: set[tuple[int, int]] = field(default_factory=set)
    """Units and the places of events in them that any reader got."""
    marks: dict[tuple[str, str], int] = field(default_factory=dict)
    """By token and checkpoint: the number of all given entries when the reader passed its mark."""
    left: set[str] = field(default_factory=set)
    """Readers that left regularly and were never suspended: they have consumed all their events."""
    checkpoints: dict[str, StreamPosition] = field(default_factory=dict)
    """Complete checkpoints, with their reported positions."""
    through: dict[str, int] = field(default_factory=dict)
    """By token: the number of all given entries when the reader had last finished all of its own."""


class Member(Host):
    """A machine with one reader of the group at a time."""

    def __init__(self, world: StreamWorld, number: int, notes: Notes) -> None:
        super().__init__(world, f"member-{number}", "")
        self._world = world
        self._rng = world.rng
        self._notes = notes
        self._number = number
        self.quiet = False
        """True once no more faults hit it."""

    async def serve(self, process: Process) -> None:
        world, rng = self._world, self._rng
        clock = SimClock(world.loop, process)
        client = world.journal_client(self.name, process, clock)
        group = ReaderGroup(client, STREAM, GROUP, clock=clock, entropy=rng.randbytes)
        auto = rng.random() < 0.6

        async def keep(checkpoint: str) -> None:
            if rng.random() < 0.3:
                await clock.sleep(rng.uniform(0, 0.1))
            process.check_alive()
            self._notes.marks[reader._token, checkpoint] = self._notes.through[reader._token] = len(self._notes.given)

        name = self.name if rng.random() < 0.6 else f"{self.name}-{process.name}"
        reader: GroupReader[Any] = group.reader(
            name, auto_commit=auto, on_checkpoint=keep, beat=_BEAT, timeout=_TIMEOUT
        )
        self._harm(process)
        until = clock.monotonic() + rng.uniform(1, 8) if rng.random() < 0.4 else None
        try:
            async with reader:
                await self._read(reader, process, clock, until, auto=auto)
        except ReaderOffline:
            world.coverage.sometimes("group: a reader was told that it is out")
            return
        if auto and process not in self.suspended and not world.stream_options.faults:
            self._notes.left.add(reader._token)
        world.coverage.sometimes("group: a reader left")
        if reader.is_finished:
            world.coverage.sometimes("group: a reader was finished")
            self.stays_down = True

    def _harm(self, process: Process) -> None:
        """Perhaps kill or suspend the process later."""
        world, rng = self._world, self._rng
        kind = rng.random()
        if self.quiet or kind < 0.3:
            return
        if kind < 0.65:
            world.loop.later(rng.uniform(0.2, 6.0), self._die, process)
            return
        self.suspended.append(process)
        world.loop.later(rng.uniform(0.2, 4.0), process.pause)
        world.loop.later(rng.uniform(4.0, 12.0), process.resume)

    def _die(self, process: Process) -> None:
        if process.alive and not self.quiet:
            self._world.coverage.sometimes("group: a reader died")
            process.kill()

    async def _read(
        self, reader: GroupReader[Any], process: Process, clock: SimClock, until: float | None, *, auto: bool
    ) -> None:
        rng, notes = self._rng, self._notes
        whole = rng.random() < 0.7
        begun = 0
        while until is None or clock.monotonic() < until or reader._rest:
            if not reader._rest:
                begun = len(notes.given)  # The next transaction will begin here.
            if auto:
                notes.through[reader._token] = len(notes.given)
            try:
                async with asyncio.timeout(None if until is None else 0.5):
                    events = await self._next(reader, whole=whole)
            except TimeoutError:
                continue
            process.check_alive()
            if events is None:
                if reader.is_finished:
                    return
                await self._commit(reader, begun)
                continue
            unit = events[0][1]
            notes.given.append(Given(reader._token, events[0][0], unit, tuple(index for _, _, index in events), whole))
            notes.events.update((unit, index) for _, _, index in events)
            if not auto and rng.random() < 0.1:
                await self._commit(reader, begun)
            if rng.random() < 0.02:
                await clock.sleep(rng.uniform(0, 0.3))
        if auto:
            notes.through[reader._token] = len(notes.given)

    async def _commit(self, reader: GroupReader[Any], begun: int) -> None:
        """Commit. Within a transaction, only the events before it count."""
        self._notes.through[reader._token] = begun if reader._rest else len(self._notes.given)
        await reader.commit()

    async def _next(self, reader: GroupReader[Any], *, whole: bool) -> list[tuple[int, int, int]] | None:
        if not whole:
            try:
                event = await anext(reader)
            except StopAsyncIteration:
                return None
            return [(event.segment, *parts_of(event.data))]
        transaction = await reader.next_transaction()
        if transaction is None:
            return None
        return [(transaction.segment, *parts_of(event.data)) for event in transaction.events]


class Keeper(Host):
    """An operator that initiates checkpoints, and sometimes resets the group to one."""

    def __init__(self, world: StreamWorld, notes: Notes) -> None:
        super().__init__(world, "keeper", "")
        self._world = world
        self._rng = world.rng
        self._notes = notes
        self._named = 0

    async def serve(self, process: Process) -> None:
        world, rng = self._world, self._rng
        clock = SimClock(world.loop, process)
        client = world.journal_client(self.name, process, clock)
        group = ReaderGroup(client, STREAM, GROUP, clock=clock, entropy=rng.randbytes)
        while True:
            await clock.sleep(rng.expovariate(1.0))
            self._named += 1
            name = f"c{self._named}"
            try:
                async with asyncio.timeout(rng.choice((1.0, 10.0))):
                    position = await group.initiate_checkpoint(name)
            except (TimeoutError, CheckpointRefused):
                continue
            process.check_alive()
            self._notes.checkpoints[name] = position
            world.coverage.sometimes("group: a checkpoint was complete")
            if rng.random() < 0.1:
                world.coverage.sometimes("group: went back to a checkpoint")
                try:
                    await group.reset(position)
                except CorantoError as error:
                    world.loop.note(f"the group does not go back: {error}")


class Group:
    def __init__(self, world: StreamWorld, members: int) -> None:
        self.notes = Notes()
        self._world = world
        self._members = [Member(world, number, self.notes) for number in range(members)]
        self._keeper = Keeper(world, self.notes)

    @classmethod
    async def of(cls, world: StreamWorld, members: int) -> Group:
        client = world.journal_client("prover", retry_timeout=100.0)
        group = ReaderGroup(client, STREAM, GROUP, clock=world.client_clock, entropy=world.rng.randbytes)
        async with asyncio.timeout(100.0):
            while True:
                try:
                    await group.create()
                    return cls(world, members)
                except StreamNotFound:  # The stream is new, so a broker may not know it yet.
                    await asyncio.sleep(0.1)

    @property
    def hosts(self) -> list[Member | Keeper]:
        return [*self._members, self._keeper]

    def calm(self) -> None:
        """Inject no more faults into the readers."""
        self._keeper.end()
        for member in self._members:
            member.quiet = True

    def is_finished(self) -> bool:
        """Return True if all readers have reached the end of the stream."""
        return all(member.stays_down and not member.is_up for member in self._members)

    def end(self) -> None:
        for host in self.hosts:
            host.end()

    def cover(self, ledger: Ledger) -> None:
        """Note the paths that the run took."""
        coverage = self._world.coverage
        for holding in ledger.holdings:
            coverage.sometimes(f"group: a segment was {holding.ended_by or 'held'}")
        coverage.sometimes("group: a segment was taken up by another one", len(ledger.holdings) > len(ledger.at))
        given = sum(len(each.indexes) for each in self.notes.given)
        coverage.sometimes("group: events came again after a death", given > len(self.notes.events))
