"""One writer in one segment: an ordered queue of units, and up to W appends in flight.

Every append is conditioned on the entry that the previous one leaves in the registers
(`coranto.streams.model.registers`). So appends that arrive out of order are refused, and resent in order; and an append
that is sent twice is applied once. If an append fails, nothing more is sent until everything in flight has been
answered or abandoned. Then the registers show the applied units, and the rest is resent.

The writer leaves a segment that is sealed or gone: units that are not durable there go to its successors, in order.

While all appends succeed, the writer is *steady*: no task drives it. The call that commits a transaction sends it, and
the answer to one append sends the next. In all other situations a task drives the writer, until it is steady again or
has nothing to do.
"""

from __future__ import annotations

import asyncio
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
    WrongAppendOffset,
)
from coranto.streams.model.lineage import Lineage
from coranto.streams.model.registers import Registers
from coranto.streams.model.stream import Segment
from coranto.streams.writer.handshake import handshake
from coranto.streams.writer.reconcile import Reconciler
from coranto.streams.writer.sending import UNKNOWN_OUTCOME, Sender
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import WriteUnit


class Router(Protocol):
    """The part of the stream writer that a segment writer needs."""

    async def wait_for_predecessors(self, writer: SegmentWriter) -> None:
        """Wait until the stream writer has left all segments before this writer's that it has written to."""
        ...

    async def lineage(self, writer: SegmentWriter, has_entry: bool) -> Lineage:
        """Return the lineage of the stream writer in the segments before this writer's."""
        ...

    def earlier_segments(self, segment: Segment, key_hash: int) -> Sequence[Segment]:
        """Return the remaining segments before `segment` whose ranges had a key hash, the latest first."""
        ...

    async def wait_until_sealing(self, writer: SegmentWriter) -> Segment | None:
        """Wait until the segment is listed as being sealed, and return it as listed; None if it is gone.

        Raises StreamNotFound, and NotAllowed if it is not listed as being sealed within the writer's retry timeout.
        """
        ...

    def take_over(self, writer: SegmentWriter, units: Iterable[WriteUnit], registers: Registers | None) -> None:
        """Remove a writer that has left its segment, and hand its units to the current writers of their keys."""
        ...


class _Leave(Exception):
    """Raised when the segment has been left."""


class SegmentWriter:
    """The writer of one segment; see the module. All methods are for one event loop.

    Its queue holds the work, its reconciler decides the outcome of appends, and its sender sends them.
    """

    def __init__(self, shared: Shared, router: Router, segment: Segment, max_writers: int) -> None:
        """The segment has entries of at most `max_writers` writers."""
        self._shared = shared
        self._router = router
        self._reconciler = Reconciler(shared, segment, lambda key_hash: router.earlier_segments(self.segment, key_hash))
        self._queue = self._reconciler.queue
        self._sender = Sender(shared, self._reconciler, max_writers, self._answered)
        self._handshake_lock = asyncio.Lock()
        self._gathering = False
        self._leaving = False
        self._closed = False
        self._driver: asyncio.Task[None] | None = None

    @property
    def segment(self) -> Segment:
        return self._reconciler.segment

    @property
    def oldest(self) -> float:
        """The order of the first unit that is neither durable nor failed; infinite if there is none."""
        return self._queue.oldest

    # -- For the stream writer -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    async def idle(self) -> None:
        """Wait until there is nothing to do at the moment."""
        if self._driver is not None:
            await asyncio.wait((self._driver,))

    def adopt(self, units: Iterable[WriteUnit]) -> None:
        """Queue units of a segment that was left, sorted by their `order`."""
        self._closed = False  # A closed writer must then be closed again.
        self._queue.insert(units)
        if self._queue.units:
            self._drive()

    def leave(self) -> None:
        """Begin to leave a sealed segment, after everything in flight is resolved."""
        self._leaving = True
        self._drive()

    async def prepare(self) -> None:
        """Make the handshake with the segment if needed, so that a commit takes only one append."""
        await self._router.wait_for_predecessors(self)
        await self._ensure_handshake()

    async def last_sequence(self, key_hash: int) -> int:
        """Return the last durable sequence for a key hash; -1 if there is none."""
        await self.prepare()
        return self._reconciler.durable_sequence(key_hash)

    async def cancel(self, error: WriteError) -> None:
        """Stop immediately. Units that may have been appended fail with CommitUnknown, the rest with `error`."""
        self._closed = True
        queue = self._queue
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        for attempt in [*queue.in_flight, *queue.again]:
            if attempt.task is not None and not attempt.task.done():
                attempt.task.cancel()
                await asyncio.gather(attempt.task, return_exceptions=True)
                if attempt.append is not None:
                    attempt.append.abort()  # The task may not have aborted it.
                attempt.doubtful |= attempt.result is None
        while queue.in_flight and queue.in_flight[0].result is not None:
            self._reconciler.applied(queue.in_flight.popleft())
        self._reconciler.fail_all(error)

    # -- While it is steady --------------------------------------------------------------------------------------------

    @property
    def _is_steady(self) -> bool:
        """True if only commits and answers drive the appends."""
        return (
            self._reconciler.entered
            and self._driver is None
            and not self._leaving
            and not self._queue.again
            and self._shared.dead is None
            and not self._closed
        )

    def submit(self, unit: WriteUnit) -> None:
        """Queue a unit in its order, to be sent soon."""
        self._queue.append(unit)
        if not self._is_steady:
            self._drive()
        elif unit.is_transaction:
            self._sender.send()
        elif not self._gathering:
            # Wait one turn of the loop, so that units that arrive together are sent together.
            self._gathering = True
            asyncio.get_running_loop().call_soon(self._gathered)

    def _gathered(self) -> None:
        self._gathering = False
        if self._is_steady:
            self._sender.send()
        elif not self._closed:
            self._drive()

    def _answered(self) -> None:
        """Resolve answered appends in order, and send the next ones."""
        if self._driver is not None or self._closed:
            return
        in_flight = self._queue.in_flight
        while in_flight and (first := in_flight[0]).is_answered:
            if first.result is None:
                self._drive()
                return
            in_flight.popleft()
            self._reconciler.applied(first)
        if self._is_steady:
            self._sender.send()
        elif self._queue.units:
            self._drive()

    # -- When it is not steady -----------------------------------------------------------------------------------------

    def _drive(self) -> None:
        if self._driver is None:
            self._driver = asyncio.create_task(self._run(), name=f"write {self.segment.journal}")

    async def _run(self) -> None:
        """Do the handshake, recovery and leaving, until the writer is steady or has nothing to do."""
        try:
            await asyncio.sleep(0)  # Units that arrive together are sent together.
            await self._router.wait_for_predecessors(self)
            while self._queue.has_work or self._leaving:
                await self._turn()
                unsettled = (
                    self._leaving or self._queue.again or any(each.is_answered for each in self._queue.in_flight)
                )
                if self._reconciler.entered and not unsettled:
                    break
        except _Leave:
            pass
        except CorantoError as error:
            self._fail(error)
        except Exception:
            self._fail(WriteError(f"the writer of {self.segment.journal} is broken; see the traceback"))
            raise
        finally:
            self._driver = None
        if self._is_steady:
            self._sender.send()
        elif self._queue.units and not self._closed:
            self._drive()  # The stream writer may have been fenced; nothing else would fail these units.

    def _fail(self, error: CorantoError) -> None:
        """Fail all units; if the segment was being left, finish leaving it."""
        self._reconciler.fail_all(error)
        if self._leaving:
            self._leaving = False
            self._router.take_over(self, (), self._reconciler.registers)

    async def _turn(self) -> None:
        if self._shared.dead is not None:
            await self._reconciler.resolve_in_flight()
            raise self._shared.dead
        if not self._leaving:
            try:
                await self._send_next()
                return
            except (JournalNotFound, NotAllowed):
                self._leaving = True
        await self._reconciler.resolve_in_flight()
        await self._leave()

    async def _send_next(self) -> None:
        await self._ensure_handshake()
        in_flight = self._queue.in_flight
        if not any(each.is_answered and each.result is None for each in in_flight):
            self._sender.send()
        if not in_flight:
            return
        first = in_flight[0]
        assert first.task is not None
        await asyncio.wait((first.task,))
        if first.result is not None:
            in_flight.popleft()
            self._reconciler.applied(first)
        else:
            await self._reconciler.resolve_in_flight()
            await self._recover()

    async def _ensure_handshake(self) -> None:
        async with self._handshake_lock:
            # A fenced writer would otherwise find the entry of the process that fenced it, and continue from it.
            self._shared.require_alive()
            if self._reconciler.registers is not None:
                return
            registers, head = await handshake(self._shared, self.segment.journal)
            identity, lineage = self._shared.identity, Lineage()
            if identity.stable:
                lineage = await self._router.lineage(self, identity.label in registers.entries)
            self._reconciler.begin(registers, head, lineage)

    # -- After errors ------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Recover from errors of attempts that must be resent. Nothing is in flight."""
        again = self._queue.again
        if not again:
            return
        errors = [attempt.error for attempt in again if attempt.error is not None]
        first = again[0]
        if any(isinstance(error, (NotAllowed, JournalNotFound)) for error in errors):
            raise NotAllowed(f"append to {self.segment.journal}")
        registers: Registers | None = None
        head = self._reconciler.end
        if not any(isinstance(error, (*UNKNOWN_OUTCOME, WrongAppendOffset)) for error in errors):
            last = next((error for error in reversed(errors) if isinstance(error, RegisterMismatch)), None)
            if last is not None and last.registers.labels:
                registers = Registers.of(last.registers)
        error = first.error
        if error is not None and not isinstance(error, (*UNKNOWN_OUTCOME, WrongAppendOffset, RegisterMismatch)):
            raise error  # It was not applied, and retrying does not help.
        if registers is None:
            if isinstance(error, UNKNOWN_OUTCOME):
                await self._pause(error)
            result = await self._shared.barrier(self.segment.journal)
            registers, head = Registers.of(result.registers), result.end
        await self._reconciler.reconcile(registers, head)
        again = self._queue.again
        for attempt in again:
            attempt.error = None  # It refers to older registers. Some may not be resent before the next error.
        if isinstance(error, WrongAppendOffset) and again and again[0] is first:
            again.popleft()
            expected = first.units[0].expected_offset
            self._reconciler.refuse(
                first,
                PreconditionFailed(
                    f"{self.segment.journal} ends at offset {head}, not at {expected}; nothing was written. "
                    "Read to its end, and decide again",
                    head,
                ),
            )

    async def _pause(self, error: CorantoError) -> None:
        delay = self._reconciler.retry.failed(self._shared.clock.monotonic())
        if delay is None:
            raise error
        await self._shared.clock.sleep(delay)

    # -- Leaving -------------------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        """Leave a sealed or missing segment: resolve doubtful attempts, hand over the rest. Nothing is in flight."""
        segment = await self._router.wait_until_sealing(self)
        registers: Registers | None = None
        if segment is not None:
            self._reconciler.segment = segment
            try:
                registers, head = await self._last_registers(segment)
            except JournalNotFound:
                segment = None
            except IndexHasGreaterOffset:
                registers = None  # No broker is known to have everything that was appended.
            else:
                await self._reconciler.resolve_sealed(registers, head)
        if self._queue.is_doubtful:
            raise CommitUnknown(
                f"{self.segment.journal} {'is gone' if segment is None else 'has lost its registers'}: it is "
                "unknown whether this is durable"
            )
        units = self._queue.take_units()
        self._leaving = False
        self._router.take_over(self, units, registers)
        raise _Leave

    async def _last_registers(self, segment: Segment) -> tuple[Registers, int]:
        """Return the registers of a sealed segment, and an end of its content at some time.

        A broker that took the segment over after the loss of all brokers with its content returns no registers. If
        attempts are doubtful, the call checks that there really are none. Raises IndexHasGreaterOffset if that is not
        certain, and JournalNotFound.
        """
        journal, revision = segment.journal, segment.mod_revision
        try:
            result = await self._shared.barrier(journal, revision, held=self._queue.is_doubtful)
        except RegisterMismatch:  # There certainly are none.
            result = await self._shared.barrier(journal, revision)
        return Registers.of(result.registers), max(result.end, self._reconciler.end)
