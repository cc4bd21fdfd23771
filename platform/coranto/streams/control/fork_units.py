"""The transactions of a stream that a cut at given offsets could tear, found by reading the stream."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from coranto.client.client import JournalClient
from coranto.effects import Entropy
from coranto.errors import CorruptData, JournalNotFound, OffsetJump
from coranto.messages.framing import Framing, iter_messages
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import Flags, ProducerId
from coranto.streams.control.decisions import Decisions
from coranto.streams.model.fork_cut import SegmentSpan, Unit
from coranto.streams.model.stream import Segment, Stream
from coranto.telemetry import ProgressReport

_ATTEMPTS: Final = 3
_Ack = tuple[int, ProducerId, int]
"""An acknowledgement: the number of its segment, its producer and its clock."""


async def torn_units(
    client: JournalClient,
    stream: Stream,
    ends: Mapping[int, int],
    wanted: Mapping[int, int],
    events: Framing[Any],
    entropy: Entropy,
    progress: ProgressReport | None = None,
) -> list[Unit]:
    """Return all transactions on several keys, and the other units that a cut at `wanted` would tear.

    These are transactions on one key and events that are only partly below the cut. `ends` are the ends of segments at
    a moment when all decided transactions are complete. Each segment is read from its first remaining content, to its
    end if there are transactions on several keys, otherwise to the cut: content that retention has removed cannot be
    torn. `progress` counts the bytes read. Raises errors of the client, OffsetJump for content that is missing in
    between, and CorruptMessage.
    """
    decided = await _decided(client, stream, events, entropy)
    spans: dict[str, dict[int, SegmentSpan]] = {}
    torn: list[Unit] = []
    for number, segment in stream.segments.items():
        end = ends[number] if decided else wanted[number]
        reader = _Segment(segment, wanted[number], decided, spans)
        await reader.read(client, events, end, progress)
        torn += reader.torn
    return [*spans.values(), *torn]


async def _decided(client: JournalClient, stream: Stream, events: Framing[Any], entropy: Entropy) -> dict[_Ack, str]:
    """Return the transactions on several keys that were decided, by each of their acknowledgements."""
    decisions = Decisions(client, stream.name, entropy)
    try:
        recorded = await decisions.read(0, (await decisions.gate()).end)
    except JournalNotFound:
        return {}
    numbers = {segment.journal: number for number, segment in stream.segments.items()}
    found: dict[_Ack, str] = {}
    for txn, each in recorded.decided.items():
        for journal, content in each.acks.items():
            for ack in iter_messages(events, journal, [content], 0):
                if journal in numbers:
                    found[numbers[journal], ack.producer, ack.clock] = txn
    return found


class _Segment:
    """Reads one segment. Only the first acknowledgement of a transaction counts; later ones are duplicates."""

    def __init__(
        self, segment: Segment, wanted: int, decided: Mapping[_Ack, str], spans: dict[str, dict[int, SegmentSpan]]
    ) -> None:
        self._segment = segment
        self._wanted = wanted
        self._decided = decided
        self._spans = spans
        self.torn: list[Unit] = []

    async def read(
        self, client: JournalClient, events: Framing[Any], end: int, progress: ProgressReport | None
    ) -> None:
        """Read the segment from its first remaining content. Starts again if retention removes more content."""
        for attempt in range(_ATTEMPTS):
            try:
                await self._read_from(await self._begin(client), client, events, end, progress)
            except OffsetJump:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.torn.clear()
                for spans in self._spans.values():
                    spans.pop(self._segment.number, None)
            else:
                return

    async def _begin(self, client: JournalClient) -> int:
        """Return the first readable offset. Without fragments, all content is gone."""
        fragments = [each.fragment for each in await client.fragments(self._segment.journal)]
        first = min((each.begin for each in fragments), default=await client.head(self._segment.journal))
        return max(self._segment.begin, first)

    async def _read_from(
        self, at: int, client: JournalClient, events: Framing[Any], end: int, progress: ProgressReport | None
    ) -> None:
        number = self._segment.number
        if at >= end:
            return
        run: tuple[ProducerId, int] | None = None  # The current run of pending events: producer, begin.
        chunks = client.read(self._segment.journal, at, end_offset=end, fail_on_jump=True)
        async with contextlib.aclosing(chunks):
            async for event in AsyncReadUncommitted(events, self._segment.journal, chunks, at):
                if event.begin < self._wanted < event.end:
                    self.torn.append({number: SegmentSpan(run[1] if run else event.begin, event.end)})
                if event.flags == Flags.CONTINUE_TXN:
                    if run is None or run[0] != event.producer:
                        run = event.producer, event.begin
                else:
                    run = None
                if event.end == self._wanted and run is not None:
                    self.torn.append({number: SegmentSpan(run[1], event.end + 1)})
                if (txn := self._decided.get((number, event.producer, event.clock))) is not None:
                    self._spans.setdefault(txn, {}).setdefault(number, SegmentSpan(event.begin, event.end))
                if progress is not None:
                    progress.advance(event.end - at)
                at = event.end
        if at < min(self._wanted, end):
            raise CorruptData(
                f"segment {self._segment.journal} ends at {at} within an event, and {self._wanted} is wanted"
            )
