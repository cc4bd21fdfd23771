"""Reading ranges in sequence: committed messages of one range, or what a driver needs to sequence many.

A sequenced read numbers rows by *piece*: the range's number in the plan above, the row's segment in the range below
(see `coranto.messages.columnar`). Behind the rows of each range stands one that is no message but the range's summary,
for the driver. The driver decides which clocks of which pieces are committed, and rows are then chosen by a join on
`piece`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa

from coranto.errors import CorruptData
from coranto.messages.checkpoints import ProducerState
from coranto.messages.columnar import (
    ALWAYS,
    DROPPED,
    Int32s,
    Int64s,
    RangeScanner,
    Segment,
    committed_mask,
    replay_mask,
    resolve,
)
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.spark.ranges import Plan, Range
from coranto_consumers.spark.reading import JournalContent, Lines, read_lines

ALWAYS_PIECE: Final = ALWAYS
DROPPED_PIECE: Final = DROPPED
SUMMARY_PIECE: Final = -3
_SEGMENT_BITS: Final = 32
_NO_BOUND: Final = (1 << 63) - 1


def piece_of(number: int, segment: int) -> int:
    """The piece of a segment in the range that has a number."""
    return number << _SEGMENT_BITS | segment


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """What the driver learns of a range that was read."""

    number: int
    rows: int
    """Messages in the range, those that do not count for a replay included."""
    first: int
    """Offset of the first of them; that of the range when there are none."""
    end: int
    """Offset behind the last of them; that of the range's begin when there are none."""
    segments: tuple[Segment, ...]

    def dumps(self) -> bytes:
        segments = [(s.producer.hex(), int(s.flags), *s[2:]) for s in self.segments]
        return json.dumps([self.number, self.rows, self.first, self.end, segments], separators=(",", ":")).encode()

    @classmethod
    def loads(cls, content: bytes) -> Self:
        """Raises CorruptData."""
        try:
            number, rows, first, end, raw = json.loads(content)
            segments = tuple(
                Segment(ProducerId(bytes.fromhex(producer)), Flags(flags), *clocks_and_offset)
                for producer, flags, *clocks_and_offset in raw
            )
        except (TypeError, ValueError) as error:
            raise CorruptData(f"not a range's summary: {error}") from error
        return cls(number, rows, first, end, segments)


def read_committed(content: JournalContent, part: Range, framing: JsonLines) -> Iterator[Lines]:
    """The committed content of a range that stands for itself: nothing is known of messages before it.

    Reads the range twice, first to learn which transactions commit, so that memory does not grow with their size.
    Raises CorruptMessage and OffsetJump.
    """
    scanner = RangeScanner()
    for lines in read_lines(content, part, framing):
        scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
    [verdicts] = resolve([scanner.segments()], {}, replayed=()).verdicts

    scanner = RangeScanner()
    for lines in read_lines(content, part, framing):
        row_segment = scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
        yield lines.where(committed_mask(row_segment, verdicts, lines.clocks))


def read_sequenced(
    content: JournalContent, part: Range, plan: Plan, framing: JsonLines
) -> Iterator[tuple[Lines, Int64s]]:
    """The messages of one range of a plan with their pieces, and at the end a row that holds the range's summary.

    Raises CorruptMessage and OffsetJump.
    """
    number = plan.numbers[part]
    replay = {
        ProducerId(bytes.fromhex(producer)): ProducerState(0, begin)
        for producer, begin in plan.replay.get(part.journal, {}).items()
    }
    scanner = RangeScanner()
    rows, first, end = 0, part.begin, part.begin
    for lines in read_lines(content, part, framing):
        first = int(lines.begins[0]) if rows == 0 else first
        rows, end = rows + len(lines), int(lines.ends[-1])
        if plan.replay:
            lines = lines.where(replay_mask(lines.producers, lines.clocks, lines.begins, replay, _NO_BOUND))
        row_segment = scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
        yield lines, _pieces(number, row_segment)
    summary = RangeSummary(number, rows, first, end, tuple(scanner.segments()))
    yield _summary_row(part.journal, summary), np.array([SUMMARY_PIECE], dtype=np.int64)


def _pieces(number: int, row_segment: Int32s) -> Int64s:
    segment = row_segment.astype(np.int64)
    return np.where(segment < 0, segment, segment | number << _SEGMENT_BITS)


def _summary_row(journal: str, summary: RangeSummary) -> Lines:
    return Lines(
        journal,
        np.array([summary.first], dtype=np.int64),
        np.array([summary.end], dtype=np.int64),
        np.zeros(1, dtype=np.uint64),
        np.zeros(1, dtype=np.uint64),
        np.zeros(1, dtype=np.uint16),
        pa.array([summary.dumps()], pa.binary()),
    )
