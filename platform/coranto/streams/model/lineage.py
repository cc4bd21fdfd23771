"""What the segments before one say of a writer with a stable id.

A process that goes on with a writer id must know, for each key, up to which sequence its predecessors' writes are
durable. The segment's own entry tells, or where there is none yet, those of the segments that it succeeded. A segment
that came of a merge has predecessors which may have been written to up to different sequences, each for its own keys;
so they are looked at there even when there is an entry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from coranto.streams.model.registers import Registers
from coranto.streams.model.stream import Segment, Stream


@dataclass(frozen=True, slots=True)
class Floor:
    """What a writer's entry in a segment before says: all up to `sequence` is durable, of the keys of that segment."""

    segment: Segment
    sequence: int
    clock: int

    def covers(self, place: int) -> bool:
        return self.segment.range.contains(place)


@dataclass(slots=True)
class Lineage:
    """The floors that a segment's predecessors have for a writer.

    `forgot` says that for some of the keys there is no entry while one may have been removed or lost.
    """

    floors: list[Floor] = field(default_factory=list)
    forgot: bool = False

    def sequence_of(self, place: int) -> int:
        """The last durable sequence for a place in the key space; -1 when there is none."""
        return max((floor.sequence for floor in self.floors if floor.covers(place)), default=-1)

    @property
    def clock(self) -> int:
        return max((floor.clock for floor in self.floors), default=0)


async def trace(
    stream: Stream,
    segment: Segment,
    label: str,
    has_entry: bool,
    registers_of: Callable[[Segment], Awaitable[tuple[Registers, int] | None]],
) -> Lineage:
    """What the segments before `segment` say of the writer with this label.

    `has_entry` says whether it has an entry in the segment itself. `registers_of` returns a sealed segment's registers
    and head, or None when it is gone.
    """
    lineage = Lineage()
    seen: set[int] = set()

    async def visit(number: int, known: bool) -> None:
        if number in seen:
            return
        seen.add(number)
        predecessor = stream.segments.get(number)
        found = await registers_of(predecessor) if predecessor is not None else None
        if predecessor is None or found is None:
            lineage.forgot |= not known
            return
        registers, head = found
        entry = registers.entries.get(label)
        if entry is not None:
            lineage.floors.append(Floor(predecessor, entry.sequence, entry.clock))
        elif registers.forgot or (not registers.held and head > 0):
            lineage.forgot |= not known
        await go_back(predecessor, entry is not None, known or entry is not None)

    async def go_back(of: Segment, has_entry: bool, known: bool) -> None:
        if has_entry and len(of.predecessors) <= 1:
            return  # What it succeeded was written to before, and less far.
        for number in sorted(of.predecessors):
            await visit(number, known)

    await go_back(segment, has_entry, has_entry)
    return lineage
