"""Units, which are written all or nothing, and attempts to append them.

A `WriteUnit` is one plain event or one transaction, encoded but not stamped. An `Attempt` is an append of
consecutive units to a segment. It has their bytes, stamped with the writer's clocks, and the entry that the writer has
in the segment's registers once the append is applied. An attempt keeps its bytes and clocks as long as it may have been
applied, so the clock of an entry shows which attempts were applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from coranto.client.append.prepared import PreparedAppend
from coranto.client.values import AppendResult
from coranto.errors import CorantoError
from coranto.messages.uuids import Flags, ProducerClock
from coranto.streams.model.pictures import html_table
from coranto.streams.model.registers import Fence, WriterEntry
from coranto.streams.writer.stamping import Stamper
from coranto.tracing import TraceSpan

_OUTSIDE: Final = Flags.OUTSIDE_TXN.value


class EventPosition(NamedTuple):
    """The position of an event: bytes [begin, end) of a segment's journal.

    Both offsets are -1 if the event is durable but its position is unknown: if an earlier attempt wrote it
    (`deduplicated`), or the journal cannot be read.
    """

    segment: int
    journal: str
    begin: int
    end: int
    deduplicated: bool = False


class CommitResult(NamedTuple):
    """A committed transaction: bytes [begin, end) of a segment's journal, including its transaction end.

    `mod_revision` is the etcd revision that the broker knew. `deduplicated` means that an earlier attempt committed the
    transaction. A transaction without events has only a `key_hash`: its journal is empty, and its other numbers are -1.
    """

    journal: str
    segment: int
    begin: int
    end: int
    key_hash: int
    mod_revision: int
    sequence: int
    deduplicated: bool = False

    def _repr_html_(self) -> str:
        return html_table(self._fields, [self])


Done: TypeAlias = asyncio.Future[EventPosition] | asyncio.Future[CommitResult]


class WriteUnit:
    """One event or transaction. `order` numbers all units of a stream writer, and `key_hash` is the hash of its key.

    `sequence` is from the user, if any. `size` is in bytes of the journal. `begun` is when the commit of a transaction
    began, in monotonic seconds.
    """

    __slots__ = (
        "begun",
        "done",
        "events",
        "expected_offset",
        "fence",
        "is_transaction",
        "key_hash",
        "order",
        "sequence",
        "size",
        "span",
    )

    def __init__(
        self,
        order: int,
        key_hash: int,
        events: Sequence[bytes],
        size: int,
        done: Done,
        *,
        is_transaction: bool = False,
        sequence: int | None = None,
        expected_offset: int | None = None,
        fence: Fence | None = None,
        begun: float = 0.0,
    ) -> None:
        self.order = order
        self.key_hash = key_hash
        self.events = events
        self.size = size
        self.done = done
        self.is_transaction = is_transaction
        self.sequence = sequence
        self.expected_offset = expected_offset
        self.fence = fence
        self.begun = begun
        self.span: TraceSpan | None = None

    @property
    def is_conditional(self) -> bool:
        return self.expected_offset is not None or self.fence is not None


class Attempt:
    """An attempt to append units; see the module. `sequences` and `clocks` are the sequence and first clock of each.

    It is `doubtful` once it was sent and the answer was lost. It may then still be applied, until the entry that it
    checks is replaced.
    """

    __slots__ = (
        "_clocks",
        "_content",
        "_stamper",
        "after",
        "append",
        "doubtful",
        "error",
        "result",
        "sequences",
        "task",
        "units",
    )

    def __init__(
        self,
        units: Sequence[WriteUnit],
        sequences: Sequence[int],
        clocks: Sequence[int],
        after: WriterEntry,
        stamper: Stamper,
    ) -> None:
        self.units = units
        self.sequences = sequences
        self.after = after
        self.doubtful = False
        self.result: AppendResult | None = None
        self.error: CorantoError | None = None
        self.append: PreparedAppend | None = None
        self.task: asyncio.Task[None] | None = None
        self._clocks = clocks
        self._stamper = stamper
        self._content: bytes | None = None

    @property
    def content(self) -> bytes:
        """The bytes of the append. They are stamped at the first access, when the append has already begun."""
        if self._content is None:
            self._content = self._stamped()
        return self._content

    @property
    def first_clock(self) -> int:
        return self._clocks[0]

    @property
    def clock(self) -> int:
        """The clock of its last message. An entry with this clock or a later one means that it was applied."""
        return self.after.clock

    @property
    def is_conditional(self) -> bool:
        return self.units[0].is_conditional  # A conditional unit is always alone in an attempt.

    @property
    def is_answered(self) -> bool:
        """True if it was sent, and has succeeded or failed."""
        return self.result is not None or self.error is not None

    def _stamped(self) -> bytes:
        stamper, pieces = self._stamper, list[bytes]()
        for unit, sequence, clock in zip(self.units, self.sequences, self._clocks, strict=True):
            if unit.is_transaction:
                pieces.append(stamper.transaction(unit.events, clock, sequence))
            else:
                pieces.append(stamper.event(unit.events[0], clock, _OUTSIDE))
        return b"".join(pieces)


def plan(
    units: Sequence[WriteUnit],
    sequences: Sequence[int],
    session: int,
    clock: ProducerClock,
    stamper: Stamper,
    *,
    hint: int,
    used: int,
) -> Attempt:
    """Plan an attempt to append units, with new clocks. `session`, `hint` and `used` are as in `WriterEntry`."""
    clocks = [clock.ticks(len(unit.events) + unit.is_transaction) for unit in units]
    return Attempt(units, sequences, clocks, WriterEntry(session, sequences[-1], clock.last, hint, used), stamper)
