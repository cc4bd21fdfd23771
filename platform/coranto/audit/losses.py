"""Losses: content of a journal that is gone although nothing allowed that. Pure.

Retention removes stored fragments from the beginning of a journal, once each is as old as the retention in force. It
always keeps the fragment that reaches furthest. So the absence of content is *allowed* if

* it is at the journal's beginning, below everything that is there,
* a fragment that reaches as far as any known one is still stored, and
* each fragment that is known to have had it was stored long enough ago, by the shortest retention that was in force at
  this audit or at the last one. Content that no audit has seen is as old as the last audit, at most.

Everything else is lost.
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

    `known` are the fragments that were there, `seen_at` is the time of the audit that saw them (0: there was none).
    `retention_seconds` is the shortest retention that was in force (0: none, so that everything is kept).
    """

    first: int
    head: int
    known: Sequence[KnownFragment]
    seen_at: float
    retention_seconds: float


def shortest(*retentions: float) -> float:
    """Return the shortest of retentions in seconds. 0 or less keeps everything."""
    return min((each for each in retentions if each > 0), default=0.0)


def lost(expected: Expected, present: Spans, stored_end: int, now: float) -> Spans:
    """Return the spans of expected content that are gone although nothing allowed that, in order.

    `present` are the spans that are there, `stored_end` is the largest end of a stored one.
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
    """Return spans in order, with neighbours and overlapping ones joined."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif begin < end:
            found.append((begin, end))
    return found


def within(span: tuple[int, int], joined: Spans) -> bool:
    """Return True if spans, as `merged` returns them, cover all of a span."""
    at = bisect.bisect_right(joined, span[0], key=lambda each: each[0]) - 1
    return span[0] >= span[1] or (at >= 0 and span[1] <= joined[at][1])


def overlaps(span: tuple[int, int], spans: Iterable[tuple[int, int]]) -> bool:
    """Return True if a span shares an offset with one of `spans`."""
    return any(span[0] < end and begin < span[1] for begin, end in spans)


def _last_begin(fragments: Iterable[KnownFragment], furthest: int) -> int:
    """Return the least offset of the fragments that reach furthest: retention does not remove these."""
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
