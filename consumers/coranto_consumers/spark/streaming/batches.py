"""The plan of a micro-batch: the ranges that its tasks read, and their committed messages.

The planning process reads a batch's messages once, only for their UUIDs, and decides which messages are committed.
Tasks then read the values. A transaction that began before the batch, and is acknowledged in it, is delivered in the
batch: the content since the transaction's begin is read again. If that is more than a batch may read, the transaction
is delivered in parts (`sequencing.py`). The positions between parts have the same offset, but a later begin of the
producer's pending messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Source
from coranto.messages.columnar import Int64s
from coranto.messages.framing import JsonLines
from coranto.messages.outlines import resolve_outlines
from coranto.messages.pruning import Pruning
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.journals.framings import ReadFraming
from coranto_consumers.journals.ranges import NumberedRange, Range, States, split
from coranto_consumers.journals.reading import JournalContent, Lines, read_blocks, read_lines
from coranto_consumers.spark.committed.scanning import RangeSummarizer, RangeSummary, Summaries
from coranto_consumers.spark.committed.sequencing import (
    LongTransaction,
    RangeDecision,
    SequencedRanges,
    find_long,
    sequence,
    sequence_part,
    warn_of_resets,
)
from coranto_consumers.spark.streaming.offsets import Position, bounded

_TAIL_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class StreamPart:
    """A range that a task reads, and the decision about its messages."""

    numbered: NumberedRange
    decision: RangeDecision | None = None
    """None in an uncommitted read, which delivers every line."""

    @property
    def length(self) -> int:
        return self.numbered.range.length

    def read(self, content: JournalContent, framing: ReadFraming) -> Iterator[Lines]:
        """Yield the messages of the batch in this range. Raises CorruptMessage and OffsetJump."""
        if self.decision is None:
            yield from (lines.messages for lines in read_lines(content, self.numbered.range, framing))
            return
        for lines, segments in RangeSummarizer(self.numbered).segments(content, framing):
            yield self.decision.committed(lines, segments, commits=self.numbered.commits)


@dataclass(frozen=True, slots=True)
class ReadState:
    position: Position
    source: Source
    anchors: Mapping[ProducerId, int]


@dataclass(frozen=True, slots=True)
class JournalBatch:
    """The part of a micro-batch in one journal."""

    parts: tuple[StreamPart, ...]
    rows: int
    """The number of messages that were read, including acknowledgements."""
    state: ReadState


@dataclass(frozen=True, slots=True)
class BatchPlanner:
    """Plans the parts of batches, one journal at a time. It has no state, and may be used by several threads."""

    content: JournalContent
    framing: ReadFraming
    committed: bool
    part_bytes: int
    commits: bool = False
    """True if tasks must return the offsets that committed messages."""

    def plan(
        self,
        whole: Range,
        state: ReadState,
        *,
        cuts: Sequence[int],
        counted: bool = False,
        max_messages: int | None = None,
        listed: int = 0,
        first_offset: int = 0,
        max_replay_bytes: int | None = None,
    ) -> JournalBatch:
        """Plan to read the messages that start in `whole`, and at most `max_messages` of them.

        If more than `max_replay_bytes` would be read again for a transaction, the batch ends before the transaction's
        acknowledgement, or delivers a part of the transaction. `cuts` are offsets where splits are cheap, and `listed`
        is the number of producers to list in the position after the batch. Uncommitted reads count messages only if
        `counted`, or with `max_messages`. Raises CorruptMessage, CorruptData and OffsetJump.
        """
        if not self.committed:
            if counted or max_messages:
                end, rows = _count_messages(self.content, whole, self.framing, max_messages)
            else:
                end, rows = _last_end(self.content, whole, self.framing), 0
            found = replace(whole, end=end, limit=end)
            ranges = [found] if found.length else []
            if ranges and isinstance(self.framing, JsonLines):
                ranges = split(found, self.part_bytes, cuts)
            parts = tuple(StreamPart(NumberedRange(number, part)) for number, part in enumerate(ranges))
            after = Source(end, journal_id=whole.journal_id)
            return JournalBatch(parts, rows, ReadState(replace(state.position, offset=end), after, {}))
        summaries: dict[Range, RangeSummary] = {}
        for part, summary in self._scanned(whole, cuts, max_messages=max_messages):
            if summary.rows:
                summaries[replace(part, end=summary.end, limit=summary.end)] = summary
        if not summaries:
            return JournalBatch((), 0, state)
        rows = sum(summary.rows for summary in summaries.values())
        source = state.source
        if not whole.aligned:  # Reading begins with the next line.
            source = replace(source, read_through=min(summary.first for summary in summaries.values()))
        pruning = Pruning(time.time(), first_offsets={whole.journal: first_offset})
        sequenced = sequence(whole.journal, source, summaries, pruning=pruning)
        if max_replay_bytes is not None:
            long = find_long(whole.journal, source, sequenced, max_replay_bytes)
            if long is not None and long.acknowledged_at > source.read_through:
                until = replace(whole, end=long.acknowledged_at)
                return self.plan(
                    until, state, cuts=cuts, max_messages=max_messages, listed=listed, first_offset=first_offset
                )
            if long is not None:
                return self.plan_part(long, state, whole.limit, max_replay_bytes, cuts=cuts, listed=listed)
        replayed: dict[Range, RangeSummary] = {}
        replays: States = {}
        if sequenced.replay is not None:
            before, replays = sequenced.replay
            replayed = dict(self._scanned(before, cuts, first_number=len(summaries), replay=replays))
            sequenced = sequence(whole.journal, source, summaries, replayed, replays, pruning)
        warn_of_resets(whole.journal, sequenced)
        both = self._parts(sequenced, replayed, replays) + self._parts(sequenced, summaries, {})
        anchors = _anchors(state.anchors, state.source.producers, sequenced.source.producers, tuple(summaries.values()))
        return JournalBatch(both, rows, _state_after(state, sequenced.source, anchors, listed))

    def plan_part(
        self, long: LongTransaction, state: ReadState, head: int, max_bytes: int, *, cuts: Sequence[int], listed: int
    ) -> JournalBatch:
        """Plan to deliver about the next `max_bytes` of a long transaction. `head` is the journal's head."""
        source = state.source
        replays = {long.producer: source.producers[long.producer]}
        acknowledgement = self._scan(long.acknowledgement(head), 0, max_messages=1)
        again = dict(self._scanned(long.part(source, max_bytes), cuts, first_number=1, replay=replays))
        sequenced = sequence_part(long, source, acknowledgement, again)
        rows = sum(summary.rows for summary in again.values())
        # A producer without an anchor is listed, because the content does not show how much is delivered.
        anchors = {producer: at for producer, at in state.anchors.items() if producer != long.producer}
        after = _state_after(state, sequenced.source, anchors, listed)
        return JournalBatch(self._parts(sequenced, again, replays), rows, after)

    def restore(self, journal: str, position: Position) -> ReadState:
        """Return the state at a position from a checkpoint. Raises CorruptMessage and OffsetJump."""
        listed = Source(position.offset, position.producers, position.journal_id)
        if not self.committed or position.rescan is None:
            return ReadState(position, listed, {})
        end, journal_id = position.offset, position.journal_id
        whole = Range(journal, position.rescan, end, end, journal_id=journal_id)
        summaries = [summary for _, summary in self._scanned(whole, ())]
        outlines = [summary.outline for summary in summaries]
        resolution = resolve_outlines(outlines, {}, replayed=(), through=position.offset)
        states = resolution.states | listed.seen_producers
        anchors = _anchors({}, {}, states, summaries)
        return ReadState(
            position,
            Source(position.offset, states, position.journal_id),
            {producer: at for producer, at in anchors.items() if producer not in position.producers},
        )

    def _parts(self, sequenced: SequencedRanges, ranges: Summaries, replays: States) -> tuple[StreamPart, ...]:
        return tuple(
            StreamPart(NumberedRange(each.number, part, replays, self.commits), sequenced.decisions[each.number])
            for part, each in ranges.items()
        )

    def _scanned(
        self,
        whole: Range,
        cuts: Sequence[int],
        *,
        first_number: int = 0,
        replay: States | None = None,
        max_messages: int | None = None,
    ) -> Iterator[tuple[Range, RangeSummary]]:
        """Yield the parts of a range with their summaries. Only parts with messages are numbered."""
        lines, number, left = isinstance(self.framing, JsonLines), first_number, max_messages
        parts = deque(split(whole, self.part_bytes, cuts) if lines else [whole])
        while parts and left != 0:
            part = parts.popleft()
            if not lines:
                part = replace(part, end=min(part.end, part.begin + self.part_bytes))
            summary = self._scan(part, number, replay=replay, max_messages=left)
            yield part, summary
            number += summary.rows > 0
            left = None if left is None else left - summary.rows
            if not lines and summary.rows and summary.end < whole.end:
                parts.append(replace(whole, begin=summary.end))

    def _scan(
        self, part: Range, number: int, *, replay: States | None = None, max_messages: int | None = None
    ) -> RangeSummary:
        scan = RangeSummarizer(NumberedRange(number, part, replay or {}, self.commits))
        for _ in scan.segments(self.content, self.framing, max_messages):
            pass
        return scan.summary()


def _state_after(before: ReadState, source: Source, anchors: Mapping[ProducerId, int], listed: int) -> ReadState:
    shown, others, rescan = bounded(source.producers, anchors, source.read_through, listed)
    known = before.position
    position = Position(source.read_through, known.created, producers=shown, rescan=rescan, journal_id=known.journal_id)
    return ReadState(position, replace(source, producers={**shown, **others}), anchors)


def part_between(journal: str, state: ReadState, after: Position) -> tuple[LongTransaction, int] | None:
    """Return the long transaction whose part is delivered between two positions of one offset, and the part's bytes."""
    for producer, end in after.producers.items():
        begin = state.source.producers.get(producer)
        if begin is not None and begin.is_pending and end.is_pending and begin.begin < end.begin:
            return LongTransaction(journal, producer, after.offset), end.begin - begin.begin
    return None


def _anchors(
    known: Mapping[ProducerId, int], before: States, after: States, summaries: Sequence[RangeSummary]
) -> dict[ProducerId, int]:
    """Return the producers' anchors (`offsets.py`) after the summarized ranges."""
    anchors = {producer: at for producer, at in known.items() if producer in after}
    decided = set()
    for summary in summaries:
        for _, segment in summary.outline.border:
            producer = segment.producer
            if producer not in after or producer in decided:
                continue
            if producer not in before:
                anchors.setdefault(producer, segment.first_offset)
                continue
            last_ack = after[producer].last_ack
            if last_ack == before[producer].last_ack:
                continue
            clock = segment.first_clock if segment.flags is Flags.ACK_TXN else segment.last_clock
            if segment.flags is not Flags.CONTINUE_TXN and clock == last_ack:
                anchors[producer] = segment.first_offset
                decided.add(producer)
    return anchors


def require_end(journal: str, batch: JournalBatch, end: int) -> None:
    """Raise CorruptData if a batch that is planned again ends at another offset than before."""
    if batch.state.position.offset != end:
        raise CorruptData(
            f"journal {journal}: a batch of the checkpoint ends at {end}, and now at {batch.state.position.offset}: "
            "the journal has lost content, or is not the one that was read"
        )


def require_part(journal: str, batch: JournalBatch, after: Position) -> None:
    """Raise CorruptData if a batch with a part of a transaction leads to another state than before."""
    found = batch.state.source.producers
    if any(found.get(producer) != state for producer, state in after.producers.items()):
        raise CorruptData(
            f"journal {journal}: a batch of the checkpoint delivers a part of a transaction, and now another one: the "
            "journal has lost content, or is not the one that was read"
        )


def _count_messages(
    content: JournalContent, whole: Range, framing: ReadFraming, max_messages: int | None = None
) -> tuple[int, int]:
    rows, end = 0, whole.begin
    for ends in _ends(content, whole, framing):
        if max_messages is not None:
            ends = ends[: max_messages - rows]
        if not len(ends):
            break
        rows, end = rows + len(ends), int(ends[-1])
    return end, rows


def _last_end(content: JournalContent, whole: Range, framing: ReadFraming) -> int:
    """Return the end of the last complete message that starts in a range."""
    if not isinstance(framing, JsonLines):
        return _count_messages(content, whole, framing)[0]  # A record is found only from the previous record.
    tail = _TAIL_BYTES
    while True:
        begin = max(whole.begin, whole.end - tail)
        part = whole if begin == whole.begin else replace(whole, begin=begin, aligned=False)
        ends = [offset + len(block) for offset, block in read_blocks(content, part)]
        if ends or begin == whole.begin:
            return max(ends, default=whole.begin)
        tail *= 8


def _ends(content: JournalContent, whole: Range, framing: ReadFraming) -> Iterator[Int64s]:
    if not isinstance(framing, JsonLines):
        yield from (lines.ends for lines in read_lines(content, whole, framing))
        return
    for offset, block in read_blocks(content, whole, max_line_bytes=framing.max_line_bytes):
        yield np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (offset + 1)
