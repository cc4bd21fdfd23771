"""One writer in one segment: an ordered queue of units, and up to W appends in flight.

Every append is conditioned on the entry that the one before it leaves in the registers (`coranto.streams.registers`),
so appends that overtake each other on their way are refused, and sent again in order; and one that is sent twice is
applied once. When anything goes otherwise than well, nothing more is sent until all that is in flight has been
answered or given up; then the registers tell what was applied, and the rest goes on from there.

A segment that turns out to be sealed, or is gone, is left: what is not durable there goes to its successors, in order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from coranto.client.retry import Retry
from coranto.client.values import AppendResult
from coranto.errors import (
    AppendOutcomeUnknown,
    CommitUnknown,
    CorantoError,
    CorruptData,
    JournalNotFound,
    NotAllowed,
    PositionUnknown,
    PreconditionFailed,
    RegisterMismatch,
    WriteError,
    WriterExpired,
    WriterFenced,
    WrongAppendOffset,
)
from coranto.messages.uuids import clock_to_ns
from coranto.streams import registers as rules
from coranto.streams.contact import contact
from coranto.streams.events import TransactionEnd
from coranto.streams.failures import failure_of
from coranto.streams.lineage import Lineage
from coranto.streams.locating import find_append, find_transaction
from coranto.streams.model import Segment
from coranto.streams.registers import Conditions, Entry, Fence, Registers, Standing
from coranto.streams.shared import Shared
from coranto.streams.units import Attempt, CommitResult, EventPosition, Unit, encode

_UNSETTLED: Final = (AppendOutcomeUnknown, CorruptData)
"""Errors of an append that may have been applied."""


class Router(Protocol):
    """What a segment writer needs of its stream writer."""

    async def unblocked(self, writer: SegmentWriter) -> None:
        """Return once all segments before this writer's, of those that were written to here, have been left."""
        ...

    async def lineage(self, writer: SegmentWriter, has_entry: bool) -> Lineage:
        """What the segments before this writer's say of us."""
        ...

    async def left(self, writer: SegmentWriter) -> Segment | None:
        """The segment as it is listed, once it is listed as sealed; None when it is gone.

        Raises StreamNotFound, and NotAllowed when it is not listed as sealed for long.
        """
        ...

    def take_over(self, writer: SegmentWriter, units: Iterable[Unit], registers: Registers | None) -> None:
        """The writer is done with its segment. Its units go to where their keys are now."""
        ...


class _Leave(Exception):
    """The segment is to be left."""


class SegmentWriter:
    """See the module. All methods are for one event loop."""

    def __init__(self, shared: Shared, router: Router, segment: Segment, max_writers: int) -> None:
        self.segment = segment
        self._shared = shared
        self._router = router
        self._max_writers = max_writers
        self._retry = Retry(shared.patience)
        self._queue: deque[Unit] = deque()
        self._again: deque[Attempt] = deque()  # Before the queue: attempts that have to be sent again.
        self._in_flight: deque[Attempt] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._contact: asyncio.Lock = asyncio.Lock()
        self._registers: Registers | None = None  # Those to enter by; None before the first contact.
        self._entry: Entry | None = None  # As in the registers, once all that is in flight is settled.
        self._taken_from: int | None = None
        self._entered = False  # An entry of our session was there.
        self._lineage = Lineage()
        self._end = 0  # An offset at or before where our next append begins, and where a message begins.
        self._leaving = False

    # -- For the stream writer -----------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Return once there is nothing to do at the moment."""
        if self._pump is not None:
            await asyncio.wait((self._pump,))

    @property
    def oldest(self) -> float:
        """The order of the first unit that is neither durable nor failed; infinite without one."""
        firsts = [attempts[0].units[0] for attempts in (self._in_flight, self._again) if attempts]
        return min([unit.order for unit in [*firsts, *([self._queue[0]] if self._queue else [])]], default=math.inf)

    def submit(self, unit: Unit) -> None:
        """Queue a unit behind all others."""
        self._queue.append(unit)
        self._wake()

    def adopt(self, units: Iterable[Unit]) -> None:
        """Queue units of a segment that was left, in the order in which they were given to the stream writer."""
        self._queue = deque(sorted([*self._queue, *units], key=lambda unit: unit.order))
        if self._queue:
            self._wake()

    def leave(self) -> None:
        """The segment is sealed: settle what is in flight, and go."""
        self._leaving = True
        self._wake()

    async def prepare(self) -> None:
        """Have been in contact with the segment, so that an append is all that a commit takes."""
        await self._router.unblocked(self)
        await self._ensure_contact()

    async def last_sequence(self, place: int) -> int:
        """The last sequence that is durable for a place in the key space; -1 for none."""
        await self.prepare()
        return self._durable(place)

    async def cancel(self, error: WriteError) -> None:
        """Stop at once. What may have been appended fails with CommitUnknown, the rest with `error`."""
        pump = self._pump
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        for attempt in [*self._in_flight, *self._again]:
            if attempt.task is not None and not attempt.task.done():
                attempt.task.cancel()
                await asyncio.gather(attempt.task, return_exceptions=True)
                attempt.doubtful |= attempt.result is None
        while self._in_flight and self._in_flight[0].result is not None:
            self._applied(self._in_flight.popleft())
        self._leaving = False
        self._fail_from(error, self._taken_back())

    # -- The pump ------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name=f"write {self.segment.journal}")

    async def _run(self) -> None:
        try:
            # One turn of the loop, so that what is given together goes together.
            await asyncio.sleep(0)
            await self._router.unblocked(self)
            while self._queue or self._again or self._in_flight or self._leaving:
                await self._turn()
        except _Leave:
            pass
        except CorantoError as error:
            self._fail_from(error, self._taken_back())
        finally:
            self._pump = None

    async def _turn(self) -> None:
        if self._shared.dead is not None:
            raise self._shared.dead
        if not self._leaving:
            try:
                await self._go_on()
                return
            except (JournalNotFound, NotAllowed):
                self._leaving = True
        await self._settle_all()
        await self._leave()

    async def _go_on(self) -> None:
        await self._ensure_contact()
        self._send()
        if self._in_flight:
            first = self._in_flight[0]
            assert first.task is not None
            await asyncio.wait((first.task,))
            if first.error is None:
                self._in_flight.popleft()
                self._applied(first)
            else:
                await self._settle_all()
                await self._recover()

    def _send(self) -> None:
        """Have as many appends in flight as may be."""
        while len(self._in_flight) < (self._shared.in_flight if self._entered else 1):
            if self._again:
                attempt = self._again.popleft()
                self._shared.metrics.retried.inc()
            else:
                units, sequences = self._next_units()
                if not units:
                    return
                attempt = self._encode(units, sequences)
            before = self._in_flight[-1].after if self._in_flight else self._entry
            conditions = self._conditions(attempt, before)
            if conditions is None:
                continue
            attempt.tries += 1
            attempt.error = attempt.result = None
            attempt.task = asyncio.create_task(self._append(attempt, conditions))
            self._in_flight.append(attempt)
            if attempt.is_conditional:
                return  # What follows rests on whether it is applied.

    def _next_units(self) -> tuple[list[Unit], list[int]]:
        """The next units to go together, without those that are durable already, and their sequences."""
        units: list[Unit] = []
        sequences: list[int] = []
        size, last = 0, self._planned
        if self._in_flight and self._in_flight[-1].is_conditional:
            return units, sequences
        while self._queue:
            unit = self._queue[0]
            if units and (unit.is_conditional or size + unit.size > self._shared.batch_bytes):
                break
            if unit.sequence is None:
                sequence = max(last, self._shared.sequence) + 1
            elif unit.sequence > max(last, self._lineage.sequence_of(unit.place)):
                sequence = unit.sequence
            elif units or self._in_flight or self._again:
                break  # An earlier attempt at it may be among those.
            else:
                self._queue.popleft()
                self._deduplicate(unit)
                continue
            self._queue.popleft()
            units.append(unit)
            sequences.append(sequence)
            size, last = size + unit.size, sequence
            self._shared.sequence = max(self._shared.sequence, sequence)
            if unit.is_conditional:
                break
        return units, sequences

    def _encode(self, units: Sequence[Unit], sequences: Sequence[int]) -> Attempt:
        shared = self._shared
        return encode(
            units,
            sequences,
            shared.identity,
            shared.ticks,
            shared.events,
            hint=self._end,
            used=int(shared.clock.now()),
        )

    def _conditions(self, attempt: Attempt, before: Entry | None) -> Conditions | None:
        """What the append rests on; None if that does not hold for certain: then its unit has failed."""
        unit, registers = attempt.units[0], self._registers
        assert registers is not None
        if unit.fence is not None and not registers.held:
            self._refuse_fence(attempt, unit.fence, registers)
            return None
        label, after = self._shared.identity.label, attempt.after.encode()
        if before is not None:
            return rules.advance(label, before.encode(), after, unit.fence)
        nonce = f"{attempt.after.session:x}.{attempt.clock:x}"
        return rules.enter(registers, label, after, nonce=nonce, max_writers=self._max_writers, fence=unit.fence)

    async def _append(self, attempt: Attempt, conditions: Conditions) -> AppendResult | None:
        """The errors that are expected are kept with the attempt."""
        expected = attempt.units[0].expected_offset
        if expected == 0 and self._registers is not None and self._registers.held:
            # On the wire 0 is any offset. There is content, so it cannot be the journal's beginning.
            attempt.error = WrongAppendOffset(f"append to {self.segment.journal}")
            return None
        try:
            attempt.result = await self._shared.client.append(
                self.segment.journal,
                attempt.content,
                offset=expected or 0,
                check_registers=conditions.check,
                union_registers=conditions.union,
                subtract_registers=conditions.subtract,
                patience=self._shared.patience,
            )
        except CorantoError as error:
            attempt.error = error
            attempt.doubtful |= isinstance(error, _UNSETTLED)
        return attempt.result

    # -- When all is well ----------------------------------------------------------------------------------------------

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
        """Its units are durable, the first one at `begin`; -1 when that is not known."""
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

    def _deduplicate(self, unit: Unit) -> None:
        """An earlier attempt at it is durable."""
        segment = self.segment
        if unit.is_transaction:
            self._shared.find(unit, self._find(unit))
        else:
            self._shared.succeed(unit, EventPosition(segment.number, segment.journal, -1, -1, deduplicated=True))

    async def _find(self, unit: Unit) -> None:
        """Where an earlier attempt at a transaction stands, here or in a segment before."""
        shared = self._shared
        assert unit.sequence is not None
        wanted = TransactionEnd(shared.identity.writer, unit.sequence)
        places: list[tuple[Segment, int]] = []
        if self._entry is not None:
            is_last = self._entry.sequence == unit.sequence
            places.append((self.segment, max(self.segment.begin, self._entry.hint if is_last else 0)))
        places += [(floor.segment, floor.segment.begin) for floor in self._lineage.floors if floor.covers(unit.place)]
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

    # -- When it is not ------------------------------------------------------------------------------------------------

    async def _settle_all(self) -> None:
        """Wait for what is in flight; what others say is applied, is. The rest is to be sent again."""
        attempts = list(self._in_flight)
        if attempts:
            await asyncio.wait([attempt.task for attempt in attempts if attempt.task is not None])
        last = max((number for number, attempt in enumerate(attempts) if attempt.result is not None), default=-1)
        for attempt in attempts[: last + 1]:
            # An append that was applied rests on all before it.
            await self._known_applied(attempt)
            self._in_flight.popleft()
        self._again = deque([*self._in_flight, *self._again])
        self._in_flight.clear()

    async def _known_applied(self, attempt: Attempt) -> None:
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

    async def _recover(self) -> None:
        """Nothing is in flight, and the first of what is to be sent again had an error."""
        if not self._again:
            return
        errors = [attempt.error for attempt in self._again if attempt.error is not None]
        first = self._again[0]
        if any(isinstance(error, (NotAllowed, JournalNotFound)) for error in errors):
            raise NotAllowed(f"append to {self.segment.journal}")
        registers: Registers | None = None
        head = self._end
        if not any(isinstance(error, (*_UNSETTLED, WrongAppendOffset)) for error in errors):
            last = next((error for error in reversed(errors) if isinstance(error, RegisterMismatch)), None)
            if last is not None and last.registers.labels:
                registers = Registers.of(last.registers)
        error = first.error
        if error is not None and not isinstance(error, (*_UNSETTLED, WrongAppendOffset, RegisterMismatch)):
            raise error  # It was not applied, and trying again will not help.
        if registers is None:
            if isinstance(error, _UNSETTLED):
                await self._pause(error)
            result = await self._shared.barrier(self.segment.journal)
            registers, head = Registers.of(result.registers), result.end
        await self._judge(registers, head)
        if isinstance(error, WrongAppendOffset) and self._again and self._again[0] is first:
            self._again.popleft()
            expected = first.units[0].expected_offset
            self._fail(
                first,
                PreconditionFailed(
                    f"{self.segment.journal} ends at offset {head}, not at {expected}; nothing was written", head
                ),
            )

    async def _pause(self, error: CorantoError) -> None:
        delay = self._retry.failed(self._shared.clock.monotonic())
        if delay is None:
            raise error
        await self._shared.clock.sleep(delay)

    async def _judge(self, registers: Registers, head: int) -> None:
        """Settle what the registers say is applied, and see to it that the rest can go on."""
        identity = self._shared.identity
        stand = rules.standing(registers, head, identity, self._taken_from)
        if stand is Standing.LOST:
            registers, head = await contact(self._shared, self.segment.journal)
            stand = rules.standing(registers, head, identity, self._taken_from)
        self._registers = registers
        entry = registers.entries.get(identity.label)
        if stand is Standing.OURS:
            assert entry is not None
            await self._settle_through(entry)
        elif stand is Standing.TAKEN_OVER:
            # It has appended more since. What was planned is done for, and planned anew.
            assert entry is not None
            if entry != self._entry:
                self._adopt_entry(entry)
                self._queue.extendleft(reversed(self._plans()))
                self._again.clear()
        elif stand is Standing.FOREIGN:
            self._shared.dead = WriterFenced(
                f"another process writes under the writer id {identity.writer} now: {self.segment.journal} has its "
                "session. Stop this one"
            )
            raise self._shared.dead
        elif stand is Standing.FORGOTTEN:
            self._forgotten()
        else:
            self._entry = None
        self._check_fences(registers)

    async def _settle_through(self, entry: Entry) -> None:
        """The entry is of our session: what it covers is applied, and the rest is not."""
        while self._again and self._again[0].clock <= entry.clock:
            await self._known_applied(self._again.popleft())
        if not self._entered or self._entry is None or entry.clock > self._entry.clock:
            # It is of an attempt that was given up, and came through after all.
            self._entry, self._entered = entry, True

    def _forgotten(self) -> None:
        """There is no entry any more."""
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
        """A fence that does not hold now never will."""
        fence = self._again[0].units[0].fence if self._again else None
        if fence is not None and registers.token_of(fence.name) != fence.token:
            self._refuse_fence(self._again.popleft(), fence, registers)

    def _refuse_fence(self, attempt: Attempt, fence: Fence, registers: Registers) -> None:
        actual = registers.token_of(fence.name)
        self._fail(
            attempt,
            PreconditionFailed(
                f"fence {fence.name} of {self.segment.journal} "
                f"{'was raised by another' if actual else 'is not raised here'}; nothing was written",
                actual,
            ),
        )

    # -- Contact -------------------------------------------------------------------------------------------------------

    async def _ensure_contact(self) -> None:
        async with self._contact:
            if self._registers is not None:
                return
            shared = self._shared
            registers, head = await contact(shared, self.segment.journal)
            identity = shared.identity
            entry = registers.entries.get(identity.label)
            if identity.stable:
                self._lineage = await self._router.lineage(self, entry is not None)
                forgot = registers.forgot or self._lineage.forgot
                if entry is None and forgot and not shared.fresh:
                    shared.dead = WriterExpired(
                        f"{self.segment.journal} has no entry of writer {identity.writer}, but has lost or given up "
                        "entries: what it wrote before, if anything, is not known"
                    )
                    raise shared.dead
            if entry is not None:
                if not identity.stable:
                    shared.dead = WriterFenced(f"{self.segment.journal} has an entry of another writer of the same id")
                    raise shared.dead
                self._taken_from = entry.session
                self._adopt_entry(entry)
            floor = max(self._lineage.clock, registers.expired.clock if registers.expired is not None else 0)
            shared.ticks.update(clock_to_ns(floor))
            self._end = max(self._end, head)
            self._registers = registers

    def _adopt_entry(self, entry: Entry) -> None:
        """Go on from an entry of a session before ours."""
        self._entry = entry
        self._shared.ticks.update(clock_to_ns(entry.clock))

    # -- Leaving -------------------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        """The segment takes no more, and nothing is in flight: settle what is in doubt, and hand over the rest."""
        segment = await self._router.left(self)
        registers: Registers | None = None
        if segment is not None:
            self.segment = segment
            try:
                result = await self._shared.barrier(segment.journal, segment.mod_revision)
            except JournalNotFound:
                segment = None
            else:
                registers = Registers.of(result.registers)
                await self._settle_sealed(registers, result.end)
        if any(attempt.doubtful for attempt in self._again):
            raise CommitUnknown(
                f"{self.segment.journal} {'is gone' if segment is None else 'has lost its registers'}: nothing tells "
                "whether this is durable"
            )
        units = [*self._plans(), *self._queue]
        self._again.clear()
        self._queue.clear()
        self._leaving = False
        self._router.take_over(self, units, registers)
        raise _Leave

    async def _settle_sealed(self, registers: Registers, head: int) -> None:
        """As `_judge`, for a segment whose registers change no more."""
        identity = self._shared.identity
        stand = rules.standing(registers, head, identity, self._taken_from)
        if stand is Standing.OURS:
            await self._settle_through(registers.entries[identity.label])
        elif stand is Standing.FOREIGN and self._registers is not None:
            self._shared.dead = WriterFenced(
                f"another process writes under the writer id {identity.writer} now: {self.segment.journal} has its "
                "session. Stop this one"
            )
            raise self._shared.dead
        elif stand is Standing.FORGOTTEN:
            self._forgotten()
        if stand is not Standing.LOST:
            for attempt in self._again:
                attempt.doubtful = False  # It was not applied, and cannot be any more.

    # -- Failing -------------------------------------------------------------------------------------------------------

    def _plans(self) -> list[Unit]:
        return [unit for attempt in self._again for unit in attempt.units]

    def _taken_back(self) -> list[Attempt]:
        attempts = [*self._in_flight, *self._again]
        self._in_flight.clear()
        self._again.clear()
        return attempts

    def _fail(self, attempt: Attempt, error: CorantoError) -> None:
        for unit in attempt.units:
            self._shared.fail(unit, error)

    def _fail_from(self, error: CorantoError, attempts: Sequence[Attempt]) -> None:
        """Fail attempts and all that is queued: the first with the error, what may be durable as unknown."""
        failed = [(unit, attempt.doubtful) for attempt in attempts for unit in attempt.units]
        failed += [(unit, False) for unit in self._queue]
        self._queue.clear()
        for number, (unit, doubtful) in enumerate(failed):
            self._shared.fail(unit, failure_of(error, doubtful=doubtful, first=number == 0))
        if self._leaving:
            self._leaving = False
            self._router.take_over(self, (), self._registers)

    # -- Its parts -----------------------------------------------------------------------------------------------------

    @property
    def _planned(self) -> int:
        """The sequence of the last unit that is in flight, or else durable."""
        if self._in_flight:
            return self._in_flight[-1].after.sequence
        return self._entry.sequence if self._entry is not None else -1

    def _durable(self, place: int) -> int:
        own = self._entry.sequence if self._entry is not None else -1
        return max(own, self._lineage.sequence_of(place))
