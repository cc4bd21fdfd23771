"""Sequenced reading of ranges: the committed messages of one range, or input for a driver that sequences many ranges.

A sequenced read gives each row a number, its *piece*. The upper bits are the range's number in the plan, and the lower
bits are the row's segment in the range (see `coranto.messages.columnar`). After the rows of each range comes one row
that is not a message but the range's summary, for the driver. The driver decides which clocks of which pieces are
committed, and rows are then chosen by a join on `piece`.
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
    Int32s,
    Int64s,
    RangeScanner,
    RowSegment,
    committed_mask,
    replay_mask,
    resolve,
)
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.spark.ranges import Range, ReadPlan
from coranto_consumers.spark.reading import JournalContent, Lines, read_lines

ALWAYS_PIECE: Final = ALWAYS
SUMMARY_PIECE: Final = -3
_SEGMENT_BITS: Final = 32
_NO_BOUND: Final = (1 << 63) - 1


def piece_of(number: int, segment: int) -> int:
    """Return the piece of a segment in the range with number `number`."""
    return number << _SEGMENT_BITS | segment


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """The summary of a range that was read, for the driver."""

    number: int
    rows: int
    """The number of messages in the range, including messages that do not count for a replay."""
    first: int
    """The offset of the first message. Without messages, the range's begin."""
    end: int
    """The offset after the last message. Without messages, the range's begin."""
    segments: tuple[RowSegment, ...]

    def dumps(self) -> bytes:
        segments = [(s.producer.hex(), int(s.flags), *s[2:]) for s in self.segments]
        return json.dumps([self.number, self.rows, self.first, self.end, segments], separators=(",", ":")).encode()

    @classmethod
    def loads(cls, content: bytes) -> Self:
        """Return the summary from bytes of `dumps`. Raises CorruptData."""
        try:
            number, rows, first, end, raw = json.loads(content)
            segments = tuple(
                RowSegment(ProducerId(bytes.fromhex(producer)), Flags(flags), *clocks_and_offset)
                for producer, flags, *clocks_and_offset in raw
            )
        except (TypeError, ValueError) as error:
            raise CorruptData(
                f"not a range's summary: {error}; all processes must run one version of Coranto"
            ) from error
        return cls(number, rows, first, end, segments)


def read_committed(content: JournalContent, part: Range, framing: JsonLines) -> Iterator[Lines]:
    """Yield the committed content of a range by itself, without knowledge of messages before it.

    Reads the range twice, so that memory does not grow with the size of transactions. The first pass finds out which
    transactions commit. Raises CorruptMessage and OffsetJump.
    """
    scanner = RangeScanner()
    for lines in read_lines(content, part, framing):
        scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
    [windows] = resolve([scanner.segments()], {}, replayed=()).windows

    scanner = RangeScanner()
    for lines in read_lines(content, part, framing):
        row_segment = scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
        yield lines.where(committed_mask(row_segment, windows, lines.clocks))


def read_sequenced(
    content: JournalContent, part: Range, plan: ReadPlan, framing: JsonLines
) -> Iterator[tuple[Lines, Int64s]]:
    """Yield the messages of one range of a plan with their pieces, and at the end a row with the range's summary.

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
        pa.array([summary.dumps() + b"\n"], pa.binary()),
    )
