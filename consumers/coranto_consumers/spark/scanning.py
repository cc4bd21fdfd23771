"""Scanning of ranges by tasks, and the summaries in which tasks tell the driver, or each other, what they found.

A sequenced read gives each row a number, its *piece*. The upper bits are the range's number in the plan, and the lower
bits are the row's segment in the range (see `coranto.messages.columnar`). After the rows of each range comes one row
that is not a message but the range's summary, for the driver. Summaries hold outlines (`coranto.messages.outlines`), so
they do not grow with the number of transactions. The driver decides which clocks of which pieces are *not* committed.
"""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa

from coranto.errors import CorruptData
from coranto.messages.checkpoints import ProducerState
from coranto.messages.columnar import (
    ALWAYS,
    DROPPED,
    ClockReset,
    Int32s,
    Int64s,
    RangeScanner,
    RowSegment,
    replay_mask,
)
from coranto.messages.framing import JsonLines
from coranto.messages.outlines import BorderSegment, Limit, Outline, SegmentCommit, outline
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.spark.framings import ReadFraming
from coranto_consumers.spark.ranges import NumberedRange
from coranto_consumers.spark.reading import JournalContent, Lines, read_lines

ALWAYS_PIECE: Final = ALWAYS
SUMMARY_PIECE: Final = -3
_SEGMENT_BITS: Final = 32
_NO_BOUND: Final = (1 << 63) - 1

_PRODUCER = pa.binary(6)
_SCHEMA: Final = pa.schema(
    [
        *((name, pa.int64()) for name in ("number", "rows", "first", "end", "inner_rows", "misfits")),
        ("is_counted", pa.bool_()),
        (
            "border",
            pa.list_(
                pa.struct(
                    [
                        ("number", pa.int32()),
                        ("producer", _PRODUCER),
                        ("flags", pa.uint8()),
                        ("first_clock", pa.uint64()),
                        ("last_clock", pa.uint64()),
                        ("first_offset", pa.int64()),
                        ("rows", pa.int64()),
                    ]
                )
            ),
        ),
        ("acknowledged", pa.list_(pa.struct([("segment", pa.int32()), ("offset", pa.int64())]))),
        ("limits", pa.list_(pa.struct([("segment", pa.int32()), ("lo", pa.uint64()), ("hi", pa.uint64())]))),
        (
            "resets",
            pa.list_(
                pa.struct(
                    [
                        ("producer", _PRODUCER),
                        ("offset", pa.int64()),
                        ("clock", pa.uint64()),
                        ("last_ack", pa.uint64()),
                    ]
                )
            ),
        ),
    ]
)


def piece_of(number: int, segment: int) -> int:
    """Return the piece of a segment in the range with number `number`."""
    return number << _SEGMENT_BITS | segment


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """The summary of a range that was read."""

    number: int
    rows: int
    """The number of messages in the range, including messages that do not count for a replay."""
    first: int
    """The offset of the first message. Without messages, the range's begin."""
    end: int
    """The offset after the last message. Without messages, the range's begin."""
    outline: Outline = field(default_factory=Outline)
    border_rows: tuple[int, ...] = ()
    """The numbers of rows of the outline's border segments."""
    inner_rows: int = 0
    """The number of other rows that are committed whatever other ranges hold, if `is_counted`."""
    is_counted: bool = True
    misfits: int = 0
    """The number of messages that do not fit, whether they are committed or not."""

    def dumps(self) -> bytes:
        """Return the summary as a compressed Arrow stream: of a small one, most is the schema."""
        border = [
            {**segment._asdict(), "number": number, "flags": int(segment.flags), "rows": rows}
            for (number, segment), rows in zip(self.outline.border, self.border_rows, strict=True)
        ]
        row = {
            "number": self.number,
            "rows": self.rows,
            "first": self.first,
            "end": self.end,
            "inner_rows": self.inner_rows,
            "misfits": self.misfits,
            "is_counted": self.is_counted,
            "border": border,
            "limits": [limit._asdict() for limit in self.outline.limits],
            "resets": [reset._asdict() for reset in self.outline.resets],
            "acknowledged": [each._asdict() for each in self.outline.acknowledged],
        }
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, _SCHEMA) as stream:
            stream.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))
        return zlib.compress(sink.getvalue(), 1)

    @classmethod
    def loads(cls, content: bytes) -> Self:
        """Return the summary from bytes of `dumps`. Raises CorruptData."""
        try:
            table = pa.ipc.open_stream(pa.BufferReader(zlib.decompress(content))).read_all()
            if not table.schema.equals(_SCHEMA):
                raise ValueError("it has other columns")
            [row] = table.to_pylist()
        except (TypeError, ValueError, OSError, zlib.error) as error:
            raise CorruptData(
                f"not a range's summary: {error}; all processes must run one version of Coranto"
            ) from error
        border, limits, resets = row.pop("border"), row.pop("limits"), row.pop("resets")
        acknowledged = row.pop("acknowledged")
        return cls(
            outline=Outline(
                tuple(BorderSegment(each["number"], _segment(each)) for each in border),
                tuple(Limit(**each) for each in limits),
                tuple(ClockReset(**{**each, "producer": ProducerId(each["producer"])}) for each in resets),
                tuple(SegmentCommit(**each) for each in acknowledged),
            ),
            border_rows=tuple(each["rows"] for each in border),
            **row,
        )

    def committed_rows(self, limits: Sequence[Limit]) -> int | None:
        """Return the number of committed rows, given the limits of all segments. None if it takes the rows to know."""
        rows = dict(zip((number for number, _ in self.outline.border), self.border_rows, strict=True))
        for limit in limits:
            if limit.segment in rows:
                if limit.lo < limit.hi:
                    return None
                del rows[limit.segment]
        return self.inner_rows + sum(rows.values()) if self.is_counted else None


def _segment(row: dict[str, Any]) -> RowSegment:
    return RowSegment(
        ProducerId(row["producer"]), Flags(row["flags"]), row["first_clock"], row["last_clock"], row["first_offset"]
    )


class RangeSummarizer:
    """Scans one range, line by line, and summarizes it.

    With `commits`, the summary tells where each segment was acknowledged. In `records`, there may be content between
    messages that is none, such as empty lines of CSV. What is before the first one counts to it.
    """

    def __init__(self, number: int, begin: int, *, commits: bool = False, records: bool = False) -> None:
        self._number = number
        self._records = records
        self._commits = commits
        self._first = self._end = begin
        self._rows = self._always = 0
        self._scanner = RangeScanner()
        self._counts: Int64s = np.zeros(0, dtype=np.int64)

    def saw(self, lines: Lines) -> None:
        """Take note of the next lines, whether they are to be scanned or not."""
        if not self._rows and not self._records:
            self._first = int(lines.begins[0])
        self._rows, self._end = self._rows + len(lines), int(lines.ends[-1])

    def feed(self, lines: Lines) -> Int32s:
        """Scan lines, and return the segment of each."""
        row_segment = self._scanner.feed(lines.producers, lines.clocks, lines.flags, lines.begins)
        self._always += int((row_segment == ALWAYS).sum())
        counts = np.bincount(row_segment[row_segment >= 0], minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        return row_segment

    def summary(self, misfits: int = 0) -> RangeSummary:
        """Return the summary of all lines so far. `misfits` is the number of messages that do not fit."""
        segments = self._scanner.segments()
        found = outline(segments, acknowledged=self._commits)
        counts: Int64s = np.zeros(len(segments), dtype=np.int64)
        counts[: len(self._counts)] = self._counts
        numbers = [number for number, _ in found.border]
        border_rows = tuple(counts[numbers].tolist())
        counts[numbers] = 0
        counts[[limit.segment for limit in found.limits]] = 0
        return RangeSummary(
            self._number,
            self._rows,
            self._first,
            self._end,
            found,
            border_rows,
            self._always + int(counts.sum()),
            all(limit.lo >= limit.hi for limit in found.limits),
            misfits,
        )


def read_sequenced(
    content: JournalContent, numbered: NumberedRange, framing: ReadFraming
) -> Generator[tuple[Lines, Int64s], None, RangeSummarizer]:
    """Yield the messages of a range that may be committed, with their pieces. Return the range's scan.

    Duplicates and acknowledgements are left out. Raises CorruptMessage and OffsetJump.
    """
    replay = {ProducerId(bytes.fromhex(name)): ProducerState(0, begin) for name, begin in numbered.replay.items()}
    records = not isinstance(framing, JsonLines)
    scan = RangeSummarizer(numbered.number, numbered.range.begin, commits=numbered.commits, records=records)
    for lines in read_lines(content, numbered.range, framing):
        scan.saw(lines)
        if replay:
            lines = lines.where(replay_mask(lines.producers, lines.clocks, lines.begins, replay, _NO_BOUND))
        row_segment = scan.feed(lines)
        counts = row_segment != DROPPED
        yield lines.where(counts), _pieces(numbered.number, row_segment[counts])
    return scan


def _pieces(number: int, row_segment: Int32s) -> Int64s:
    segment = row_segment.astype(np.int64)
    return np.where(segment < 0, segment, segment | number << _SEGMENT_BITS)


def summary_row(journal: str, summary: RangeSummary) -> tuple[Lines, Int64s]:
    """Return a summary as a row, the way `read_sequenced` yields rows."""
    row = Lines(
        journal,
        np.array([summary.first], dtype=np.int64),
        np.array([summary.end], dtype=np.int64),
        np.zeros(1, dtype=np.uint64),
        np.zeros(1, dtype=np.uint64),
        np.zeros(1, dtype=np.uint16),
        pa.array([b64encode(summary.dumps()) + b"\n"], pa.binary()),
    )
    return row, np.array([SUMMARY_PIECE], dtype=np.int64)


def summary_of_row(text: str) -> RangeSummary:
    """Return the summary from the text of a row of `summary_row`. Raises CorruptData."""
    try:
        return RangeSummary.loads(b64decode(text, validate=True))
    except ValueError as error:
        raise CorruptData(f"not a range's summary: {error}; all processes must run one version of Coranto") from error
