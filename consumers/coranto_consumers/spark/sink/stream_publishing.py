"""Publishing of a task's rows to the segments of a stream, as pending events that the driver commits.

Each attempt is a separate producer. When a segment is sealed, events that are not appended yet go to its successors,
with new clocks; the driver moves appended events when it commits (`coranto.streams.writer.multi_key.bulk`). If the
response to an append is lost, its events are published again under another producer id, so that they count once.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.append.service import Appended
from coranto.client.loop import run_blocking
from coranto.errors import (
    AppendOutcomeUnknown,
    CorantoError,
    InvalidInput,
    JournalNotFound,
    NotAllowed,
    StreamChanged,
    StreamSealed,
)
from coranto.messages.arrow_values import joined
from coranto.messages.columnar import Int64s, UInt64s
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerClock, ProducerId, new_producer_id
from coranto.streams.model.columnar_keys import key_hashes
from coranto.streams.model.stream import decode, segments_selector
from coranto.streams.writer.multi_key.bulk import hold_segment
from coranto.streams.writer.multi_key.bulk_parts import EVENTS, BulkPart, restamped, roll_back
from coranto_consumers.spark.sink.message_rows import RowDigest, Rows

KEPT_PLACES: Final = 1 << 18
"""The maximum number of events whose places, 8 bytes each, a task reports to the driver. With more events, none can be
moved after the task."""
_APPEND_BYTES: Final = 1 << 20
_HELD_BYTES: Final = 16 << 20
_PENDING_BYTES: Final = 32 << 20
_POLL_SECONDS: Final = 0.05
_MAX_REFUSALS: Final = 1000
"""The maximum number of an attempt's appends that are rejected, or whose responses are lost."""


@dataclass(slots=True)
class _Block:
    content: bytes
    last_clock: int
    places: UInt64s
    done: Future[Appended]


@dataclass(slots=True)
class _Segment:
    """The events of one producer in one segment: buffered, in flight and durable."""

    producer: ProducerId
    first_clock: int
    held: list[bytes] = field(default_factory=list)
    size: int = 0
    last_clock: int = 0
    held_places: list[UInt64s] = field(default_factory=list)
    sent: deque[_Block] = field(default_factory=deque)
    begin: int = -1
    durable_clock: int = 0
    events: int = 0
    places: list[UInt64s] = field(default_factory=list)


class SegmentPublisher:
    """Publishes the events of one attempt. `prepared` are journals of segments that are ready for pending events."""

    def __init__(
        self, client: SyncJournalClient, stream: str, prepared: Iterable[str] = (), digest: RowDigest | None = None
    ) -> None:
        self._digest = digest
        self._client = client
        self._name = stream
        self._prepared = set(prepared)
        self._producer = new_producer_id(os.urandom)
        self._own: dict[str, ProducerId] = {}  # The new producer ids for journals that rejected an append.
        self._refusals = 0
        self._clock = ProducerClock(time.time_ns)
        self._service = client.append_service(
            batch_bytes=_APPEND_BYTES, pending_bytes=_PENDING_BYTES, retry_unknown=False
        )
        self._all: list[tuple[str, _Segment]] = []
        self._segments: dict[str, _Segment] = {}
        self._events = 0
        self._check()

    def roll_back(self) -> None:
        """Append rollbacks after an error, so that readers drop the events."""
        self._service.cancel()
        run_blocking(self._roll_back([replace(self._part(*each), last_clock=self._clock.tick()) for each in self._all]))

    async def _roll_back(self, parts: list[BulkPart]) -> None:
        async with JournalClient.of(self._client.config) as client:
            await roll_back(client, parts)

    def add(self, events: Rows, keys: Any) -> None:
        """Publish events by their routing keys, which are strings. Raises InvalidInput and StreamSealed."""
        if not len(events):
            return
        if keys.null_count:
            raise InvalidInput("a row has no routing key; fill it, or filter such rows out", field="stream output")
        self._drain()
        clock = self._clock.ticks(len(events))
        clocks = np.uint64(clock) + np.arange(len(events), dtype=np.uint64) * np.uint64(CLOCK_TICK)
        lines = events.lines(EVENTS, self._producer, clock, Flags.CONTINUE_TXN)
        if self._digest is not None:
            self._digest.add(lines, EVENTS, self._producer)
        places = key_hashes(keys)
        for journal, rows in self._routed(places):
            first, last = int(clocks[rows[0]]), int(clocks[rows[-1]])
            if (own := self._own.get(journal)) is not None:
                first = self._clock.ticks(len(rows))
                last = first + (len(rows) - 1) * CLOCK_TICK
                part = events.take(rows).lines(EVENTS, own, first, Flags.CONTINUE_TXN)
            else:
                part = lines if len(rows) == len(events) else lines.take(pa.array(rows))
            self._hold(journal, joined(part).tobytes(), first, last, places[rows])

    def finish(self) -> tuple[BulkPart, ...]:
        """Wait until all events are in their segments, and return the parts."""
        while unsent := [journal for journal, each in self._segments.items() if each.held or each.sent]:
            for journal in unsent:
                self._send(journal)
            for journal in unsent:
                self._settle(journal, wait=True)
        return tuple(self._part(journal, each) for journal, each in self._all if each.events)

    def _check(self) -> None:
        """Load the active segments. Raises StreamSealed, StreamNotFound and CorruptData."""
        active = decode(self._client.list(segments_selector(self._name))).active()
        if not active:
            raise StreamSealed(f"stream {self._name} is sealed: it takes no more events. Write to another stream")
        self._journals = [segment.journal for segment in active]
        self._ends: UInt64s = np.array([segment.range.end for segment in active], dtype=np.uint64)

    def _routed(self, places: UInt64s) -> list[tuple[str, Int64s]]:
        """Return the journals of events, each with the numbers of its events in order."""
        numbers = np.searchsorted(self._ends, places, side="right")
        order: Int64s = np.argsort(numbers, kind="stable")
        present, begins = np.unique(numbers[order], return_index=True)
        rows = np.split(order, begins[1:])
        return [(self._journals[number], each) for number, each in zip(present.tolist(), rows, strict=True)]

    def _hold(self, journal: str, content: bytes, first_clock: int, last_clock: int, places: UInt64s) -> None:
        segment = self._segments.get(journal)
        if segment is None:
            segment = self._segments[journal] = _Segment(self._own.get(journal, self._producer), first_clock)
            self._all.append((journal, segment))  # A key's events in a segment precede those in its successors.
        segment.held.append(content)
        segment.held_places.append(places)
        segment.last_clock = last_clock
        segment.size += len(content)
        if segment.size >= _APPEND_BYTES:
            self._send(journal)
        elif sum(each.size for each in self._segments.values()) > _HELD_BYTES:
            self._send(max(self._segments, key=lambda name: self._segments[name].size))

    def _drain(self) -> None:
        """Wait until no events for sealed segments are left, before newer events of the keys go to the successors."""
        while sealed := [
            journal
            for journal, each in self._segments.items()
            if (each.held or each.sent) and journal not in self._journals
        ]:
            for journal in sealed:
                self._send(journal)
                self._settle(journal, wait=True)

    def _send(self, journal: str) -> None:
        segment = self._segments.get(journal)
        if segment is None:
            return  # Its events were moved to other segments.
        if segment.held:
            if journal not in self._prepared:
                try:
                    run_blocking(self._prepare(journal))
                except (NotAllowed, JournalNotFound) as error:
                    self._publish_elsewhere(journal, segment, error)
                    return
                self._prepared.add(journal)
            content, places = b"".join(segment.held), np.concatenate(segment.held_places)
            segment.held, segment.held_places, segment.size = [], [], 0
            segment.sent.append(_Block(content, segment.last_clock, places, self._service.append(journal, content)))
        self._settle(journal, wait=False)

    async def _prepare(self, journal: str) -> None:
        async with JournalClient.of(self._client.config) as client:
            await hold_segment(client, journal, self._clock, client.config.retry_timeout)

    def _settle(self, journal: str, *, wait: bool) -> None:
        """Record completed appends, in order. Publishes events that a segment rejected to other segments."""
        segment = self._segments.get(journal)
        while segment is not None and segment.sent and (wait or segment.sent[0].done.done()):
            block = segment.sent[0]
            try:
                appended = block.done.result()
            except (NotAllowed, JournalNotFound, AppendOutcomeUnknown) as error:
                self._publish_elsewhere(journal, segment, error)
                return
            segment.sent.popleft()
            segment.begin = appended.begin if segment.begin < 0 else segment.begin
            segment.durable_clock = block.last_clock
            segment.events += len(block.places)
            self._events += len(block.places)
            if self._events <= KEPT_PLACES:
                segment.places.append(block.places)

    def _publish_elsewhere(self, journal: str, segment: _Segment, error: CorantoError) -> None:
        """Publish a segment's buffered events, and the events of its failed appends, to the active segments."""
        del self._segments[journal]
        self._own[journal] = new_producer_id(os.urandom)
        refused = list(segment.sent)
        segment.sent.clear()
        for block in refused:
            block.done.exception()  # All later appends to the segment have failed, too.
        lines = [line for block in refused for line in block.content.split(b"\n")[:-1]]
        lines += [line for content in segment.held for line in content.split(b"\n")[:-1]]
        places: UInt64s = np.concatenate([*(block.places for block in refused), *segment.held_places])
        segment.held, segment.held_places, segment.size = [], [], 0
        self._refusals += 1
        if self._refusals > _MAX_REFUSALS:
            raise error
        if not isinstance(error, AppendOutcomeUnknown):
            self._await_change(journal, error)
        self._service.reset(journal)
        for name, rows in self._routed(places):
            # The target segment may itself have a new producer id, after a rejected append.
            first = self._clock.ticks(len(rows))
            clocks = [first + number * CLOCK_TICK for number in range(len(rows))]
            stamped = [
                restamped(lines[row] + b"\n", self._own.get(name, self._producer), clock)
                for row, clock in zip(rows.tolist(), clocks, strict=True)
            ]
            self._hold(name, b"".join(stamped), clocks[0], clocks[-1], places[rows])

    def _await_change(self, journal: str, error: CorantoError) -> None:
        """Reload the active segments until a segment that rejects events is not active. Brokers may lag behind etcd."""
        deadline = time.monotonic() + self._client.config.retry_timeout
        while True:
            self._check()
            if journal not in self._journals:
                return
            if time.monotonic() > deadline:
                raise StreamChanged(f"segment {journal} is active and takes no events: {error}") from error
            time.sleep(_POLL_SECONDS)
            if isinstance(error, JournalNotFound):
                return

    def _part(self, journal: str, segment: _Segment) -> BulkPart:
        places = b"".join(each.tobytes() for each in segment.places) if self._events <= KEPT_PLACES else None
        return BulkPart(
            journal, segment.producer, segment.begin, segment.first_clock, segment.durable_clock, segment.events, places
        )
