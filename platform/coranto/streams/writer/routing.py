"""Routing of keys to segment writers, while segments are sealed and succeeded.

A key's events go to the active segment that has the key. A segment that this writer has written to keeps its keys until
the writer leaves it: until it knows all durable units there, and has handed the others to the successors. A successor
is written to only once this writer has left all segments before it. So the events of each key stay in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from coranto.client.retry import Retry
from coranto.errors import CorantoError, JournalNotFound, NotAllowed, StreamSealed, WriteError
from coranto.streams.model.frontier import ancestors, graph_of
from coranto.streams.model.lineage import Lineage, trace
from coranto.streams.model.registers import DEFAULT_MAX_WRITERS, Registers
from coranto.streams.model.stream import Segment, Stream, decode, segments_selector
from coranto.streams.writer.segment_writer import SegmentWriter
from coranto.streams.writer.shared import Shared
from coranto.streams.writer.units import WriteUnit


class Routing:
    """The segment writers of one stream writer."""

    def __init__(self, shared: Shared, name: str, stream: Stream) -> None:
        self._shared = shared
        self._name = name
        self._stream = stream
        self._live: dict[int, SegmentWriter] = {}
        self._superseded: list[SegmentWriter] = []  # Writers of segments that are no longer active, oldest first.
        self._left = asyncio.Event()
        self._sealed: dict[int, Registers] = {}
        """The registers of sealed segments, which no longer change."""

    @property
    def stream(self) -> Stream:
        return self._stream

    @property
    def writers(self) -> list[SegmentWriter]:
        return list(self._live.values())

    def route(self, key_hash: int) -> SegmentWriter:
        """Return the writer for a key hash. Raises StreamSealed."""
        for writer in self._superseded:
            if writer.segment.range.contains(key_hash):
                return writer
        segment = self._stream.segment_at(key_hash)
        if segment is None:
            raise StreamSealed(f"stream {self._name} is sealed: it takes no more events. Write to another stream")
        if segment.number not in self._live:
            most = self._stream.max_writers or DEFAULT_MAX_WRITERS
            self._live[segment.number] = SegmentWriter(self._shared, self, segment, most)
        return self._live[segment.number]

    async def refresh(self) -> None:
        """Fetch the stream again, and leave segments that are no longer active. Raises StreamNotFound."""
        stream = decode(await self._shared.client.list(segments_selector(self._name)))
        if stream.revision < self._stream.revision:
            return  # The broker is behind.
        self._stream = stream
        active = {segment.number for segment in stream.active()}
        known = {writer.segment.number for writer in self._superseded}
        for number, writer in self._live.items():
            if number not in active and number not in known:
                self._superseded.append(writer)
                writer.leave()
        self._superseded.sort(key=lambda writer: writer.segment.number)
        # Segments that were truncated away are no longer needed.
        self._sealed = {number: known for number, known in self._sealed.items() if number in stream.segments}
        self._shared.ends = {number: end for number, end in self._shared.ends.items() if number in stream.segments}

    async def cancel(self, error: WriteError) -> None:
        while waiting := [writer for writer in self.writers if not writer.is_closed]:
            for writer in waiting:  # A writer may hand units to a closed one, which is then open again.
                await writer.cancel(error)

    # -- For segment writers -------------------------------------------------------------------------------------------

    async def wait_for_predecessors(self, writer: SegmentWriter) -> None:
        while any(
            number < writer.segment.number and other.segment.range.overlaps(writer.segment.range)
            for number, other in self._live.items()
        ):
            self._left.clear()
            await self._left.wait()

    async def lineage(self, writer: SegmentWriter, has_entry: bool) -> Lineage:
        label = self._shared.identity.label
        return await trace(self._stream, writer.segment, label, has_entry, self._registers_of)

    def earlier_segments(self, segment: Segment, key_hash: int) -> Sequence[Segment]:
        segments = self._stream.segments
        earlier = sorted(ancestors(graph_of(self._stream), [segment.number]) & segments.keys(), reverse=True)
        return [segments[number] for number in earlier if segments[number].range.contains(key_hash)]

    async def wait_until_sealing(self, writer: SegmentWriter) -> Segment | None:
        retry = Retry(self._shared.retry_timeout)
        while True:
            await self.refresh()
            segment = self._stream.segments.get(writer.segment.number)
            if segment is None or segment.sealing:
                return segment
            delay = retry.failed(self._shared.clock.monotonic())
            if delay is None:
                raise NotAllowed(f"append to {segment.journal}", detail="though it is not listed as being sealed")
            await self._shared.clock.sleep(delay)

    def take_over(self, writer: SegmentWriter, units: Iterable[WriteUnit], registers: Registers | None) -> None:
        number = writer.segment.number
        self._live.pop(number, None)
        self._superseded = [each for each in self._superseded if each is not writer]
        if registers is not None and registers.held:
            self._sealed[number] = registers
        adopted: dict[SegmentWriter, list[WriteUnit]] = {}
        for unit in units:
            try:
                adopted.setdefault(self.route(unit.key_hash), []).append(unit)
            except CorantoError as error:
                self._shared.fail(unit, error)
        for successor, theirs in adopted.items():
            successor.adopt(theirs)
        self._left.set()

    async def _registers_of(self, segment: Segment) -> tuple[Registers, int] | None:
        if (known := self._sealed.get(segment.number)) is not None:
            return known, 0
        try:
            result = await self._shared.certain_barrier(segment.journal, segment.mod_revision)
        except JournalNotFound:
            return None
        registers = Registers.of(result.registers)
        if registers.held:
            self._sealed[segment.number] = registers
            return registers, result.end
        # The registers were lost permanently, or never held. A broker that took the segment over after the loss may
        # return 0 as its end. If the final offset or stored fragments show that there is content, they were lost.
        if segment.sealed_at is not None:
            return registers, segment.sealed_at
        return registers, max(result.end, await self._shared.client.head(segment.journal))
