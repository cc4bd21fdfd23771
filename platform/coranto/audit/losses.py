"""Losses: missing content of a journal that retention does not explain. Pure.

Retention removes stored fragments from the beginning of a journal, once each is as old as the retention in force. It
always keeps the fragment with the highest end. So missing content is *allowed* if

* it is at the journal's beginning, below all present content,
* stored content reaches the highest end of all known stored fragments, or it is below the fragments with that end, and
* each known fragment with this content is as old as the shortest retention at this audit or at the last one. Content
  that no audit has seen is as old as the last audit, at most.

All other missing content is lost.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coranto.audit.clocks import CLOCK_SECONDS
from coranto.audit.content import uncovered
from coranto.audit.remembered import KnownFragment

Spans = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected content of a journal: content from `first` to `head`, less what retention may have removed.

    `known` are earlier fragments, `seen_at` is the time of the audit that saw them (0: no audit).
    `retention_seconds` is the shortest retention that was in force (0: everything is kept).
    """

    first: int
    head: int
    known: Sequence[KnownFragment]
    seen_at: float
    retention_seconds: float


def shortest(*retentions: float) -> float:
    """Return the shortest retention in seconds; 0 if all of them keep everything (0 or less)."""
    return min((each for each in retentions if each > 0), default=0.0)


def lost(expected: Expected, present: Spans, stored_end: int, now: float) -> Spans:
    """Return the spans of expected content that are lost, in order.

    `present` are the spans with content, `stored_end` is the highest end of a stored span.
    """
    beginning = min((begin for begin, end in present if begin < end), default=expected.head)
    furthest = max((each.end for each in expected.known if each.stored and not each.bad), default=0)
    found: Spans = []
    for gap in uncovered(present, expected.first, expected.head):
        for begin, end in _pieces(gap, [*expected.known]):
            at_beginning = end <= beginning and (stored_end >= furthest or end <= _last_begin(expected.known, furthest))
            if not (at_beginning and _expired(begin, end, expected, now)):
                found.append((begin, end))
    return merged(found)


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return spans in order, with adjacent and overlapping ones merged."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif begin < end:
            found.append((begin, end))
    return found


def within(span: tuple[int, int], joined: Spans) -> bool:
    """Return True if `joined`, which `merged` returned, covers the whole span."""
    at = bisect.bisect_right(joined, span[0], key=lambda each: each[0]) - 1
    return span[0] >= span[1] or (at >= 0 and span[1] <= joined[at][1])


def overlaps(span: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    """Return True if a span shares an offset with one of `spans`."""
    return any(span[0] < end and begin < span[1] for begin, end in spans)


def _last_begin(fragments: Iterable[KnownFragment], furthest: int) -> int:
    """Return the lowest begin of the stored fragments that end at `furthest`, which retention keeps."""
    return min((each.begin for each in fragments if each.end == furthest and each.stored), default=0)


def _pieces(gap: tuple[int, int], fragments: Iterable[KnownFragment]) -> Spans:
    """Cut a gap where fragments begin and end."""
    cuts = {gap[0], gap[1]}
    cuts.update(edge for each in fragments for edge in (each.begin, each.end) if gap[0] < edge < gap[1])
    edges = sorted(cuts)
    return list(itertools.pairwise(edges))


def _expired(begin: int, end: int, expected: Expected, now: float) -> bool:
    """Return True if retention may have removed this piece."""
    seconds = expected.retention_seconds - CLOCK_SECONDS
    if expected.retention_seconds <= 0:
        return False
    holders = [each for each in expected.known if each.begin < end and begin < each.end]
    if any(each.lost_since for each in holders):
        return False  # An earlier audit has judged this to be a loss.
    times = [each.mod_time or expected.seen_at for each in holders] or [expected.seen_at]
    return all(time > 0 and now - time >= seconds for time in times)
