"""Concurrent reads of a task's small ranges: one round trip for each would take long."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, cast

from coranto.client import Chunk
from coranto.client.side_by_side import JournalRange
from coranto.messages.framing import JsonLines
from coranto_consumers.spark.journals.framings import ReadFraming
from coranto_consumers.spark.journals.ranges import Range
from coranto_consumers.spark.journals.reading import OVERRUN_BYTES, JournalContent, contiguous

SMALL_BYTES: Final = 256 << 10


class ManyContents(JournalContent, Protocol):
    """A source of content that can read many ranges: `SyncJournalClient`, or a test double."""

    def read_each(
        self, ranges: Sequence[JournalRange], *, block: bool = False, fail_on_jump: bool = False
    ) -> Iterator[Sequence[Chunk]]: ...


class SmallRanges:
    """The content of ranges that are read in turn, as `JournalContent`. `small` are the prefetched ranges."""

    def __init__(self, client: JournalContent, small: Sequence[JournalRange], contents: Iterator[Sequence[Chunk]]):
        self._client = client
        self._due = deque(small)
        self._contents = contents
        self._held = JournalRange("", 0, 0)
        self._content = b""

    def read(self, journal: str, offset: int = 0, *, end_offset: int = 0, **how: Any) -> Iterator[Chunk]:
        """Yield content as the client does. Raises the errors of a prefetched range when it is read."""
        if self._due and self._due[0][:2] == (journal, offset):
            self._held = self._due.popleft()
            self._content = b"".join(contiguous(self._held, next(self._contents)))
        held = self._held
        if held.journal == journal and held.offset <= offset < end_offset <= held.end_offset:
            yield Chunk(offset, self._content[offset - held.offset : end_offset - held.offset], held.end_offset)
            return
        yield from self._client.read(journal, offset, end_offset=end_offset, **how)


@contextmanager
def read_together(client: ManyContents, parts: Sequence[Range], framing: ReadFraming) -> Iterator[JournalContent]:
    """Yield the content of ranges, to be read in this order, each once."""
    reads = [_first_read(part, framing) for part in parts if part.length > 0]
    small = [each for each in reads if each.length <= SMALL_BYTES]
    if len(small) < 2:
        yield client
        return
    contents = client.read_each(small, block=True, fail_on_jump=True)
    try:
        yield SmallRanges(client, small, contents)
    finally:
        cast("Generator[Sequence[Chunk]]", contents).close()


def _first_read(part: Range, framing: ReadFraming) -> JournalRange:
    """Return the content of a range, with the bytes after it that a last line of usual length needs."""
    start = part.start if isinstance(framing, JsonLines) else part.begin
    return JournalRange(part.journal, start, min(part.limit, part.end + OVERRUN_BYTES), part.journal_id)
