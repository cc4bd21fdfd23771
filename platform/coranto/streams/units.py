"""What a writer appends: units that are all or nothing, and attempts at appending some of them.

A `Unit` is one plain event or one transaction, encoded but not stamped. An `Attempt` is an append of consecutive units
of a segment: their bytes, stamped with the writer's clocks, and the entry that the writer has in the segment's
registers once it is applied. An attempt keeps its bytes and clocks as long as it may have been applied, so the clock of
an entry tells which attempts were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from coranto.client.values import AppendResult
from coranto.errors import CorantoError
from coranto.messages.uuids import Clock, Flags
from coranto.streams.registers import Entry, Fence
from coranto.streams.stamping import Stamper


class EventPosition(NamedTuple):
    """Where an event stands: bytes [begin, end) of a segment's journal.

    Both are -1 when it is durable but its place is not known: when it was written by an earlier attempt
    (`deduplicated`), or the journal cannot be read.
    """

    segment: int
    journal: str
    begin: int
    end: int
    deduplicated: bool = False


class CommitResult(NamedTuple):
    """A committed transaction: bytes [begin, end) of a segment's journal, its transaction end included.

    `mod_revision` is etcd's as the broker knew it. `deduplicated` says that an earlier attempt had committed it. Of a
    transaction without events nothing is known but the key: its journal is empty, and its numbers are -1.
    """

    journal: str
    segment: int
    begin: int
    end: int
    key_hash: int
    mod_revision: int
    sequence: int
    deduplicated: bool = False


Done: TypeAlias = asyncio.Future[EventPosition] | asyncio.Future[CommitResult]


class Unit:
    """One event or transaction. `order` counts up over all that a writer is given, `place` is its key's.

    `sequence` is what the user gave, if anything. `size` is in bytes of the journal.
    """

    __slots__ = ("done", "events", "expected_offset", "fence", "is_transaction", "order", "place", "sequence", "size")

    def __init__(
        self,
        order: int,
        place: int,
        events: Sequence[bytes],
        size: int,
        done: Done,
        *,
        is_transaction: bool = False,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
    ) -> None:
        self.order = order
        self.place = place
        self.events = events
        self.size = size
        self.done = done
        self.is_transaction = is_transaction
        self.sequence = sequence
        self.expected_offset = expected_offset
        self.fence = fence

    @property
    def is_conditional(self) -> bool:
        return self.expected_offset is not None or self.fence is not None


@dataclass(slots=True, eq=False)
class Attempt:
    """See the module. `sequences` are those of its units.

    `doubtful` once it was sent and the answer was lost: it may still be applied, until the entry that it checks is
    replaced.
    """

    units: Sequence[Unit]
    content: bytes
    first_clock: int
    after: Entry
    sequences: Sequence[int]
    tries: int = 0
    doubtful: bool = False
    result: AppendResult | None = None
    error: CorantoError | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def clock(self) -> int:
        """The clock of its last message: entries with this one or a later one say that it is applied."""
        return self.after.clock

    @property
    def is_conditional(self) -> bool:
        return self.units[0].is_conditional  # Such a unit is alone.

    @property
    def is_answered(self) -> bool:
        """Whether it was sent, and was applied or had an error."""
        return self.result is not None or self.error is not None


def encode(
    units: Sequence[Unit],
    sequences: Sequence[int],
    session: int,
    clock: Clock,
    stamper: Stamper,
    *,
    hint: int,
    used: int,
) -> Attempt:
    """An attempt at appending units, stamped by `clock`. `session`, `hint` and `used` are as `Entry` has them."""
    pieces: list[bytes] = []
    first = 0
    for unit, sequence in zip(units, sequences, strict=True):
        flags = (Flags.CONTINUE_TXN if unit.is_transaction else Flags.OUTSIDE_TXN).value
        events = unit.events
        begin = clock.ticks(len(events) + unit.is_transaction)
        first = first or begin
        if unit.is_transaction:
            pieces += stamper.events(events, begin, flags)
            pieces.append(stamper.transaction_end(clock.last, sequence))
        else:
            pieces.append(stamper.event(events[0], begin, flags))
    after = Entry(session, sequences[-1], clock.last, hint, used)
    return Attempt(units, b"".join(pieces), first, after, sequences)
