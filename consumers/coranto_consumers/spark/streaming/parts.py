"""The ranges that the tasks of a micro-batch read, and their committed messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from coranto.messages.checkpoints import ProducerState
from coranto.messages.outlines import Limit, SegmentCommit, commit_offsets, limited_mask
from coranto.messages.uuids import ProducerId
from coranto_consumers.spark.committed.scanning import RangeSummarizer, RangeSummary
from coranto_consumers.spark.committed.sequencing import Sequenced
from coranto_consumers.spark.journals.framings import ReadFraming
from coranto_consumers.spark.journals.ranges import NumberedRange, Range
from coranto_consumers.spark.journals.reading import JournalContent, Lines, read_lines


@dataclass(frozen=True, slots=True)
class StreamPart:
    """A range that a task reads, and its uncommitted messages."""

    numbered: NumberedRange
    limits: tuple[Limit, ...] | None = None
    """By segment. None in an uncommitted read, where every line counts."""
    acknowledged: tuple[SegmentCommit, ...] | None = None
    """The acknowledged segments, if lines are to tell where they became committed."""

    @property
    def length(self) -> int:
        return self.numbered.range.length

    def read(self, content: JournalContent, framing: ReadFraming) -> Iterator[Lines]:
        """Yield the messages of the batch in this range. Raises CorruptMessage and OffsetJump."""
        if self.limits is None:
            yield from (lines.messages for lines in read_lines(content, self.numbered.range, framing))
            return
        for lines, segments in RangeSummarizer(self.numbered).segments(content, framing):
            committed = limited_mask(segments, self.limits, lines.clocks)
            if self.acknowledged is not None:
                lines = replace(lines, commits=commit_offsets(segments, self.acknowledged, lines.begins))
            yield lines.where(committed)


def stream_parts(
    sequenced: Sequenced,
    ranges: Mapping[Range, RangeSummary],
    replays: Mapping[ProducerId, ProducerState] | None = None,
    *,
    commits: bool,
) -> Iterator[StreamPart]:
    """Yield sequenced ranges for tasks. With `replays`, only the messages of these producers count.

    With `commits`, tasks are to tell where messages became committed.
    """
    limits: dict[int, list[Limit]] = {}
    for limit in sequenced.limits:
        limits.setdefault(limit.piece >> 32, []).append(Limit(limit.piece & 0xFFFFFFFF, limit.lo, limit.hi))
    acknowledged: dict[int, list[SegmentCommit]] = {}
    for piece, offset in sequenced.commits:
        acknowledged.setdefault(piece >> 32, []).append(SegmentCommit(piece & 0xFFFFFFFF, offset))
    for part, summary in ranges.items():
        yield StreamPart(
            NumberedRange(summary.number, part, replays or {}),
            tuple(limits.get(summary.number, ())),
            tuple(acknowledged.get(summary.number, ())) if commits else None,
        )
