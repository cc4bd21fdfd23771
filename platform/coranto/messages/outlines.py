"""Outlines of scanned ranges: the few segments of a range that other ranges depend on.

A range of many small transactions has about as many segments as messages (`columnar.py`). Other ranges depend on few of
them, because an acknowledgement decides all earlier messages of its producer. The producer's next state does not depend
on these: `last_ack` is the acknowledgement's clock, and nothing is pending. So of a producer's segments in a range

- the segments up to its first acknowledgement depend on earlier ranges, and
- the segments from its last acknowledgement on affect later ranges.

These are the range's **border**. The segments in between are decided by the range alone, wherever it is read. An
outline holds the border, and the decisions about the other segments. It stores only exceptions: a segment without a
`Limit` is committed as a whole. So an outline grows with the number of producers and with the *uncommitted* segments,
not with the number of transactions.

`resolve_outlines` returns the same results as `columnar.resolve` for all segments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coranto.messages.checkpoints import ProducerState
from coranto.messages.columnar import (
    ALWAYS,
    ClockReset,
    CommittedWindows,
    Int32s,
    Int64s,
    Mask,
    RowSegment,
    UInt64s,
    resolve,
)
from coranto.messages.uuids import Flags, ProducerId


class Limit(NamedTuple):
    """The committed rows of a segment that is not committed as a whole: those with a clock in (lo, hi]."""

    segment: int
    lo: int
    hi: int


class SegmentCommit(NamedTuple):
    """A segment with rows that an acknowledgement committed."""

    segment: int
    offset: int
    """The offset of the acknowledgement."""


class BorderSegment(NamedTuple):
    """A segment that other ranges depend on, with its number in its range."""

    number: int
    segment: RowSegment


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of one range."""

    border: tuple[BorderSegment, ...] = ()
    """The segments of the border, by number."""
    limits: tuple[Limit, ...] = ()
    """The limits of the segments outside of the border, by number."""
    resets: tuple[ClockReset, ...] = ()
    """The resets by acknowledgements other than the first one of their producer in the range."""
    acknowledged: tuple[SegmentCommit, ...] = ()
    """The acknowledged segments outside of the border, by number, if requested."""


@dataclass(frozen=True, slots=True)
class OutlinesResult:
    """The result of `resolve_outlines`. As in `SequencingResult`, it is not final if `replay` is not empty."""

    limits: tuple[tuple[Limit, ...], ...]
    """For each range, the limits of all of its segments, by number."""
    states: dict[ProducerId, ProducerState]
    replay: dict[ProducerId, ProducerState]
    resets: tuple[ClockReset, ...]
    acknowledged: tuple[tuple[SegmentCommit, ...], ...]
    """For each range, its acknowledged segments by number, without segments that its outline omits."""


def outline(segments: Sequence[RowSegment], *, acknowledged: bool = False) -> Outline:
    """Return the outline of a range with these segments.

    With `acknowledged`, it has the acknowledgement of each segment, and grows with the number of transactions.
    """
    first: dict[ProducerId, int] = {}
    last: dict[ProducerId, int] = {}
    for number, segment in enumerate(segments):
        if segment.flags is Flags.ACK_TXN:
            first.setdefault(segment.producer, number)
            last[segment.producer] = number
    border = tuple(
        BorderSegment(number, segment)
        for number, segment in enumerate(segments)
        if number <= first.get(segment.producer, number) or number >= last[segment.producer]
    )
    if first == last:
        return Outline(border)
    resolution = resolve([segments], {}, replayed=())
    [windows] = resolution.windows
    outer = {number for number, _ in border}
    found = _limits(map(BorderSegment, range(len(segments)), segments), windows)
    limits = tuple(limit for limit in found if limit.segment not in outer)
    first_offsets = {segments[number].first_offset for number in first.values()}
    resets = tuple(reset for reset in resolution.resets if reset.offset not in first_offsets)
    at = enumerate(resolution.acknowledged_at[0]) if acknowledged else ()
    inner = (SegmentCommit(number, offset) for number, offset in at if offset >= 0 and number not in outer)
    return Outline(border, limits, resets, tuple(inner))


def resolve_outlines(
    ranges: Sequence[Outline],
    entry: Mapping[ProducerId, ProducerState],
    *,
    replayed: Collection[ProducerId],
    through: int = 0,
) -> OutlinesResult:
    """Decide which rows adjacent ranges of one journal commit. For the arguments see `columnar.resolve`."""
    resolution = resolve(
        [[segment for _, segment in each.border] for each in ranges], entry, replayed=replayed, through=through
    )
    limits = tuple(
        tuple(sorted((*_limits(each.border, windows), *each.limits)))
        for each, windows in zip(ranges, resolution.windows, strict=True)
    )
    firsts = {segment.first_offset for each in ranges for segment in _first_acknowledgements(each.border)}
    resets = [reset for reset in resolution.resets if reset.offset in firsts]
    resets += (reset for each in ranges for reset in each.resets)
    resets.sort(key=lambda reset: reset.offset)
    acknowledged = tuple(
        tuple(sorted((*_acknowledged(each.border, offsets), *each.acknowledged)))
        for each, offsets in zip(ranges, resolution.acknowledged_at, strict=True)
    )
    return OutlinesResult(limits, resolution.states, resolution.replay, tuple(resets), acknowledged)


def limited_mask(row_segment: Int32s, limits: Sequence[Limit], clocks: UInt64s) -> Mask:
    """Return the mask of a range's committed content rows, from their segments and the limits of all its segments."""
    committed: Mask = (row_segment >= 0) | (row_segment == ALWAYS)
    if limits:
        numbers, lows, highs = zip(*limits, strict=True)
        known = np.array(numbers, dtype=np.int64)
        place = np.minimum(np.searchsorted(known, row_segment), len(known) - 1)
        rows = np.flatnonzero(known[place] == row_segment)
        low, high = np.array(lows, dtype=np.uint64)[place[rows]], np.array(highs, dtype=np.uint64)[place[rows]]
        committed[rows] = (clocks[rows] > low) & (clocks[rows] <= high)
    return committed


def commit_offsets(row_segment: Int32s, acknowledged: Sequence[SegmentCommit], offsets: Int64s) -> Int64s:
    """Return the commit offset of each committed row of a range.

    That is the offset of its acknowledgement, or its own offset outside of transactions. `acknowledged` has all
    acknowledged segments of the range.
    """
    found = offsets.copy()
    if acknowledged:
        segments, commits = zip(*acknowledged, strict=True)
        known = np.array(segments, dtype=np.int64)
        place = np.minimum(np.searchsorted(known, row_segment), len(known) - 1)
        rows = np.flatnonzero(known[place] == row_segment)
        found[rows] = np.array(commits, dtype=np.int64)[place[rows]]
    return found


def _acknowledged(border: Iterable[BorderSegment], offsets: Sequence[int]) -> Iterator[SegmentCommit]:
    for (number, _), offset in zip(border, offsets, strict=True):
        if offset >= 0:
            yield SegmentCommit(number, offset)


def _limits(segments: Iterable[BorderSegment], windows: CommittedWindows) -> Iterator[Limit]:
    """Yield the limits of the segments that are not committed as a whole. The windows are in the same order."""
    for (number, segment), lo, hi in zip(segments, windows.lo, windows.hi, strict=True):
        if segment.flags is not Flags.ACK_TXN and not (lo < segment.first_clock and segment.last_clock <= hi):
            yield Limit(number, lo, hi)


def _first_acknowledgements(border: Iterable[BorderSegment]) -> Iterator[RowSegment]:
    seen = set()
    for _, segment in border:
        if segment.flags is Flags.ACK_TXN and segment.producer not in seen:
            seen.add(segment.producer)
            yield segment
