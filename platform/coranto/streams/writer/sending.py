"""Sending a writer's appends to one segment, from a queue of units, up to W at a time.

`Sender` is the part of a `SegmentWriter` that takes units from the queue, plans attempts to append them, and sends
these. While everything succeeds, the writer is *steady*: appends follow one another without a task that drives them. A
transaction is sent from the very call that commits it, and the answer to one append sends the next. Everything between
a commit and its append, and between the answer and its waiter, is here and in `Reconciler._applied`. This code is the
cost of a transaction over a plain append.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from coranto.errors import AppendOutcomeUnknown, CorantoError, CorruptData, WriteError, WrongAppendOffset
from coranto.streams.model import registers as rules
from coranto.streams.model.registers import Advances, WriterEntry
from coranto.streams.model.stream import Segment
from coranto.streams.writer.reconcile import Reconciler
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import Attempt, WriteUnit, plan
from coranto.wire import protocol_pb2 as pb

UNSETTLED: Final = (AppendOutcomeUnknown, CorruptData)
"""The errors after which an append may have been applied."""


class Sender(Reconciler):
    """Sends a writer's appends to one segment; see the module. All methods are for one event loop."""

    def __init__(
        self, shared: Shared, segment: Segment, before: Callable[[int], Sequence[Segment]], max_writers: int
    ) -> None:
        """`before` is as in `Reconciler`. The segment has entries of at most `max_writers` writers."""
        super().__init__(shared, segment, before)
        self._max_writers = max_writers
        self._advances = Advances(segment.journal, shared.identity.label)
        self._gathering = False
        self._leaving = False
        self._closed = False
        self._pump: asyncio.Task[None] | None = None

    async def _run(self) -> None:
        """Drive the writer until it is steady or there is nothing to do."""
        raise NotImplementedError

    def _wake(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name=f"write {self.segment.journal}")

    @property
    def _is_steady(self) -> bool:
        """True if appends follow one another, driven only by their answers."""
        return (
            self._entered
            and self._pump is None
            and not self._leaving
            and not self._again
            and self._shared.dead is None
            and not self._closed
        )

    def submit(self, unit: WriteUnit) -> None:
        """Queue a unit after all others."""
        self._queue.append(unit)
        if not self._is_steady:
            self._wake()
        elif unit.is_transaction:
            self._send()
        elif not self._gathering:
            # Wait one turn of the loop, so that units that arrive together are sent together.
            self._gathering = True
            asyncio.get_running_loop().call_soon(self._gathered)

    def _gathered(self) -> None:
        self._gathering = False
        if self._is_steady:
            self._send()
        elif not self._closed:
            self._wake()

    # -- From the queue to the wire ------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send appends until the limit of appends in flight is reached."""
        while (self._queue or self._again) and len(self._in_flight) < (self._shared.in_flight if self._entered else 1):
            if self._in_flight and self._in_flight[-1].is_conditional:
                return  # The next append depends on whether this one is applied.
            if self._again:
                attempt = self._again.popleft()
                self._shared.counters.metrics.retried.inc()
            else:
                units, sequences = self._next_units()
                if not units:
                    return
                attempt = self._plan(units, sequences)
            parameters = self._parameters(attempt, self._in_flight[-1].after if self._in_flight else self._entry)
            if parameters is not None:
                self._launch(attempt, parameters)

    def _next_units(self) -> tuple[list[WriteUnit], list[int]]:
        """Take the next units for one append from the queue, and return them with their sequences.

        Units that are durable already are settled instead.
        """
        units: list[WriteUnit] = []
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
                break  # An earlier attempt at this unit may be among those.
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

    def _plan(self, units: Sequence[WriteUnit], sequences: Sequence[int]) -> Attempt:
        shared = self._shared
        return plan(
            units,
            sequences,
            shared.identity.session,
            shared.ticks,
            shared.stamper,
            hint=self._end,
            used=int(shared.clock.now()),
        )

    def _parameters(self, attempt: Attempt, before: WriterEntry | None) -> pb.AppendRequest | None:
        """Return the parameters of the append, with its conditions.

        Returns None if a condition certainly does not hold; then the unit has failed.
        """
        unit, after = attempt.units[0], attempt.after.encode()
        if before is not None and not unit.is_conditional:
            return self._advances.parameters(before.encode(), after)
        label, registers = self._shared.identity.label, self._registers
        assert registers is not None
        if unit.fence is not None and not registers.held:
            self._refuse_fence(attempt, unit.fence, registers)
            return None
        if before is not None:
            conditions = rules.advance(label, before.encode(), after, unit.fence)
        else:
            nonce = f"{attempt.after.session:x}.{attempt.clock:x}"
            most = self._max_writers
            conditions = rules.enter(registers, label, after, nonce=nonce, max_writers=most, fence=unit.fence)
        return conditions.parameters(self.segment.journal, unit.expected_offset or 0)

    def _launch(self, attempt: Attempt, parameters: pb.AppendRequest) -> None:
        attempt.error = attempt.result = attempt.append = None
        held = self._registers is not None and self._registers.held
        # On the wire, 0 means any offset. The journal has content, so an append at its beginning cannot succeed.
        if not (held and attempt.units[0].expected_offset == 0):
            attempt.append = self._shared.client.prepare(parameters, patience=self._shared.patience, registers=not held)
            attempt.append.begin()  # Before the task, so that it is under way while the task stamps the content.
        attempt.task = asyncio.create_task(self._attempt(attempt))
        self._in_flight.append(attempt)

    # -- Under way -----------------------------------------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt) -> None:
        await self._append(attempt)
        self._answered()  # Not in a callback of the task, which would take another turn of the loop.

    async def _append(self, attempt: Attempt) -> None:
        """Append the attempt's content. The result or the error is stored in the attempt."""
        append, journal = attempt.append, self.segment.journal
        if append is None:
            attempt.error = WrongAppendOffset(f"append to {journal}")
            return
        try:
            content = attempt.content
        except Exception as error:  # noqa: BLE001 - whatever the user's format raises, nothing was sent
            append.abort()
            attempt.error = WriteError(f"{self._shared.events!r} could not stamp what goes to {journal}: {error!r}")
            return
        try:
            attempt.result = await append.commit(content)
        except CorantoError as error:
            attempt.error = error
            attempt.doubtful |= isinstance(error, UNSETTLED)
        except Exception as error:  # noqa: BLE001 - whatever it is, the append may have been applied
            attempt.error = AppendOutcomeUnknown(f"append to {journal}: {error!r}")
            attempt.doubtful = True

    def _answered(self) -> None:
        """Settle answered appends in order, and send the next ones."""
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
