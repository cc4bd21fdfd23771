"""Segments, the parts of a log that one author wrote, and sets of segments that make up one history."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from coranto.errors import InvalidInput
from coranto.names import validate_journal
from coranto_consumers.recoverylog.operations import Author


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Operations [first_seq_no, last_seq_no] of a history, the last one included, all by `author` and in `log`.

    `first_offset` is at most the journal offset of the first operation, and `first_checksum` is the checksum that the
    first operation holds. `last_offset` is the end offset of the last one. It is 0 if unknown: a player knows
    it, a recorder does not.
    """

    author: Author
    first_seq_no: int
    first_offset: int
    first_checksum: int
    last_seq_no: int
    last_offset: int = 0
    log: str = ""

    def validate(self) -> None:
        """Raise InvalidInput for a segment that no history can have."""
        if not 0 < self.author < 1 << 32:
            raise InvalidInput(f"author {self.author} is not in [1, 2^32); choose one that is", field="author")
        if self.first_seq_no <= 0:
            raise InvalidInput(
                f"{self.first_seq_no} is not positive; sequence numbers begin at 1", field="first_seq_no"
            )
        if self.first_offset < 0:
            raise InvalidInput(f"{self.first_offset} is negative; give 0 or more", field="first_offset")
        if self.last_seq_no < self.first_seq_no:
            raise InvalidInput(f"{self.last_seq_no} is below first_seq_no {self.first_seq_no}", field="last_seq_no")
        if self.last_offset != 0 and self.last_offset <= self.first_offset:
            raise InvalidInput(f"{self.last_offset} is not above first_offset {self.first_offset}", field="last_offset")
        try:
            validate_journal(self.log)
        except InvalidInput as error:
            raise error.within("log") from error


class SegmentSet:
    """Segments of one history, in order of `seq_no` and without overlap.

    Segments of one log have ascending offsets. Only the last segment of the set may lack a `last_offset`.
    """

    def __init__(self, segments: Iterable[LogSegment] = ()) -> None:
        self._segments: list[LogSegment] = []
        for segment in segments:
            self.add(segment)

    def add(self, segment: LogSegment) -> None:
        """Add a segment, and join it with segments that it overlaps or continues.

        Raises InvalidInput when it contradicts one of them.
        """
        segment.validate()
        begin = bisect.bisect_left(self._segments, segment.first_seq_no, key=lambda each: each.first_seq_no)
        if begin > 0:
            joined = join(self._segments[begin - 1], segment)
            if joined is not None:
                segment, begin = joined, begin - 1
        end = begin
        while end < len(self._segments):
            joined = join(self._segments[end], segment)
            if joined is None:
                break
            segment = joined
            end += 1
        self._segments[begin:end] = [segment]

    def intersect(self, log: str, begin: int, end: int) -> list[LogSegment]:
        """Return segments of `log` that overlap offsets [begin, end). Without `last_offset`, a segment has no end."""
        if end < begin:
            raise InvalidInput(f"[{begin}, {end}) is not a range of offsets; the begin must not be above the end")
        return [
            each
            for each in self._segments
            if each.log == log and each.first_offset < end and (each.last_offset == 0 or each.last_offset > begin)
        ]

    def __iter__(self) -> Iterator[LogSegment]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def segments(self) -> tuple[LogSegment, ...]:
        """All segments, in order."""
        return tuple(self._segments)


def join(a: LogSegment, b: LogSegment) -> LogSegment | None:
    """Join two segments into one, or return None when there is a gap between them.

    Raises InvalidInput when they cannot belong to one history. Where both begin or end at the same operation, the
    tighter bound is kept: the larger `first_offset`, and a `last_offset` that is known.
    """
    if a.first_seq_no > b.first_seq_no or (a.first_seq_no == b.first_seq_no and a.last_seq_no < b.last_seq_no):
        a, b = b, a
    _check_order(a, b)
    if a.last_seq_no + 1 < b.first_seq_no:
        return None
    if a.last_seq_no + 1 == b.first_seq_no and (a.author != b.author or a.log != b.log):
        return None
    if a.author != b.author:
        raise InvalidInput(f"segments that overlap are of different authors: {a} and {b}")
    if a.log != b.log:
        raise InvalidInput(f"segments that overlap are of different logs: {a} and {b}")
    first_offset, last_seq_no, last_offset = a.first_offset, a.last_seq_no, a.last_offset
    if a.first_seq_no == b.first_seq_no:
        first_offset = max(first_offset, b.first_offset)
    if a.last_seq_no == b.last_seq_no and last_offset == 0:
        last_offset = b.last_offset
    if a.last_seq_no < b.last_seq_no:
        last_seq_no, last_offset = b.last_seq_no, b.last_offset
    return replace(a, first_offset=first_offset, last_seq_no=last_seq_no, last_offset=last_offset)


def _check_order(a: LogSegment, b: LogSegment) -> None:
    """Raise InvalidInput when offsets or checksums contradict each other.

    `a` must begin first, or cover `b` if both begin at the same operation.
    """
    begins_before = a.first_seq_no < b.first_seq_no
    if begins_before and a.log == b.log and a.first_offset > b.first_offset:
        raise InvalidInput(f"first offsets of segments do not ascend: {a} and {b}")
    if begins_before and a.last_offset == 0 and b.last_offset != 0:
        raise InvalidInput(f"a segment with a last offset follows one without: {a} and {b}")
    if a.last_offset == 0 and a.log != b.log:
        raise InvalidInput(f"a segment of another log follows one without a last offset: {a} and {b}")
    if a.log == b.log:
        later, earlier = (b, a) if a.last_seq_no <= b.last_seq_no else (a, b)
        descends = later.last_offset != 0 and later.last_offset < earlier.last_offset
        if descends or (
            a.last_seq_no == b.last_seq_no and a.last_offset and b.last_offset and a.last_offset != b.last_offset
        ):
            raise InvalidInput(f"last offsets of segments do not ascend: {a} and {b}")
    if a.first_seq_no == b.first_seq_no and a.first_checksum != b.first_checksum:
        raise InvalidInput(f"segments have different checksums of one operation: {a} and {b}")
