"""The ends of the messages of a range, for reads that need not know who wrote them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from coranto.messages.columnar import Int64s
from coranto.messages.framing import JsonLines
from coranto_consumers.spark.journals.framings import ReadFraming
from coranto_consumers.spark.journals.ranges import Range
from coranto_consumers.spark.journals.reading import JournalContent, read_blocks, read_lines

_TAIL_BYTES: Final = 64 << 10


def count_messages(
    content: JournalContent, whole: Range, framing: ReadFraming, max_messages: int | None = None
) -> tuple[int, int]:
    """Return the end of the last message to read in a range, and the number of messages."""
    rows, end = 0, whole.begin
    for ends in _ends(content, whole, framing):
        if max_messages is not None:
            ends = ends[: max_messages - rows]
        if not len(ends):
            break
        rows, end = rows + len(ends), int(ends[-1])
    return end, rows


def last_end(content: JournalContent, whole: Range, framing: ReadFraming) -> int:
    """Return the end of the last message that starts in a range and that its writer has finished."""
    if not isinstance(framing, JsonLines):
        return count_messages(content, whole, framing)[0]  # A record is found only from the one before it.
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
