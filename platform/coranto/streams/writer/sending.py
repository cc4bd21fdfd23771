"""How a writer's appends to one segment get under way: from a queue of units, up to W at a time.

`Sending` is the part of a `SegmentWriter` that takes units from the queue, plans attempts at appending them, and sends
these. As long as all is well (it is *steady*) appends follow one upon the other without anybody looking after them: a
transaction is sent from the very call that commits it, and the answer to one append sends the next. All that happens
between a commit and its append, and between the answer and whoever waits for it, is in here and in `Settling._applied`;
it is what a transaction costs beside a plain append.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from coranto.errors import AppendOutcomeUnknown, CorantoError, CorruptData, WriteError, WrongAppendOffset
from coranto.streams.model import registers as rules
from coranto.streams.model.registers import Advances, Entry
from coranto.streams.model.stream import Segment
from coranto.streams.writer.reconcile import Settling
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import Attempt, Unit, plan
from coranto.wire import protocol_pb2 as pb

UNSETTLED: Final = (AppendOutcomeUnknown, CorruptData)
"""Errors of an append that may have been applied."""


class Sending(Settling):
    """See the module. All methods are for one event loop."""

    def __init__(
        self, shared: Shared, segment: Segment, before: Callable[[int], Sequence[Segment]], max_writers: int
    ) -> None:
        """`before` is as in `Settling`; the segment has entries of `max_writers` at most."""
        super().__init__(shared, segment, before)
        self._max_writers = max_writers
        self._advances = Advances(segment.journal, shared.identity.label)
        self._gathering = False
        self._leaving = False
        self._closed = False
        self._pump: asyncio.Task[None] | None = None

    async def _run(self) -> None:
        """Look after what is not steady, until it is, or there is nothing to do."""
        raise NotImplementedError

    def _wake(self) -> None:
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name=f"write {self.segment.journal}")

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

    def _gathered(self) -> None:
        self._gathering = False
        if self._is_steady:
            self._send()
        elif not self._closed:
            self._wake()

    # -- From the queue to the wire ------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Have as many appends in flight as may be."""
        while (self._queue or self._again) and len(self._in_flight) < (self._shared.in_flight if self._entered else 1):
            if self._in_flight and self._in_flight[-1].is_conditional:
                return  # What follows rests on whether it is applied.
            if self._again:
                attempt = self._again.popleft()
                self._shared.tally.metrics.retried.inc()
            else:
                units, sequences = self._next_units()
                if not units:
                    return
                attempt = self._plan(units, sequences)
            parameters = self._parameters(attempt, self._in_flight[-1].after if self._in_flight else self._entry)
            if parameters is not None:
                self._launch(attempt, parameters)

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

    def _plan(self, units: Sequence[Unit], sequences: Sequence[int]) -> Attempt:
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

    def _parameters(self, attempt: Attempt, before: Entry | None) -> pb.AppendRequest | None:
        """What the append rests on; None if that does not hold for certain: then its unit has failed."""
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
        # On the wire 0 is any offset. There is content, so it cannot be the journal's beginning.
        if not (held and attempt.units[0].expected_offset == 0):
            attempt.append = self._shared.client.prepare(parameters, patience=self._shared.patience, registers=not held)
            attempt.append.begin()  # Before the task, so that it is on its way while that stamps the content.
        attempt.task = asyncio.create_task(self._attempt(attempt))
        self._in_flight.append(attempt)

    # -- Under way -----------------------------------------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt) -> None:
        await self._append(attempt)
        self._answered()  # Here rather than by a callback of the task, which would take a turn of the loop.

    async def _append(self, attempt: Attempt) -> None:
        """The errors that are expected are kept with the attempt."""
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
