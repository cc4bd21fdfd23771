"""The state that the segment writers of one stream writer share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from coranto.client.client import JournalClient
from coranto.client.values import AppendResult
from coranto.effects import Clock
from coranto.errors import CorantoError, PositionUnknown, PreconditionFailed, RegisterMismatch, WriteError
from coranto.labels import HELD, label_selector
from coranto.messages.uuids import ProducerClock
from coranto.streams.model.events import EventFormat
from coranto.streams.model.registers import WriterIdentity
from coranto.streams.writer.counters import WriterCounters
from coranto.streams.writer.gaps import Gaps
from coranto.streams.writer.stamping import Stamper, stamper_of
from coranto.streams.writer.units import CommitResult, EventPosition, WriteUnit
from coranto.tracing import Tracer, tracer


@dataclass(slots=True)
class Shared:
    """The shared state of segment writers; see the module. Durations are in seconds."""

    client: JournalClient
    identity: WriterIdentity
    events: EventFormat[Any]
    clock: Clock
    ticks: ProducerClock
    counters: WriterCounters
    in_flight: int
    batch_bytes: int
    retry_timeout: float
    fresh: bool
    stream: str = ""
    tracer: Tracer | None = field(default_factory=tracer)
    sequence: int = -1
    """The largest sequence that was used so far."""
    dead: WriteError | None = None
    """The error that ended this writer, which can append nothing more."""
    failure: CorantoError | None = None
    """The error of the first plain event that failed since the last `flush`."""
    ends: dict[int, int] = field(default_factory=dict)
    """The end offset of the last write in each segment, by number."""
    gaps: Gaps = field(default_factory=Gaps)
    pending_bytes: int = 0
    resolved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a unit is resolved."""
    stamper: Stamper = field(init=False)
    _finding: dict[asyncio.Task[None], WriteUnit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stamper = stamper_of(self.events, self.identity.producer, self.identity.writer)

    def require_alive(self) -> None:
        """Raise the error that ended this writer, if it has ended."""
        if self.dead is not None:
            raise self.dead

    def taken(self, unit: WriteUnit) -> None:
        """Count a new unit, and close the gap that it fills."""
        self.gaps.close(unit)
        if self.tracer is not None:
            unit.span = self.tracer.span("publish", self.stream, "PRODUCER", bytes=unit.size, events=len(unit.events))
        self.pending_bytes += unit.size

    def succeed(self, unit: WriteUnit, result: EventPosition | CommitResult) -> None:
        self._discount(unit)
        if unit.span is not None:
            unit.span.end(segment=result.segment, begin=result.begin, end=result.end)
        if result.end > self.ends.get(result.segment, 0):
            self.ends[result.segment] = result.end
        self.counters.succeeded(unit, result)
        if not unit.done.done():
            unit.done.set_result(result)  # type: ignore[arg-type]

    def fail(self, unit: WriteUnit, error: CorantoError) -> None:
        self._discount(unit)
        if unit.span is not None:
            unit.span.end(error)
        self.counters.failed(unit, error)
        if not isinstance(error, (PreconditionFailed, PositionUnknown)):  # The caller decides again, or it is durable.
            self.gaps.add(unit, error)
        if not unit.is_transaction:
            self.failure = self.failure or error
        if not unit.done.done():
            unit.done.set_exception(error)
            unit.done.exception()  # `flush` may report it instead, so mark it as retrieved.

    def _discount(self, unit: WriteUnit) -> None:
        self.pending_bytes -= unit.size
        self.resolved.set()

    def find(self, unit: WriteUnit, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` as a task. It resolves a unit that is no longer in a segment writer."""
        task = asyncio.create_task(work)
        self._finding[task] = unit
        task.add_done_callback(self._found)

    def _found(self, task: asyncio.Task[None]) -> None:
        del self._finding[task]
        self.resolved.set()

    @property
    def oldest_found(self) -> float:
        """The order of the first unit that `find` is still working on; infinite if there is none."""
        return min((unit.order for unit in self._finding.values()), default=math.inf)

    async def close(self) -> None:
        """Cancel the tasks of `find`. Their units are durable, but fail with PositionUnknown."""
        finding = dict(self._finding)
        for task in finding:
            task.cancel()
        await asyncio.gather(*finding, return_exceptions=True)
        for unit in finding.values():
            if not unit.done.done():
                self.fail(
                    unit, PositionUnknown("the writer was closed before it found the position of this transaction")
                )

    async def barrier(self, journal: str, min_revision: int = 0, *, held: bool = False) -> AppendResult:
        """Return a journal's registers and head by an empty append, which is ordered after all earlier appends.

        With `held`, raises RegisterMismatch if there certainly are no registers, and IndexHasGreaterOffset if they may
        be lost. Works for read-only journals, too.
        """
        return await self.client.append(
            journal,
            b"",
            check_registers=label_selector(include={HELD: ""}) if held else None,
            retry_unknown=True,
            retry_timeout=self.retry_timeout,
            min_etcd_revision=min_revision,
        )

    async def certain_barrier(self, journal: str, min_revision: int = 0) -> AppendResult:
        """Make a `barrier`. Raises IndexHasGreaterOffset if it returns no registers, but they may exist.

        A broker that took a sealed journal over from unavailable brokers answers `barrier` as if the journal were
        empty. When those brokers return, the registers and the content are there again.
        """
        result = await self.barrier(journal, min_revision)
        if not result.registers.labels:
            with contextlib.suppress(RegisterMismatch):
                return await self.barrier(journal, min_revision, held=True)
        return result
