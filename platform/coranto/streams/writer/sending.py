"""Sending a writer's appends to one segment, from a queue of units, up to W at a time.

A `Sender` takes units from the queue, plans attempts to append them, and sends the attempts. The path from a commit to
its append is here, and the path from the answer to the waiter is in `Reconciler.applied`. Both are the overhead of a
transaction compared to a plain append.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from coranto.errors import AppendOutcomeUnknown, CorantoError, CorruptData, WriteError, WrongAppendOffset
from coranto.streams.model import registers as rules
from coranto.streams.model.registers import Advances, WriterEntry
from coranto.streams.writer.failures import failure_after
from coranto.streams.writer.reconcile import Reconciler
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import Attempt, WriteUnit, plan
from coranto.wire import protocol_pb2 as pb

UNKNOWN_OUTCOME: Final = (AppendOutcomeUnknown, CorruptData)
"""The errors after which an append may have been applied."""


class Sender:
    """Sends a writer's appends to one segment; see the module. All methods are for one event loop."""

    def __init__(self, shared: Shared, reconciler: Reconciler, max_writers: int, on_answer: Callable[[], None]) -> None:
        """The segment has entries of at most `max_writers` writers. `on_answer` is called after each answer."""
        self._shared = shared
        self._reconciler = reconciler
        self._queue = reconciler.queue
        self._max_writers = max_writers
        self._on_answer = on_answer
        self._advances = Advances(reconciler.segment.journal, shared.identity.label)

    # -- From the queue to the wire ------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send appends until the limit of appends in flight is reached."""
        queue, reconciler = self._queue, self._reconciler
        while (queue.units or queue.again) and len(queue.in_flight) < (
            self._shared.in_flight if reconciler.entered else 1
        ):
            if queue.in_flight and queue.in_flight[-1].is_conditional:
                return  # The next append depends on whether this one is applied.
            if queue.again:
                attempt = queue.again.popleft()
                self._shared.counters.metrics.retried.inc()
            else:
                units, sequences = self._next_units()
                if not units:
                    return
                attempt = self._plan(units, sequences)
            parameters = self._parameters(attempt, queue.in_flight[-1].after if queue.in_flight else reconciler.entry)
            if parameters is not None:
                self._launch(attempt, parameters)

    def _next_units(self) -> tuple[list[WriteUnit], list[int]]:
        """Take the next units for one append from the queue, and return them with their sequences.

        Units that are already durable are resolved instead, and units above a gap fail.
        """
        units: list[WriteUnit] = []
        sequences: list[int] = []
        queue, reconciler = self._queue, self._reconciler
        size, last = 0, reconciler.planned_sequence
        while queue.units:
            unit = queue.units[0]
            if units and (unit.is_conditional or size + unit.size > self._shared.batch_bytes):
                break
            if unit.sequence is None:
                sequence = max(last, self._shared.sequence) + 1
            elif unit.sequence > max(last, reconciler.lineage.sequence_of(unit.key_hash)):
                sequence = unit.sequence
                if (gap := self._shared.gaps.first_before(sequence, reconciler.segment.range)) is not None:
                    self._shared.fail(queue.units.popleft(), failure_after(gap))
                    continue
            elif units or queue.in_flight or queue.again:
                break  # An earlier attempt at this unit may be among them.
            else:
                queue.units.popleft()
                reconciler.deduplicate(unit)
                continue
            queue.units.popleft()
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
            hint=self._reconciler.end,
            used=int(shared.clock.now()),
        )

    def _parameters(self, attempt: Attempt, before: WriterEntry | None) -> pb.AppendRequest | None:
        """Return the parameters of the append, with its conditions.

        Returns None, and fails the unit, if a condition certainly does not hold.
        """
        unit, after = attempt.units[0], attempt.after.encode()
        if before is not None and not unit.is_conditional:
            return self._advances.parameters(before.encode(), after)
        label, registers = self._shared.identity.label, self._reconciler.registers
        assert registers is not None
        if unit.fence is not None and not registers.held:
            self._reconciler.refuse_fence(attempt, unit.fence, registers)
            return None
        if before is not None:
            conditions = rules.advance(label, before.encode(), after, unit.fence)
        else:
            nonce = f"{attempt.after.session:x}.{attempt.clock:x}"
            most = self._max_writers
            conditions = rules.enter(registers, label, after, nonce=nonce, max_writers=most, fence=unit.fence)
        return conditions.parameters(self._reconciler.segment.journal, unit.expected_offset or 0)

    def _launch(self, attempt: Attempt, parameters: pb.AppendRequest) -> None:
        attempt.error = attempt.result = attempt.append = None
        registers = self._reconciler.registers
        held = registers is not None and registers.held
        # On the wire, 0 means any offset. The journal has content, so an append at its beginning cannot succeed.
        if not (held and attempt.units[0].expected_offset == 0):
            attempt.append = self._shared.client.prepare(
                parameters,
                retry_timeout=self._shared.retry_timeout,
                registers=not held,
                within=attempt.units[0].span,
            )
            attempt.append.begin()  # Before the task, so that the call is open while the task stamps the content.
        attempt.task = asyncio.create_task(self._attempt(attempt))
        self._queue.in_flight.append(attempt)

    # -- In flight -----------------------------------------------------------------------------------------------------

    async def _attempt(self, attempt: Attempt) -> None:
        await self._append(attempt)
        self._on_answer()  # Not in a callback of the task, which would take another turn of the loop.

    async def _append(self, attempt: Attempt) -> None:
        """Append the attempt's content. The result or the error is stored in the attempt."""
        append, journal = attempt.append, self._reconciler.segment.journal
        if append is None:
            attempt.error = WrongAppendOffset(f"append to {journal}")
            return
        try:
            content = attempt.content
        except Exception as error:  # noqa: BLE001 - whatever the user's format raises, nothing was sent
            append.abort()
            attempt.error = WriteError(f"{self._shared.events!r} could not stamp content for {journal}: {error!r}")
            return
        try:
            attempt.result = await append.commit(content)
        except CorantoError as error:
            attempt.error = error
            attempt.doubtful |= isinstance(error, UNKNOWN_OUTCOME)
        except Exception as error:  # noqa: BLE001 - whatever it is, the append may have been applied
            attempt.error = AppendOutcomeUnknown(f"append to {journal}: {error!r}")
            attempt.doubtful = True
