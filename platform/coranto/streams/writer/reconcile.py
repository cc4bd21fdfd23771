"""A writer's knowledge of a segment, and how it determines the outcome of its appends.

A `Reconciler` determines which units are durable, which have failed, and which must be resent. It uses the answers, or
the segment's registers if answers are missing.
"""

from __future__ import annotations

import asyncio
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
from coranto.streams.writer.attempt_queue import AttemptQueue
from coranto.streams.writer.failures import failure_of
from coranto.streams.writer.handshake import handshake
from coranto.streams.writer.locating import find_append, find_transaction
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import Attempt, CommitResult, EventPosition, WriteUnit


class Reconciler:
    """The outcomes of a writer's appends to one segment; see the module."""

    def __init__(self, shared: Shared, segment: Segment, before: Callable[[int], Sequence[Segment]]) -> None:
        """`before` returns the segments before this one for a key hash, the latest first."""
        self.segment = segment
        self._before = before
        self._shared = shared
        self.retry = Retry(shared.retry_timeout)
        self.queue = AttemptQueue()
        self.registers: Registers | None = None
        """The registers to enter with; None before the first handshake."""
        self.entry: WriterEntry | None = None
        """The writer's entry in the registers, once everything in flight is resolved."""
        self.entered = False
        """True once the registers had an entry of this session."""
        self.end = 0
        """An offset where a message begins, at or before the beginning of the next append."""
        self._reported_end = 0  # The largest end of the segment that an append has reported.
        self._taken_from: int | None = None  # The session that this one continues.
        self.lineage = Lineage()
        """The writer's entries in the segments before this one."""

    def begin(self, registers: Registers, head: int, lineage: Lineage) -> None:
        """Begin with the registers and the head from the handshake. Raises WriterExpired and WriterFenced."""
        shared, identity = self._shared, self._shared.identity
        shared.require_alive()  # The handshake with another segment may have ended the writer.
        entry = registers.entries.get(identity.label)
        self.lineage = lineage
        if identity.stable and entry is None and not shared.fresh and (registers.forgot or lineage.forgot):
            shared.dead = WriterExpired(
                f"{self.segment.journal} has no entry of writer {identity.writer}, but has lost or removed "
                "entries: its earlier writes, if any, are unknown"
            )
            raise shared.dead
        if entry is not None:
            if not identity.stable:
                shared.dead = WriterFenced(f"{self.segment.journal} has an entry of another writer of the same id")
                raise shared.dead
            self._taken_from = entry.session
            self._continue_from(entry)
        shared.ticks.update(clock_to_ns(lineage.clock))
        if identity.stable and entry is None and registers.expired is not None:
            # A removed entry may have been of this writer id, so continue after its clock. Writers without an id
            # have never written before, so they must not inherit a clock that is ahead.
            shared.ticks.update(clock_to_ns(registers.expired.clock))
        self.end = max(self.end, head)
        self.registers = registers

    # -- Durable -------------------------------------------------------------------------------------------------------

    def applied(self, attempt: Attempt) -> None:
        assert attempt.result is not None
        self.retry.progressed()
        self.entry = attempt.after
        self.entered = True
        if self.registers is not None and not self.registers.held:
            self.registers = Registers.of(attempt.result.registers)
        self.end = attempt.result.end
        revision = attempt.result.header.etcd.revision
        self._succeed(attempt, attempt.result.begin, revision)

    def _succeed(self, attempt: Attempt, begin: int, revision: int) -> None:
        """Resolve the units of an attempt as durable. The first unit begins at `begin`; -1 if that is unknown."""
        shared, segment = self._shared, self.segment
        for unit, sequence in zip(attempt.units, attempt.sequences, strict=True):
            end = begin + unit.size if begin >= 0 else -1
            if not unit.is_transaction:
                shared.succeed(unit, EventPosition(segment.number, segment.journal, begin, end))
            elif begin >= 0:
                shared.succeed(
                    unit, CommitResult(segment.journal, segment.number, begin, end, unit.key_hash, revision, sequence)
                )
            else:
                shared.fail(unit, self._no_position(sequence))
            begin = end

    def deduplicate(self, unit: WriteUnit) -> None:
        """Resolve a unit that an earlier attempt has made durable."""
        segment = self.segment
        if unit.is_transaction:
            self._shared.find(unit, self._find(unit))
        else:
            self._shared.succeed(unit, EventPosition(segment.number, segment.journal, -1, -1, deduplicated=True))

    async def _find(self, unit: WriteUnit) -> None:
        """Find an earlier attempt at a transaction, in this segment or before, and resolve the unit by it."""
        shared = self._shared
        assert unit.sequence is not None
        wanted = TransactionEnd(shared.identity.writer, unit.sequence)
        is_last = self.entry is not None and self.entry.sequence == unit.sequence
        hint = self.entry.hint if self.entry is not None and is_last else 0
        for segment in (self.segment, *self._before(unit.key_hash)):
            begin = max(segment.begin, hint) if segment is self.segment else segment.begin
            within = range(begin, await self._end_of(segment))
            if not within:
                continue
            found = await find_transaction(
                shared.client,
                segment.journal,
                shared.events,
                shared.identity.producer,
                wanted,
                within,
                shared.retry_timeout,
            )
            if found is not None:
                result = CommitResult(segment.journal, segment.number, *found, unit.key_hash, -1, unit.sequence, True)
                shared.succeed(unit, result)
                return
        shared.fail(unit, self._no_position(unit.sequence))

    async def _end_of(self, segment: Segment) -> int:
        """Return an end of a segment that all its durable content is below; 0 if it cannot be determined."""
        if segment.sealed_at is not None:
            return segment.sealed_at
        try:
            return (await self._shared.certain_barrier(segment.journal)).end
        except CorantoError:
            return 0

    def _no_position(self, sequence: int) -> PositionUnknown:
        return PositionUnknown(
            f"{self.segment.journal}: transaction {sequence} of writer {self._shared.identity.writer} is durable, as "
            "its registers say, but was not found in its content: that was truncated away or cannot be read, or this "
            "was never the sequence of a transaction"
        )

    # -- From the registers --------------------------------------------------------------------------------------------

    async def resolve_in_flight(self) -> None:
        """Wait for all attempts in flight. Resolve those known to be applied, and queue the rest to be resent."""
        attempts = list(self.queue.in_flight)
        if attempts:
            await asyncio.wait([attempt.task for attempt in attempts if attempt.task is not None])
        last = max((number for number, attempt in enumerate(attempts) if attempt.result is not None), default=-1)
        self._reported_end = max(
            [self._reported_end, *(each.result.end for each in attempts if each.result is not None)]
        )
        for attempt in attempts[: last + 1]:
            # Each append is conditioned on the one before. So if a later one was applied, this one was.
            await self._resolve_applied(attempt)
            self.queue.in_flight.popleft()
        self.queue.send_in_flight_again()

    async def _resolve_applied(self, attempt: Attempt) -> None:
        if attempt.result is not None:
            self.applied(attempt)
            return
        self.retry.progressed()
        self.entry, self.entered = attempt.after, True
        shared = self._shared
        begin = await find_append(
            shared.client,
            self.segment.journal,
            shared.events,
            shared.identity.producer,
            attempt.first_clock,
            range(self.end, self._reported_end),
            shared.retry_timeout,
        )
        self._succeed(attempt, -1 if begin is None else begin, -1)

    async def reconcile(self, registers: Registers, head: int) -> None:
        """Resolve units that the registers show as applied, and prepare to resend the rest."""
        identity = self._shared.identity
        status = rules.writer_status(registers, head, identity, self._taken_from)
        if status is WriterStatus.LOST:
            registers, head = await handshake(self._shared, self.segment.journal)
            status = rules.writer_status(registers, head, identity, self._taken_from)
        self.registers = registers
        self._reported_end = max(self._reported_end, head)
        entry = registers.entries.get(identity.label)
        if status is WriterStatus.OURS:
            assert entry is not None
            await self._resolve_through(entry)
        elif status is WriterStatus.TAKEN_OVER:
            # The earlier process may have appended more since. Plan the attempts again, based on its new entry.
            assert entry is not None
            if entry != self.entry:
                self._continue_from(entry)
                self.queue.plan_again()
        elif status is WriterStatus.FOREIGN:
            self._fenced()
        elif status is WriterStatus.FORGOTTEN:
            self._forgotten()
        else:
            self.entry = None
        self._check_fences(registers)

    async def _resolve_through(self, entry: WriterEntry) -> None:
        """Resolve by an entry of this session: attempts up to its clock were applied, and the rest were not."""
        while self.queue.again and self.queue.again[0].clock <= entry.clock:
            await self._resolve_applied(self.queue.again.popleft())
        if not self.entered or self.entry is None or entry.clock > self.entry.clock:
            # The entry is from an abandoned attempt that was applied after all. Some units to resend may be retries
            # of its units, and none of the attempts to resend can be applied any more.
            self.entry, self.entered = entry, True
            self.queue.plan_again()

    def _fenced(self) -> NoReturn:
        """Stop the writer: the entry is from another process that continues this writer's id. Raises WriterFenced."""
        self._shared.dead = WriterFenced(
            f"another process writes under the writer id {self._shared.identity.writer} now: {self.segment.journal} "
            "has its session. Stop this one"
        )
        raise self._shared.dead

    def _forgotten(self) -> None:
        """Handle an entry that was removed or lost. Raises WriterExpired if the applied units are unknown."""
        identity = self._shared.identity
        entered, self.entered, self.entry = self.entered, False, None
        doubtful = self.queue.is_doubtful
        what = f"writer {identity.writer} is not known to {self.segment.journal} any more"
        if identity.stable and (entered or not self._shared.fresh):
            self._shared.dead = WriterExpired(what)
            raise self._shared.dead
        if doubtful:
            raise WriterExpired(what)

    def _check_fences(self, registers: Registers) -> None:
        """Fail the first attempt if its fence does not hold, because then it never will again."""
        fence = self.queue.again[0].units[0].fence if self.queue.again else None
        if fence is not None and registers.token_of(fence.name) != fence.token:
            self.refuse_fence(self.queue.again.popleft(), fence, registers)

    def refuse_fence(self, attempt: Attempt, fence: Fence, registers: Registers) -> None:
        actual = registers.token_of(fence.name)
        self.refuse(
            attempt,
            PreconditionFailed(
                f"fence {fence.name} of {self.segment.journal} "
                f"{'was raised again' if actual else 'is not raised here'}; nothing was written",
                actual,
            ),
        )

    async def resolve_sealed(self, registers: Registers, head: int) -> None:
        """Resolve by the registers of a sealed segment, which no longer change."""
        identity = self._shared.identity
        self._reported_end = max(self._reported_end, head)
        status = rules.writer_status(registers, head, identity, self._taken_from)
        if status is WriterStatus.OURS:
            await self._resolve_through(registers.entries[identity.label])
        elif status is WriterStatus.FOREIGN and self.registers is not None:
            self._fenced()
        elif status is WriterStatus.FORGOTTEN:
            self._forgotten()
        if status is not WriterStatus.LOST:
            for attempt in self.queue.again:
                attempt.doubtful = False  # It was not applied, and can no longer be.

    def _continue_from(self, entry: WriterEntry) -> None:
        """Continue from an entry of an earlier session."""
        self.entry = entry
        self._shared.ticks.update(clock_to_ns(entry.clock))

    # -- Failing -------------------------------------------------------------------------------------------------------

    def refuse(self, attempt: Attempt, error: CorantoError) -> None:
        """Fail an attempt whose own condition does not hold, without effect on other attempts."""
        for unit in attempt.units:
            self._shared.fail(unit, error)

    def fail_all(self, error: CorantoError) -> None:
        """Fail all units: the first with the error, and units that may be durable with an unknown outcome."""
        self.retry.progressed()  # Later units get the whole retry timeout again.
        failed = [(unit, attempt.doubtful) for attempt in self.queue.take_attempts() for unit in attempt.units]
        failed += [(unit, False) for unit in self.queue.take_units()]
        for number, (unit, doubtful) in enumerate(failed):
            self._shared.fail(unit, failure_of(error, doubtful=doubtful, first=number == 0))

    # -- Sequences -----------------------------------------------------------------------------------------------------

    @property
    def planned_sequence(self) -> int:
        """The sequence of the last unit in flight, or else of the last durable one; -1 if there is none."""
        if self.queue.in_flight:
            return self.queue.in_flight[-1].after.sequence
        return self.entry.sequence if self.entry is not None else -1

    def durable_sequence(self, key_hash: int) -> int:
        own = self.entry.sequence if self.entry is not None else -1
        return max(own, self.lineage.sequence_of(key_hash))
