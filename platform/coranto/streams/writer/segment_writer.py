"""One writer in one segment: an ordered queue of units, and up to W appends in flight.

Every append is conditioned on the entry that the one before it leaves in the registers
(`coranto.streams.model.registers`), so appends that overtake each other on their way are refused, and sent again in
order; and one that is sent twice is applied once. When anything goes otherwise than well, nothing more is sent until
all that is in flight has been answered or given up; then the registers tell what was applied, and the rest goes on from
there.

A segment that turns out to be sealed, or is gone, is left: what is not durable there goes to its successors, in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from coranto.errors import (
    CommitUnknown,
    CorantoError,
    IndexHasGreaterOffset,
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
from coranto.streams.model.lineage import Lineage
from coranto.streams.model.registers import Registers
from coranto.streams.model.stream import Segment
from coranto.streams.writer.handshake import contact
from coranto.streams.writer.sending import UNSETTLED, Sending
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import Unit


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


class SegmentWriter(Sending):
    """See the module. All methods are for one event loop."""

    def __init__(self, shared: Shared, router: Router, segment: Segment, max_writers: int) -> None:
        super().__init__(shared, segment, lambda place: router.before(self.segment, place), max_writers)
        self._router = router
        self._contact = asyncio.Lock()

    # -- For the stream writer -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def idle(self) -> None:
        """Return once there is nothing to do at the moment."""
        if self._pump is not None:
            await asyncio.wait((self._pump,))

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
                if attempt.append is not None:
                    attempt.append.abort()  # The task may not have come to it.
                attempt.doubtful |= attempt.result is None
        while self._in_flight and self._in_flight[0].result is not None:
            self._applied(self._in_flight.popleft())
        self._fail_from(error, self._taken_back())

    # -- When it is not ------------------------------------------------------------------------------------------------

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
            shared.ticks.update(clock_to_ns(self._lineage.clock))
            if identity.stable and entry is None and registers.expired is not None:
                # An entry that was removed may have been of this writer id. Others have never written before: a clock
                # that was ahead must not pass on to them.
                shared.ticks.update(clock_to_ns(registers.expired.clock))
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
                registers, head = await self._last_registers(segment)
            except JournalNotFound:
                segment = None
            except IndexHasGreaterOffset:
                registers = None  # No broker is known to have all that was appended.
            else:
                await self._settle_sealed(registers, head)
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

    async def _last_registers(self, segment: Segment) -> tuple[Registers, int]:
        """The registers of a segment that is sealed, and an offset up to which it has had content.

        A broker that took it over when those that had its content were gone has nothing of it by itself, and says so
        of a journal that takes no more. Where something rests on that, it is asked whether that is certain. Raises
        IndexHasGreaterOffset if it is not, and JournalNotFound.
        """
        journal, revision = segment.journal, segment.mod_revision
        certain = any(attempt.doubtful for attempt in self._again)
        try:
            result = await self._shared.barrier(journal, revision, held=certain)
        except RegisterMismatch:  # There are none, for certain.
            result = await self._shared.barrier(journal, revision)
        return Registers.of(result.registers), max(result.end, self._end)
