"""Comparison of the events that a group's readers got with the stream and the group's own journal.

The group's journal is read by a parser of its own. It tells who held which segment from which offset on, and up to
where each one had said that it had consumed it. An event counts as being where its transaction is committed.

=======================  ===============================================================================================
`group-state`            what the group's journal says contradicts itself, or the segments: positions go back, somebody
                         holds what another one holds, a segment ends elsewhere, or is taken up before its predecessors
`group-unread`           an event was given to nobody
`group-skipped`          an event was said to be consumed that its reader was not given, or was not through with
`group-again`            an event was given again that was said to be consumed, or twice to one reader, or by a reader
                         that had left or given up the segment without saying so
`group-torn`             a transaction was not given whole
`group-phantom`          something was given that is not there
`group-reordered`        the events of a key were not given in order, or a segment's before its predecessors'
`group-checkpoint`       something that was given before a reader's mark is behind the checkpoint, or the reverse
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
    may_see_what_came_to_nothing: bool,
) -> tuple[list[Anomaly], Ledger]:
    """All anomalies, and what the group's journal says."""
    ledger = read_ledger(journal, segments)
    found = ledger.found
    by_place = {(number, stand.segment): stand for number, each in stands.items() for stand in each}
    given: list[tuple[Given, int]] = []
    """The events in the stream, with the places where they are committed."""
    for each in notes.given:
        stand = by_place.get((each.unit, each.segment))
        if stand is None:
            if not may_see_what_came_to_nothing:
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
    """Check that readers got only events that were not consumed yet, and consumed only events that they got."""
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
        told = all(holding.ended_by in _VOLUNTARY for holding in mine) or each.token in notes.left
        if told and end > last:
            found.append(Anomaly("group-again", f"{each} at {end} was not told by its reader, which was at {last}"))
        events = {(each.unit, index) for index in each.indexes}
        if events & had[each.token, each.segment]:
            found.append(Anomaly("group-again", f"{each} came twice to its reader"))
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
    """By key, the units that are there in order."""
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
            found.append(Anomaly("group-reordered", f"{each} came before all of segments {ahead} had"))
        for key in {unit.key_of(index) for index in each.indexes}:
            at = each.segment, end
            if latest.get((each.token, key), (-1, -1)) > at:
                found.append(Anomaly("group-reordered", f"{each} came too late to its reader: {unit}"))
            latest[each.token, key] = at
            seen.add((key, each.unit, each.segment))
            index = before[key, each.unit, each.segment]
            if index is not None and (key, lines[key][index][2], lines[key][index][0]) not in seen:
                found.append(Anomaly("group-reordered", f"{each} came before {history.units[lines[key][index][2]]}"))
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
                found.append(Anomaly("group-checkpoint", f"{token} passed {name} without having kept anything"))
                continue
            for index, each in enumerate(notes.given):
                stand = by_place.get((each.unit, each.segment))
                if each.token != token or stand is None:
                    continue
                if (stand.end <= limits.get(each.segment, -1)) is not (index < mark):
                    where = "before" if index < mark else "behind"
                    found.append(Anomaly("group-checkpoint", f"{each} at {stand.end} came {where} {name}: {position}"))


def _limits(position: StreamPosition, predecessors: Mapping[int, frozenset[int]]) -> dict[int, float]:
    """By segment, the offset that a position is at; infinite for those that are wholly before it."""
    limits: dict[int, float] = {}
    stack = list(position.segments)
    while stack:
        for number in predecessors[stack.pop()]:
            limits[number] = math.inf
            stack.append(number)
    limits.update((number, float(at.offset)) for number, at in position.segments.items())
    return limits
