"""Scanning of ranges by tasks, and summaries of scans for the driver or other tasks.

A sequenced read gives each row a number, its *piece*: the range's number in the plan, and in the lower bits the row's
segment (`coranto.messages.columnar`). The rows of a range are followed by a row with the range's summary. The summary
has an outline, so its size does not grow with the number of transactions. From summaries, the driver finds the pieces
that are not committed as a whole, and their committed clocks.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa

from coranto.errors import CorruptData
from coranto.messages.columnar import ALWAYS, DROPPED, Int32s, Int64s, RangeScanner, replay_mask
from coranto.messages.outlines import Limit, Outline, outline
from coranto_consumers.journals.framings import ReadFraming
from coranto_consumers.journals.ranges import NumberedRange, Range
from coranto_consumers.journals.reading import JournalContent, Lines, read_lines

SUMMARY_PIECE: Final = -3
_SEGMENT_BITS: Final = 32
_NO_BOUND: Final = (1 << 63) - 1

_PLAIN_BYTES: Final = 512
"""The maximum bytes of an uncompressed summary. Longer summaries are compressed."""


def piece_of(number: int, segment: Any) -> Any:
    """Return the piece of a segment, or the pieces of an array of segments, in the range with number `number`."""
    return number << _SEGMENT_BITS | segment


class RangeSummary(NamedTuple):
    """The summary of a range that was read."""

    number: int
    rows: int
    """The number of rows in the range: messages, including those that a replay ignores, and blank rows."""
    first: int
    """The offset of the first row. Without rows, `first` and `end` are the range's begin."""
    end: int
    outline: Outline = Outline()
    border_rows: tuple[int, ...] = ()
    """The row counts of the outline's border segments."""
    inner_rows: int = 0
    """The number of other rows that are committed independently of other ranges, if `is_counted`."""
    is_counted: bool = True
    misfits: int = 0

    def dumps(self) -> bytes:
        content = msgspec.json.encode(self)
        return content if len(content) <= _PLAIN_BYTES else b64encode(zlib.compress(content, 1))

    @classmethod
    def loads(cls, text: bytes) -> Self:
        """Parse a text of `dumps`. Raises CorruptData."""
        try:
            content = text if text.startswith(b"[") else zlib.decompress(b64decode(text, validate=True))
            return msgspec.json.decode(content, type=cls)
        except (msgspec.MsgspecError, RecursionError, ValueError, zlib.error) as error:
            problem = f"not a range's summary: {error}; all processes need one version of Coranto"
            raise CorruptData(problem) from error

    def committed_rows(self, limits: Sequence[Limit]) -> int | None:
        """Return the number of committed rows, given the limits of all segments. None if rows must be counted."""
        rows = dict(zip((number for number, _ in self.outline.border), self.border_rows, strict=True))
        for limit in limits:
            if limit.segment in rows:
                if limit.lo < limit.hi:
                    return None
                del rows[limit.segment]
        return self.inner_rows + sum(rows.values()) if self.is_counted else None


Summaries = Mapping[Range, RangeSummary]


class RangeSummarizer:
    """Scans one range, once: read it with `segments` or `pieces`, and then call `summary`."""

    def __init__(self, numbered: NumberedRange) -> None:
        self._numbered = numbered
        self._first = self._end = numbered.range.begin
        self._rows = self._always = 0
        self._scanner = RangeScanner()
        self._counts: Int64s = np.zeros(0, dtype=np.int64)

    def segments(
        self, content: JournalContent, framing: ReadFraming, max_messages: int | None = None
    ) -> Iterator[tuple[Lines, Int32s]]:
        """Yield the messages, with the segment of each. Blank rows also count towards `max_messages`."""
        replay = self._numbered.replay
        for lines in read_lines(content, self._numbered.range, framing):
            if max_messages is not None and self._rows + len(lines) > max_messages:
                lines = lines.where(np.arange(len(lines)) < max_messages - self._rows)
            if not self._rows:
                self._first = int(lines.begins[0])
            self._rows, self._end = self._rows + len(lines), int(lines.ends[-1])
            lines = lines.messages
            if replay:
                lines = lines.where(replay_mask(lines.producers, lines.clocks, lines.begins, replay, _NO_BOUND))
            row_segment = self._scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
            self._always += int((row_segment == ALWAYS).sum())
            counts = np.bincount(row_segment[row_segment >= 0], minlength=len(self._counts))
            counts[: len(self._counts)] += self._counts
            self._counts = counts
            yield lines, row_segment
            if self._rows == max_messages:
                return

    def pieces(self, content: JournalContent, framing: ReadFraming) -> Iterator[tuple[Lines, Int64s]]:
        """Yield the messages that may be committed, with their pieces: no duplicates, and no acknowledgements."""
        for lines, row_segment in self.segments(content, framing):
            counts = row_segment != DROPPED
            segment = row_segment[counts].astype(np.int64)
            yield lines.where(counts), np.where(segment < 0, segment, piece_of(self._numbered.number, segment))

    def summary(self, misfits: int = 0) -> RangeSummary:
        """Return the summary of all lines so far. `misfits` is the number of messages that do not fit."""
        segments = self._scanner.segments()
        found = outline(segments, acknowledged=self._numbered.commits)
        counts: Int64s = np.zeros(len(segments), dtype=np.int64)
        counts[: len(self._counts)] = self._counts
        numbers = [number for number, _ in found.border]
        border_rows = tuple(counts[numbers].tolist())
        counts[numbers] = 0
        counts[[limit.segment for limit in found.limits]] = 0
        return RangeSummary(
            self._numbered.number,
            self._rows,
            self._first,
            self._end,
            found,
            border_rows,
            self._always + int(counts.sum()),
            all(limit.lo >= limit.hi for limit in found.limits),
            misfits,
        )


def summary_rows(summaries: Sequence[tuple[str, RangeSummary]]) -> tuple[Lines, Int64s]:
    """Convert range summaries (at least one, each with its journal) to rows with pieces."""
    count = len(summaries)
    rows = Lines(
        summaries[0][0],
        np.array([summary.first for _, summary in summaries], dtype=np.int64),
        np.array([summary.end for _, summary in summaries], dtype=np.int64),
        np.zeros(count, dtype=np.uint64),
        np.zeros(count, dtype=np.uint64),
        np.zeros(count, dtype=np.uint16),
        pa.array([summary.dumps() + b"\n" for _, summary in summaries], pa.binary()),
        journals=pa.array([journal for journal, _ in summaries], pa.string()),
    )
    return rows, np.full(count, SUMMARY_PIECE, dtype=np.int64)
