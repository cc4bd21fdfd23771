"""A program that reads the stream while it is written, by whole transactions, and survives its own deaths."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from coranto.streams.model.positions import StreamPosition
from coranto.streams.reader.stream_reader import StreamReader
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.timeline import Process
from tests.simulation.broker.world import Host

from .anomalies import Anomaly
from .checker import Place, stands_of
from .history import History
from .several import Part
from .world import STREAM, StreamWorld


class Follower(Host):
    """A reader that stores its results and its position atomically, as in a database."""

    def __init__(self, world: StreamWorld, number: int) -> None:
        super().__init__(world, f"reader-{number}", "")
        self.delivered: list[list[tuple[int, int]]] = []
        """Transactions, as units and the places of their events in them."""
        self._position: str | None = None
        self._world = world

    @property
    def events(self) -> int:
        return sum(map(len, self.delivered))

    async def serve(self, process: Process) -> None:
        world, rng = self._world, self._world.rng
        if rng.random() < 0.7:
            world.loop.later(rng.uniform(0.5, 6.0), process.kill)
        clock = SimClock(world.loop, process)
        client = world.journal_client(self.name, process, clock)
        begin = StreamPosition.from_json(self._position) if self._position is not None else None
        reader: StreamReader[Any] = StreamReader(client, STREAM, begin=begin, block=True, clock=clock)
        async with reader:
            async for transaction in reader.transactions():
                events = [parts_of(event.data) for event in transaction.events]
                process.check_alive()
                self.delivered.append(events)
                self._position = reader.position().to_json()
        self.stays_down = True  # The stream is sealed and read completely.


class Reads(Protocol):
    """The transactions that a reader got, as units and the places of their events in them."""

    name: str
    delivered: list[list[tuple[int, int]]]


def parts_of(data: Any) -> tuple[int, int]:
    """Identify an event: its unit, and its place in the unit."""
    event = json.loads(data) if isinstance(data, bytes) else data
    return event["unit"], event["index"]


def check_delivered(
    history: History,
    places: Mapping[int, Place],
    follower: Reads,
    *,
    may_see_uncommitted: bool,
    several: Mapping[int, Sequence[Part]] | None = None,
) -> Sequence[Anomaly]:
    """Check that a reader gets each written unit whole and once, and the units of a key in the order of the segments.

    For transactions on several keys (`several`), that holds for the part in each segment. Anomalies are named `unread`,
    `read-torn`, `read-again`, `read-phantom` and `read-reordered`.
    """
    found: list[Anomaly] = []
    who = follower.name
    expected = stands_of(history, places, several or {})
    seen: Counter[tuple[int, int]] = Counter()
    latest: dict[str, tuple[int, int]] = {}
    for events in follower.delivered:
        number, indexes = events[0][0], tuple(index for _, index in events)
        unit = history.units[number]
        stands = expected.get(number, [])
        stand = next((each for each in stands if each.indexes == indexes), None)
        if {each for each, _ in events} != {number} or (stands and stand is None):
            found.append(Anomaly("read-torn", f"{who} got {events} together, of {unit}"))
            continue
        if stand is None:
            if not may_see_uncommitted:
                found.append(Anomaly("read-phantom", f"{who} got a unit that is not in the stream: {unit}"))
            continue
        seen[number, stand.segment] += 1
        for key in {unit.key_of(index) for index in indexes}:
            if latest.get(key, (-1, -1)) > (stand.segment, stand.end):
                found.append(Anomaly("read-reordered", f"{who} got {unit} too late"))
            latest[key] = stand.segment, stand.end
    found += [Anomaly("read-again", f"{who}: {history.units[n]}") for (n, _), count in seen.items() if count > 1]
    missing = [n for n, stands in expected.items() for stand in stands if (n, stand.segment) not in seen]
    if missing:
        found.append(Anomaly("unread", f"{who} did not get {missing[:10]}, such as {history.units[missing[0]]}"))
    return found
