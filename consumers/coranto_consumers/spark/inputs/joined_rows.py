"""Batches of the rows of many ranges in sequence.

A batch costs about as much for one message as for a hundred, so messages and summaries of small ranges are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from coranto.messages.columnar import Int64s
from coranto_consumers.spark.committed.scanning import RangeSummarizer, RangeSummary, summary_rows
from coranto_consumers.spark.decoding.rows import BatchBuilder, RowLayout
from coranto_consumers.spark.journals.framings import ReadFraming
from coranto_consumers.spark.journals.ranges import NumberedRange
from coranto_consumers.spark.journals.reading import JournalContent, Lines

JOINED_BYTES: Final = 1 << 20
JOINED_RANGES: Final = 4_096


class SequencedRows:
    """Makes the batches of a task's ranges, which are read in order: their messages, and a summary of each range."""

    def __init__(self, layout: RowLayout) -> None:
        self._batches = BatchBuilder(layout)
        self._held: list[tuple[Lines, Int64s]] = []
        self._ranges: list[int] = []
        """The index in `_read` of the range of each part that is held."""
        self._bytes = 0
        self._read: list[tuple[str, RangeSummarizer]] = []
        """The ranges that were read and not summarized; behind them is the one that is being read."""
        self._misfits = [0]

    def read(self, content: JournalContent, parts: Sequence[NumberedRange], framing: ReadFraming) -> Iterator[Any]:
        """Yield the batches of ranges. Raises CorruptMessage and OffsetJump."""
        for numbered in parts:
            scan = RangeSummarizer(numbered)
            for lines, pieces in scan.pieces(content, framing):
                if len(lines):
                    yield from self._hold(lines, pieces)
            self._read.append((numbered.range.journal, scan))
            self._misfits.append(0)
            if self._bytes >= JOINED_BYTES or len(self._read) >= JOINED_RANGES:
                yield from self._summarized()
        yield from self._summarized()

    def _hold(self, lines: Lines, pieces: Int64s) -> Iterator[Any]:
        """Hold messages of the range that is being read. Yields the batches that are due."""
        length = int(lines.ends[-1] - lines.begins[0])
        if self._bytes + length > JOINED_BYTES:
            yield from self._built()
        self._held.append((lines, pieces))
        self._ranges.append(len(self._read))
        self._bytes += length
        if self._bytes >= JOINED_BYTES:
            yield from self._built()

    def _built(self) -> Iterator[Any]:
        """Yield the batches of the messages that are held, and count those that do not fit."""
        if not self._held:
            return
        lines = Lines.together([each for each, _ in self._held])
        yield from self._batches.build(lines, np.concatenate([pieces for _, pieces in self._held]))
        if self._batches.misfits.any():
            ranges = np.repeat(self._ranges, [len(each) for each, _ in self._held])
            for index in ranges[self._batches.misfits].tolist():
                self._misfits[index] += 1
        self._held.clear()
        self._ranges.clear()
        self._bytes = 0

    def _summarized(self) -> Iterator[Any]:
        yield from self._built()
        found: list[tuple[str, RangeSummary]] = [
            (journal, scan.summary(misfits))
            for (journal, scan), misfits in zip(self._read, self._misfits, strict=False)
        ]
        self._read.clear()
        self._misfits = [0]
        if found:
            yield from self._batches.build(*summary_rows(found))
