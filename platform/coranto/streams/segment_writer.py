"""One writer in one segment: an ordered queue of units, and up to W appends in flight.

Every append is conditioned on the entry that the one before it leaves in the registers (`coranto.streams.registers`),
so appends that overtake each other on their way are refused, and sent again in order; and one that is sent twice is
applied once. When anything goes otherwise than well, nothing more is sent until all that is in flight has been
answered or given up; then the registers tell what was applied, and the rest goes on from there.

A segment that turns out to be sealed, or is gone, is left: what is not durable there goes to its successors, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from coranto.errors import (
    AppendOutcomeUnknown,
    CommitUnknown,
    CorantoError,
    CorruptData,
    JournalNotFound,
    NotAllowed,
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
from coranto.streams.lineage import Lineage
from coranto.streams.model import Segment
from coranto.streams.registers import Conditions, Entry, Registers
from coranto.streams.settling import Settling
from coranto.streams.shared import Shared
from coranto.streams.units import Attempt, Unit, encode

UNSETTLED: Final = (AppendOutcomeUnknown, CorruptData)
"""Errors of an append that may have been applied."""


class Router(Protocol):
    """What a segment writer needs of its stream writer."""

    async def unblocked(self, writer: SegmentWriter) -> None:
        """Return once all segments before this writer's, of those that were written to here, have been left."""
        ...

    async def lineage(self, writer: SegmentWriter, has_entry: bool) -> Lineage:
        """What the segments before this writer's say of us."""
        ...

    def before(self, segment: Segment, place: int) -> Sequence[Segment]:
        """The segments before one that had a place in the key space, of those that are there, the latest first."""
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


class SegmentWriter(Settling):
    """See the module. All methods are for one event loop."""

    def __init__(self, shared: Shared, router: Router, segment: Segment, max_writers: int) -> None:
        super().__init__(shared, segment, lambda place: router.before(self.segment, place))
        self._router = router
        self._max_writers = max_writers
        self._pump: asyncio.Task[None] | None = None
        self._contact = asyncio.Lock()
        self._leaving = False
        self._closed = False
        self._gathering = False

    # -- For the stream writer -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def idle(self) -> None:
        """Return once there is nothing to do at the moment."""
        if self._pump is not None:
            await asyncio.wait((self._pump,))

    def submit(self, unit: Unit) -> None:
        """Queue a unit behind all others."""
        self._queue.append(unit)
        if not self._is_steady:
            self._wake()
        elif unit.is_transaction:
            self._send()
        elif not self._gathering:
            # One turn of the loop, so that what is given together goes together.
            self._gathering = True
            asyncio.get_running_loop().call_soon(self._gathered)

    def adopt(self, units: Iterable[Unit]) -> None:
        """Queue units of a segment that was left, in the order in which they were given to the stream writer."""
        self._closed = False  # If it was, it has to be closed once more.
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
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        for attempt in [*self._in_flight, *self._again]:
            if attempt.task is not None and not attempt.task.done():
                attempt.task.cancel()
                await asyncio.gather(attempt.task, return_exceptions=True)
                attempt.doubtful |= attempt.result is None
        while self._in_flight and self._in_flight[0].result is not None:
            self._applied(self._in_flight.popleft())
        self._fail_from(error, self._taken_back())

    # -- When all is well ----------------------------------------------------------------------------------------------

    @property
    def _is_steady(self) -> bool:
        """Whether appends follow one upon the other, so that nobody has to look after them but their answers."""
        return (
            self._entered
            and self._pump is None
            and not self._leaving
            and not self._again
            and self._shared.dead is None
            and not self._closed
        )

    def _gathered(self) -> None:
        self._gathering = False
        if self._is_steady:
            self._send()
        elif not self._closed:
            self._wake()

    def _answered(self) -> None:
        """An append was answered."""
        if self._pump is not None or self._closed:
            return
        while self._in_flight and (first := self._in_flight[0]).is_answered:
            if first.result is None:
                self._wake()
                return
            self._in_flight.popleft()
            self._applied(first)
        if self._is_steady:
            self._send()
        elif self._queue:
            self._wake()

    # -- When it is not ------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name=f"write {self.segment.journal}")

    async def _run(self) -> None:
        """Contact, recovery and leaving: until appends follow one upon the other again, or there is nothing to do."""
        try:
            await asyncio.sleep(0)  # What is given together goes together.
            await self._router.unblocked(self)
            while self._queue or self._again or self._in_flight or self._leaving:
                await self._turn()
                unsettled = self._leaving or self._again or any(each.is_answered for each in self._in_flight)
                if self._entered and not unsettled:
                    break
        except _Leave:
            pass
        except CorantoError as error:
            self._fail(error)
        except Exception:
            self._fail(WriteError(f"the writer of {self.segment.journal} is broken; see the traceback"))
            raise
        finally:
            self._pump = None
        if self._is_steady:
            self._send()

    def _fail(self, error: CorantoError) -> None:
        """Fail all that there is, and go, if that was the matter."""
        self._fail_from(error, self._taken_back())
        if self._leaving:
            self._leaving = False
            self._router.take_over(self, (), self._registers)

    async def _turn(self) -> None:
        if self._shared.dead is not None:
            await self._settle_all()
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
        if not any(each.is_answered and each.result is None for each in self._in_flight):
            self._send()
        if not self._in_flight:
            return
        first = self._in_flight[0]
        assert first.task is not None
        await asyncio.wait((first.task,))
        if first.result is not None:
            self._in_flight.popleft()
            self._applied(first)
        else:
            await self._settle_all()
            await self._recover()

    # -- Sending -------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Have as many appends in flight as may be."""
        while len(self._in_flight) < (self._shared.in_flight if self._entered else 1):
            if self._in_flight and self._in_flight[-1].is_conditional:
                return  # What follows rests on whether it is applied.
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
            attempt.task = asyncio.create_task(self._attempt(attempt, conditions))
            self._in_flight.append(attempt)

    def _next_units(self) -> tuple[list[Unit], list[int]]:
        """The next units to go together, without those that are durable already, and their sequences."""
        units: list[Unit] = []
        sequences: list[int] = []
        size, last = 0, self._planned
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
            shared.identity.session,
            shared.ticks,
            shared.stamper,
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

    async def _attempt(self, attempt: Attempt, conditions: Conditions) -> None:
        await self._append(attempt, conditions)
        self._answered()  # Here rather than by a callback of the task, which would take a turn of the loop.

    async def _append(self, attempt: Attempt, conditions: Conditions) -> None:
        """The errors that are expected are kept with the attempt."""
        expected = attempt.units[0].expected_offset
        if expected == 0 and self._registers is not None and self._registers.held:
            # On the wire 0 is any offset. There is content, so it cannot be the journal's beginning.
            attempt.error = WrongAppendOffset(f"append to {self.segment.journal}")
            return
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
            attempt.doubtful |= isinstance(error, UNSETTLED)
        except Exception as error:  # noqa: BLE001 - whatever it is, the append may have been applied
            attempt.error = AppendOutcomeUnknown(f"append to {self.segment.journal}: {error!r}")
            attempt.doubtful = True

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

    # -- When all is not well ----------------------------------------------------------------------------------------

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
        if not any(isinstance(error, (*UNSETTLED, WrongAppendOffset)) for error in errors):
            last = next((error for error in reversed(errors) if isinstance(error, RegisterMismatch)), None)
            if last is not None and last.registers.labels:
                registers = Registers.of(last.registers)
        error = first.error
        if error is not None and not isinstance(error, (*UNSETTLED, WrongAppendOffset, RegisterMismatch)):
            raise error  # It was not applied, and trying again will not help.
        if registers is None:
            if isinstance(error, UNSETTLED):
                await self._pause(error)
            result = await self._shared.barrier(self.segment.journal)
            registers, head = Registers.of(result.registers), result.end
        await self._judge(registers, head)
        if isinstance(error, WrongAppendOffset) and self._again and self._again[0] is first:
            self._again.popleft()
            expected = first.units[0].expected_offset
            self._refuse(
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
