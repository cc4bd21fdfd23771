"""The state of a writer with a stable id in the segments before a given segment.

A process that continues a writer id must know, for each key, the last durable sequence of earlier processes' writes.
The writer's entry in the segment has this sequence. Before there is an entry, the entries in the segment's predecessors
have it. The predecessors of a merged segment may have been written up to different sequences, each for its own keys; so
after a merge they are examined even if the segment has an entry.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from coranto.streams.model.registers import Registers
from coranto.streams.model.stream import Segment, Stream


@dataclass(frozen=True, slots=True)
class Floor:
    """A writer's entry in an earlier segment: its writes to that segment's keys are durable up to `sequence`."""

    segment: Segment
    sequence: int
    clock: int

    def covers(self, key_hash: int) -> bool:
        return self.segment.range.contains(key_hash)


@dataclass(slots=True)
class Lineage:
    """The floors of a writer in the segments before a given segment.

    `forgot` is true if some of the keys have no entry, but may have had an entry that was removed or lost.
    """

    floors: list[Floor] = field(default_factory=list)
    forgot: bool = False

    def sequence_of(self, key_hash: int) -> int:
        """Return the last durable sequence for a key hash; -1 if there is none."""
        return max((floor.sequence for floor in self.floors if floor.covers(key_hash)), default=-1)

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
    """Collect the lineage of the writer with this label from the segments before `segment`.

    `has_entry` is true if the writer has an entry in the segment itself. `registers_of` returns a sealed segment's
    registers and head; None if the segment is gone.
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
            return  # The only predecessor was written earlier, up to a lower sequence.
        for number in sorted(of.predecessors):
            await visit(number, known)

    await go_back(segment, has_entry, has_entry)
    return lineage
