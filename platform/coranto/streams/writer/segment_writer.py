"""One writer in one segment: an ordered queue of units, and up to W appends in flight.

Every append is conditioned on the entry that the previous one leaves in the registers
(`coranto.streams.model.registers`). So appends that overtake each other on the network are refused, and sent again in
order; and an append that is sent twice is applied once. If anything fails, nothing more is sent until everything in
flight has been answered or given up. Then the registers tell what was applied, and the rest is sent again.

A segment that is sealed or gone is left: units that are not durable there go to its successors, in order.
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
from coranto.streams.writer.handshake import handshake
from coranto.streams.writer.sending import UNSETTLED, Sender
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import WriteUnit


class Router(Protocol):
    """The part of the stream writer that a segment writer needs."""

    async def unblocked(self, writer: SegmentWriter) -> None:
        """Wait until all segments before this writer's that the stream writer has written to are left."""
        ...

    async def lineage(self, writer: SegmentWriter, has_entry: bool) -> Lineage:
        """Return the lineage of the stream writer in the segments before this writer's."""
        ...

    def before(self, segment: Segment, place: int) -> Sequence[Segment]:
        """Return the remaining segments before one that had a place in the key space, the latest first."""
        ...

    async def left(self, writer: SegmentWriter) -> Segment | None:
        """Wait until the segment is listed as being sealed, and return it as listed; None if it is gone.

        Raises StreamNotFound, and NotAllowed if it is not listed as being sealed within the writer's patience.
        """
        ...

    def take_over(self, writer: SegmentWriter, units: Iterable[WriteUnit], registers: Registers | None) -> None:
        """Remove a writer that has left its segment, and hand its units to the writers that have their keys now."""
        ...


class _Leave(Exception):
    """Raised when the segment has been left."""


class SegmentWriter(Sender):
    """The writer of one segment; see the module. All methods are for one event loop."""

    def __init__(self, shared: Shared, router: Router, segment: Segment, max_writers: int) -> None:
        super().__init__(shared, segment, lambda place: router.before(self.segment, place), max_writers)
        self._router = router
        self._handshake_lock = asyncio.Lock()

    # -- For the stream writer -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def idle(self) -> None:
        """Wait until there is nothing to do at the moment."""
        if self._pump is not None:
            await asyncio.wait((self._pump,))

    def adopt(self, units: Iterable[WriteUnit]) -> None:
        """Queue units of a segment that was left, in the order in which the stream writer received them."""
        self._closed = False  # If it was closed, it must be closed again.
        self._queue = deque(sorted([*self._queue, *units], key=lambda unit: unit.order))
        if self._queue:
            self._wake()

    def leave(self) -> None:
        """Begin to leave a sealed segment, after settling everything in flight."""
        self._leaving = True
        self._wake()

    async def prepare(self) -> None:
        """Make contact with the segment if needed, so that a commit then takes only one append."""
        await self._router.unblocked(self)
        await self._ensure_handshake()

    async def last_sequence(self, place: int) -> int:
        """Return the last durable sequence for a place in the key space; -1 if there is none."""
        await self.prepare()
        return self._durable(place)

    async def cancel(self, error: WriteError) -> None:
        """Stop at once. Units that may have been appended fail with CommitUnknown, the rest with `error`."""
        self._closed = True
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        for attempt in [*self._in_flight, *self._again]:
            if attempt.task is not None and not attempt.task.done():
                attempt.task.cancel()
                await asyncio.gather(attempt.task, return_exceptions=True)
                if attempt.append is not None:
                    attempt.append.abort()  # The task may not have done it.
                attempt.doubtful |= attempt.result is None
        while self._in_flight and self._in_flight[0].result is not None:
            self._applied(self._in_flight.popleft())
        self._fail_from(error, self._taken_back())

    # -- When it is not steady -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Do contact, recovery and leaving, until appends follow one another again or there is nothing to do."""
        try:
            await asyncio.sleep(0)  # Units that arrive together are sent together.
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
        """Fail all units; if the segment was being left, finish leaving it."""
        self._fail_from(error, self._taken_back())
        if self._leaving:
            self._leaving = False
            self._router.take_over(self, (), self._registers)

    async def _turn(self) -> None:
        if self._shared.dead is not None:
            await self._resolve_in_flight()
            raise self._shared.dead
        if not self._leaving:
            try:
                await self._go_on()
                return
            except (JournalNotFound, NotAllowed):
                self._leaving = True
        await self._resolve_in_flight()
        await self._leave()

    async def _go_on(self) -> None:
        await self._ensure_handshake()
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
            await self._resolve_in_flight()
            await self._recover()

    # -- Contact -------------------------------------------------------------------------------------------------------

    async def _ensure_handshake(self) -> None:
        async with self._handshake_lock:
            if self._registers is not None:
                return
            shared = self._shared
            registers, head = await handshake(shared, self.segment.journal)
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
                # A removed entry may have been of this writer id, so continue after its clock. Writers without an id
                # have never written before, so they must not inherit a clock that is ahead.
                shared.ticks.update(clock_to_ns(registers.expired.clock))
            self._end = max(self._end, head)
            self._registers = registers

    # -- After errors ------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Recover from errors of attempts that must be sent again. Nothing is in flight."""
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
            raise error  # It was not applied, and retrying does not help.
        if registers is None:
            if isinstance(error, UNSETTLED):
                await self._pause(error)
            result = await self._shared.barrier(self.segment.journal)
            registers, head = Registers.of(result.registers), result.end
        await self._reconcile(registers, head)
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
        """Leave a sealed or missing segment: settle doubtful attempts, and hand over the rest. Nothing is in flight."""
        segment = await self._router.left(self)
        registers: Registers | None = None
        if segment is not None:
            self.segment = segment
            try:
                registers, head = await self._last_registers(segment)
            except JournalNotFound:
                segment = None
            except IndexHasGreaterOffset:
                registers = None  # No broker is known to have everything that was appended.
            else:
                await self._resolve_sealed(registers, head)
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
        """Return the registers of a sealed segment, and an offset up to which it has had content.

        A broker that took the segment over after all brokers with its content were gone knows of no registers, and for
        a sealed journal answers so. If attempts are doubtful, the call also checks that this answer is certain. Raises
        IndexHasGreaterOffset if it is not certain, and JournalNotFound.
        """
        journal, revision = segment.journal, segment.mod_revision
        certain = any(attempt.doubtful for attempt in self._again)
        try:
            result = await self._shared.barrier(journal, revision, held=certain)
        except RegisterMismatch:  # It is certain that there are none.
            result = await self._shared.barrier(journal, revision)
        return Registers.of(result.registers), max(result.end, self._end)
