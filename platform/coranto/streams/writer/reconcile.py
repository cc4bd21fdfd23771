"""A writer's knowledge of a segment, and how it determines the outcome of its appends.

`Reconciler` is the part of a `SegmentWriter` that decides which units are durable, which have failed, and which must be
sent again. It decides this from answers, or from the segment's registers if answers are missing.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from coranto.client.retry import Retry
from coranto.errors import (
    CorantoError,
    PositionUnknown,
    PreconditionFailed,
    WriterExpired,
    WriterFenced,
)
from coranto.messages.uuids import clock_to_ns
from coranto.streams.model import registers as rules
from coranto.streams.model.events import TransactionEnd
from coranto.streams.model.lineage import Lineage
from coranto.streams.model.registers import Fence, Registers, WriterEntry, WriterStatus
from coranto.streams.model.stream import Segment
from coranto.streams.writer.failures import failure_of
from coranto.streams.writer.handshake import handshake
from coranto.streams.writer.locating import find_append, find_transaction
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import Attempt, CommitResult, EventPosition, WriteUnit


class Reconciler:
    """The outcomes of a writer's appends to one segment; see the module."""

    def __init__(self, shared: Shared, segment: Segment, before: Callable[[int], Sequence[Segment]]) -> None:
        """`before` returns the segments before this one for a place in the key space, the latest first."""
        self.segment = segment
        self._before = before
        self._shared = shared
        self._retry = Retry(shared.patience)
        self._queue: deque[WriteUnit] = deque()
        self._again: deque[Attempt] = deque()  # Attempts to send again, before the queue.
        self._in_flight: deque[Attempt] = deque()
        self._registers: Registers | None = None  # Registers to enter with; None before the first contact.
        self._entry: WriterEntry | None = None  # The entry in the registers, once everything in flight is settled.
        self._taken_from: int | None = None
        self._entered = False  # True once the registers had an entry of our session.
        self._lineage = Lineage()
        self._end = 0  # The beginning of a message, at or before that of our next append.

    @property
    def oldest(self) -> float:
        """The order of the first unit that is neither durable nor failed; infinite if there is none."""
        firsts = [attempts[0].units[0] for attempts in (self._in_flight, self._again) if attempts]
        return min([unit.order for unit in [*firsts, *([self._queue[0]] if self._queue else [])]], default=math.inf)

    # -- Durable ----------------------------------------------------------------------------------------------

    def _applied(self, attempt: Attempt) -> None:
        assert attempt.result is not None
        self._retry.progressed()
        self._entry = attempt.after
        self._entered = True
        if self._registers is not None and not self._registers.held:
            self._registers = Registers.of(attempt.result.registers)
        self._end = attempt.result.end
        revision = attempt.result.header.etcd.revision
        self._succeed(attempt, attempt.result.begin, revision)

    def _succeed(self, attempt: Attempt, begin: int, revision: int) -> None:
        """Settle the units of an attempt as durable. The first one is at `begin`, or at -1 if that is not known."""
        shared, segment = self._shared, self.segment
        for unit, sequence in zip(attempt.units, attempt.sequences, strict=True):
            end = begin + unit.size if begin >= 0 else -1
            if not unit.is_transaction:
                shared.succeed(unit, EventPosition(segment.number, segment.journal, begin, end))
            elif begin >= 0:
                shared.succeed(
                    unit, CommitResult(segment.journal, segment.number, begin, end, unit.place, revision, sequence)
                )
            else:
                shared.fail(unit, self._no_position(sequence))
            begin = end

    def _deduplicate(self, unit: WriteUnit) -> None:
        """Settle a unit of which an earlier attempt is durable."""
        segment = self.segment
        if unit.is_transaction:
            self._shared.find(unit, self._find(unit))
        else:
            self._shared.succeed(unit, EventPosition(segment.number, segment.journal, -1, -1, deduplicated=True))

    async def _find(self, unit: WriteUnit) -> None:
        """Find an earlier attempt at a transaction, here or in a segment before, and settle the unit with its place."""
        shared = self._shared
        assert unit.sequence is not None
        wanted = TransactionEnd(shared.identity.writer, unit.sequence)
        is_last = self._entry is not None and self._entry.sequence == unit.sequence
        hint = self._entry.hint if self._entry is not None and is_last else 0
        places = [(self.segment, max(self.segment.begin, hint))]
        places += [(segment, segment.begin) for segment in self._before(unit.place)]
        for segment, begin in places:
            found = await find_transaction(
                shared.client, segment.journal, shared.events, shared.identity.producer, wanted, begin
            )
            if found is not None:
                result = CommitResult(segment.journal, segment.number, *found, unit.place, -1, unit.sequence, True)
                shared.succeed(unit, result)
                return
        shared.fail(unit, self._no_position(unit.sequence))

    def _no_position(self, sequence: int) -> PositionUnknown:
        return PositionUnknown(
            f"{self.segment.journal}: transaction {sequence} of writer {self._shared.identity.writer} is durable, as "
            "its registers say, but was not found in its content: that was truncated away or cannot be read, or this "
            "was never the sequence of a transaction"
        )

    # -- From the registers --------------------------------------------------------------------------------------------

    async def _resolve_in_flight(self) -> None:
        """Wait for all attempts in flight. Settle those known to be applied, and queue the rest to be sent again.

        If a later append was applied, so were all before it.
        """
        attempts = list(self._in_flight)
        if attempts:
            await asyncio.wait([attempt.task for attempt in attempts if attempt.task is not None])
        last = max((number for number, attempt in enumerate(attempts) if attempt.result is not None), default=-1)
        for attempt in attempts[: last + 1]:
            # An applied append is conditioned on all before it.
            await self._resolve_applied(attempt)
            self._in_flight.popleft()
        self._again = deque([*self._in_flight, *self._again])
        self._in_flight.clear()

    async def _resolve_applied(self, attempt: Attempt) -> None:
        if attempt.result is not None:
            self._applied(attempt)
            return
        self._retry.progressed()
        self._entry, self._entered = attempt.after, True
        shared = self._shared
        begin = await find_append(
            shared.client,
            self.segment.journal,
            shared.events,
            shared.identity.producer,
            attempt.first_clock,
            self._end,
        )
        self._succeed(attempt, -1 if begin is None else begin, -1)

    async def _reconcile(self, registers: Registers, head: int) -> None:
        """Settle what the registers show to be applied, and prepare to send the rest again."""
        identity = self._shared.identity
        status = rules.writer_status(registers, head, identity, self._taken_from)
        if status is WriterStatus.LOST:
            registers, head = await handshake(self._shared, self.segment.journal)
            status = rules.writer_status(registers, head, identity, self._taken_from)
        self._registers = registers
        entry = registers.entries.get(identity.label)
        if status is WriterStatus.OURS:
            assert entry is not None
            await self._resolve_through(entry)
        elif status is WriterStatus.TAKEN_OVER:
            # The former process may have appended more since. Plan the attempts again, based on its new entry.
            assert entry is not None
            if entry != self._entry:
                self._adopt_entry(entry)
                self._queue.extendleft(reversed(self._plans()))
                self._again.clear()
        elif status is WriterStatus.FOREIGN:
            self._fenced()
        elif status is WriterStatus.FORGOTTEN:
            self._forgotten()
        else:
            self._entry = None
        self._check_fences(registers)

    async def _resolve_through(self, entry: WriterEntry) -> None:
        """Settle by an entry of our session: the attempts that it covers were applied, and the rest were not."""
        while self._again and self._again[0].clock <= entry.clock:
            await self._resolve_applied(self._again.popleft())
        if not self._entered or self._entry is None or entry.clock > self._entry.clock:
            # The entry is from an attempt that was given up, but was applied after all.
            self._entry, self._entered = entry, True

    def _fenced(self) -> NoReturn:
        """Stop the writer: the entry is from another process that continues this writer's id. Raises WriterFenced."""
        self._shared.dead = WriterFenced(
            f"another process writes under the writer id {self._shared.identity.writer} now: {self.segment.journal} "
            "has its session. Stop this one"
        )
        raise self._shared.dead

    def _forgotten(self) -> None:
        """Handle an entry that was removed or lost. Raises WriterExpired if it is not known what was applied."""
        identity = self._shared.identity
        entered, self._entered, self._entry = self._entered, False, None
        doubtful = any(attempt.doubtful for attempt in self._again)
        what = f"writer {identity.writer} is not known to {self.segment.journal} any more"
        if identity.stable and (entered or not self._shared.fresh):
            self._shared.dead = WriterExpired(what)
            raise self._shared.dead
        if doubtful:
            raise WriterExpired(what)

    def _check_fences(self, registers: Registers) -> None:
        """Fail the first attempt if its fence does not hold, because then it never will again."""
        fence = self._again[0].units[0].fence if self._again else None
        if fence is not None and registers.token_of(fence.name) != fence.token:
            self._refuse_fence(self._again.popleft(), fence, registers)

    def _refuse_fence(self, attempt: Attempt, fence: Fence, registers: Registers) -> None:
        actual = registers.token_of(fence.name)
        self._refuse(
            attempt,
            PreconditionFailed(
                f"fence {fence.name} of {self.segment.journal} "
                f"{'was raised by another' if actual else 'is not raised here'}; nothing was written",
                actual,
            ),
        )

    async def _resolve_sealed(self, registers: Registers, head: int) -> None:
        """Settle by the registers of a sealed segment, which no longer change."""
        identity = self._shared.identity
        status = rules.writer_status(registers, head, identity, self._taken_from)
        if status is WriterStatus.OURS:
            await self._resolve_through(registers.entries[identity.label])
        elif status is WriterStatus.FOREIGN and self._registers is not None:
            self._fenced()
        elif status is WriterStatus.FORGOTTEN:
            self._forgotten()
        if status is not WriterStatus.LOST:
            for attempt in self._again:
                attempt.doubtful = False  # It was not applied, and can no longer be.

    def _adopt_entry(self, entry: WriterEntry) -> None:
        """Continue from an entry of an earlier session."""
        self._entry = entry
        self._shared.ticks.update(clock_to_ns(entry.clock))

    # -- Failing -------------------------------------------------------------------------------------------------------

    def _plans(self) -> list[WriteUnit]:
        return [unit for attempt in self._again for unit in attempt.units]

    def _taken_back(self) -> list[Attempt]:
        attempts = [*self._in_flight, *self._again]
        for attempt in self._in_flight:
            attempt.doubtful |= not attempt.is_answered
        self._in_flight.clear()
        self._again.clear()
        return attempts

    def _refuse(self, attempt: Attempt, error: CorantoError) -> None:
        """Fail an attempt by its own condition, without effect on others."""
        for unit in attempt.units:
            self._shared.fail(unit, error)

    def _fail_from(self, error: CorantoError, attempts: Sequence[Attempt]) -> None:
        """Fail attempts and all queued units: the first with the error, and those that may be durable as unknown."""
        self._retry.progressed()  # Later units get the whole patience again.
        failed = [(unit, attempt.doubtful) for attempt in attempts for unit in attempt.units]
        failed += [(unit, False) for unit in self._queue]
        self._queue.clear()
        for number, (unit, doubtful) in enumerate(failed):
            self._shared.fail(unit, failure_of(error, doubtful=doubtful, first=number == 0))

    # -- Its parts -----------------------------------------------------------------------------------------------------

    @property
    def _planned(self) -> int:
        """The sequence of the last unit in flight, or else of the last durable one; -1 if there is none."""
        if self._in_flight:
            return self._in_flight[-1].after.sequence
        return self._entry.sequence if self._entry is not None else -1

    def _durable(self, place: int) -> int:
        own = self._entry.sequence if self._entry is not None else -1
        return max(own, self._lineage.sequence_of(place))
