"""Comparison of the events that a group's readers got with the stream and the group's own journal.

An independent parser reads the group's journal. It yields the holder of each segment, its first offset, and the
consumed offset that it reported. The place of an event is the end of its commit.

=======================  ===============================================================================================
`group-state`            the group's journal contradicts itself, or the segments: positions go back, a segment has two
                         holders, ends at another offset, or is opened before its predecessors are complete
`group-unread`           no reader got an event
`group-skipped`          an event was reported as consumed that its reader did not get, or had not finished
`group-again`            an event was given again that was reported as consumed, or twice to one reader, or by a reader
                         that had left or released the segment without reporting it
`group-torn`             only a part of a transaction was given
`group-phantom`          an event was given that is not in the stream
`group-reordered`        the events of a key were not given in order, or a segment's before its predecessors'
`group-checkpoint`       an event that was given before a reader's mark is after the checkpoint, or the reverse
=======================  ===============================================================================================
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from coranto.streams.model.positions import StreamPosition

from .anomalies import Anomaly
from .checker import Stand
from .history import History
from .ledger import Holding, Ledger, read_ledger
from .members import Given, Notes
from .segments import Segment

_VOLUNTARY = ("released", "completed")


def check_shared(
    history: History,
    segments: Sequence[Segment],
    stands: Mapping[int, Sequence[Stand]],
    notes: Notes,
    journal: bytes,
    *,
    may_see_uncommitted: bool,
) -> tuple[list[Anomaly], Ledger]:
    """Return all anomalies, and the ledger of the group's journal."""
    ledger = read_ledger(journal, segments)
    found = ledger.found
    by_place = {(number, stand.segment): stand for number, each in stands.items() for stand in each}
    given: list[tuple[Given, int]] = []
    """The events in the stream, with the offsets of their commits."""
    for each in notes.given:
        stand = by_place.get((each.unit, each.segment))
        if stand is None:
            if not may_see_uncommitted:
                found.append(Anomaly("group-phantom", f"{each}: {history.units[each.unit]}"))
            continue
        if each.indexes != stand.indexes if each.whole else not set(each.indexes) <= set(stand.indexes):
            found.append(Anomaly("group-torn", f"{each}: {history.units[each.unit]}"))
        given.append((each, stand.end))
    missing = [
        (number, index)
        for number, stand_of in stands.items()
        for stand in stand_of
        for index in stand.indexes
        if (number, index) not in notes.events
    ]
    if missing:
        found.append(Anomaly("group-unread", f"{missing[:10]}, such as {history.units[missing[0][0]]}"))
    _check_holdings(history, by_place, notes, given, ledger, found)
    _check_order(history, segments, by_place, given, found)
    _check_checkpoints(segments, notes, by_place, ledger, found)
    return found, ledger


def _check_holdings(
    history: History,
    by_place: Mapping[tuple[int, int], Stand],
    notes: Notes,
    given: Sequence[tuple[Given, int]],
    ledger: Ledger,
    found: list[Anomaly],
) -> None:
    """Check that readers got only unconsumed events, and consumed only events that they got."""
    held: defaultdict[tuple[str, int], list[Holding]] = defaultdict(list)
    for holding in ledger.holdings:
        held[holding.token, holding.segment].append(holding)
    had: defaultdict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    consumed: defaultdict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    for index, each in enumerate(notes.given):
        if index < notes.through.get(each.token, 0):
            consumed[each.token, each.segment] |= {(each.unit, part) for part in each.indexes}
    for each, end in given:
        mine = held.get((each.token, each.segment), [])
        if not any(holding.begin < end for holding in mine):
            found.append(Anomaly("group-again", f"{each} at {end} was consumed before: {mine}"))
        last = max((holding.end for holding in mine), default=0)
        reported = all(holding.ended_by in _VOLUNTARY for holding in mine) or each.token in notes.left
        if reported and end > last:
            found.append(Anomaly("group-again", f"{each} at {end} was not reported by its reader, which was at {last}"))
        events = {(each.unit, index) for index in each.indexes}
        if events & had[each.token, each.segment]:
            found.append(Anomaly("group-again", f"{each} was given twice to its reader"))
        had[each.token, each.segment] |= events
    by_segment: defaultdict[int, list[tuple[int, Stand]]] = defaultdict(list)
    for (number, segment), stand in by_place.items():
        by_segment[segment].append((number, stand))
    for holding in ledger.holdings:
        for number, stand in by_segment[holding.segment]:
            events = {(number, index) for index in stand.indexes}
            if holding.begin < stand.end <= holding.end and not events <= consumed[holding.token, holding.segment]:
                found.append(Anomaly("group-skipped", f"{holding} has not consumed {history.units[number]}: {stand}"))


def _check_order(
    history: History,
    segments: Sequence[Segment],
    by_place: Mapping[tuple[int, int], Stand],
    given: Sequence[tuple[Given, int]],
    found: list[Anomaly],
) -> None:
    latest: dict[tuple[str, str], tuple[int, int]] = {}
    lines: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    """By key: the written units, in order."""
    for (number, segment), stand in by_place.items():
        for key in {history.units[number].key_of(index) for index in stand.indexes}:
            lines[key].append((segment, stand.end, number))
    before: dict[tuple[str, int, int], int | None] = {}
    for key, line in lines.items():
        line.sort()
        for index, (segment, _, number) in enumerate(line):
            before[key, number, segment] = index - 1 if index else None
    seen: set[tuple[str, int, int]] = set()
    left = {segment.number: 0 for segment in segments}
    for _, segment in by_place:
        left[segment] += 1
    first: set[tuple[int, int]] = set()
    predecessors = {segment.number: segment.predecessors for segment in segments}
    for each, end in given:
        unit = history.units[each.unit]
        if ahead := [number for number in predecessors[each.segment] if left[number]]:
            found.append(Anomaly("group-reordered", f"{each} was given before the last event of segments {ahead} was"))
        for key in {unit.key_of(index) for index in each.indexes}:
            at = each.segment, end
            if latest.get((each.token, key), (-1, -1)) > at:
                found.append(Anomaly("group-reordered", f"{each} was given too late to its reader: {unit}"))
            latest[each.token, key] = at
            seen.add((key, each.unit, each.segment))
            index = before[key, each.unit, each.segment]
            if index is not None and (key, lines[key][index][2], lines[key][index][0]) not in seen:
                found.append(
                    Anomaly("group-reordered", f"{each} was given before {history.units[lines[key][index][2]]}")
                )
        if (each.unit, each.segment) not in first:
            first.add((each.unit, each.segment))
            left[each.segment] -= 1


def _check_checkpoints(
    segments: Sequence[Segment],
    notes: Notes,
    by_place: Mapping[tuple[int, int], Stand],
    ledger: Ledger,
    found: list[Anomaly],
) -> None:
    predecessors = {segment.number: segment.predecessors for segment in segments}
    for name, position in notes.checkpoints.items():
        limits = _limits(position, predecessors)
        for token in {token for token, passed in ledger.passed if passed == name}:
            mark = notes.marks.get((token, name))
            if mark is None:
                found.append(Anomaly("group-checkpoint", f"{token} passed {name} without a mark"))
                continue
            for index, each in enumerate(notes.given):
                stand = by_place.get((each.unit, each.segment))
                if each.token != token or stand is None:
                    continue
                if (stand.end <= limits.get(each.segment, -1)) is not (index < mark):
                    where = "before" if index < mark else "behind"
                    found.append(
                        Anomaly("group-checkpoint", f"{each} at {stand.end} was given {where} {name}: {position}")
                    )


def _limits(position: StreamPosition, predecessors: Mapping[int, frozenset[int]]) -> dict[int, float]:
    """Return the offset of a position by segment; infinite for segments that are wholly before it."""
    limits: dict[int, float] = {}
    stack = list(position.segments)
    while stack:
        for number in predecessors[stack.pop()]:
            limits[number] = math.inf
            stack.append(number)
    limits.update((number, float(at.offset)) for number, at in position.segments.items())
    return limits
