"""Comparison of the answers to writers with the final content of the segments.

Anomalies, by name:

===================  ===================================================================================================
`unreadable`         a segment holds bytes that no writer writes
`partial`            only some of a transaction's events are in the stream
`torn`               a transaction's events are not contiguous, or its end does not follow them
`duplicate`          an event is in two places
`lost`               an acknowledged unit is missing, or one that the registers report as durable
`phantom`            a unit that was reported as not applied is in the stream
`revived`            a writer that was fenced or expired later counted an event as durable
`misplaced`          an acknowledged unit is at another place, or begins at another offset than it had to
`unfenced`           a unit with a fence was applied although a later fence had been raised before
`foreign`            an event is in a segment that its key does not belong to, or no writer wrote it
`reordered`          the events of a key are not in the order of one writer's writes, or an event is before one that
                     was acknowledged before it began
`clock`              the clocks of a producer do not increase, so readers would drop messages
`beyond-seal`        a sealed segment does not end at the offset of its label
===================  ===================================================================================================
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coranto.streams.model.keys import key_hash

from .anomalies import Anomaly
from .history import Attempt, History, Unit, UnitOutcome
from .segments import ACK, CONTINUE, Message, Segment
from .several import Part


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a unit: bytes [begin, end), including its transaction's end, from the `index`-th message on."""

    segment: Segment
    index: int
    begin: int
    end: int


def check(
    history: History,
    segments: Sequence[Segment],
    stable: Collection[str],
    several: Mapping[int, Sequence[Part]] | None = None,
) -> tuple[list[Anomaly], dict[int, Place]]:
    """Return all anomalies, and the places of written units. `stable` writers use one id in all of their processes.

    For transactions on several keys, only the order is checked: `several` has the committed parts.
    """
    found: list[Anomaly] = []
    places = _places(history, segments, found)
    for unit in history.units.values():
        if not unit.keys:
            _check_outcome(unit, places.get(unit.number), found)
    _check_ended(history, found)
    _check_order(history, places, several or {}, stable, found)
    for segment in segments:
        _check_segment(history, segment, found)
    return found, places


class Stand(NamedTuple):
    """The events of a unit in one segment, which readers get together. Their commit ends at offset `end`."""

    segment: int
    end: int
    indexes: tuple[int, ...]


def stands_of(
    history: History, places: Mapping[int, Place], several: Mapping[int, Sequence[Part]]
) -> dict[int, list[Stand]]:
    """Return the events that readers must get, by unit."""
    stands = {
        number: [Stand(place.segment.number, place.end, tuple(range(history.units[number].events)))]
        for number, place in places.items()
    }
    for number, parts in several.items():
        stands[number] = [Stand(part.segment.number, part.commit.end, tuple(part.indexes)) for part in parts]
    return stands


def _places(history: History, segments: Sequence[Segment], found: list[Anomaly]) -> dict[int, Place]:
    """Return the place of each whole and correct unit. Report all others."""
    at: defaultdict[int, list[tuple[Segment, int]]] = defaultdict(list)
    for segment in segments:
        for index, message in enumerate(segment.messages):
            if message.unit >= 0:
                at[message.unit].append((segment, index))
    places: dict[int, Place] = {}
    for number, where in at.items():
        unit = history.units.get(number)
        if unit is None:
            found.append(Anomaly("foreign", f"unit {number} in segment {where[0][0].number} was never written"))
            continue
        if unit.keys:
            continue
        indexes = [segment.messages[index].part for segment, index in where]
        if len(set(indexes)) < len(indexes):
            found.append(Anomaly("duplicate", f"{unit}: is at {list(_shown(where))}"))
            continue
        if len(indexes) < unit.events:
            found.append(Anomaly("partial", f"{unit}: only {sorted(indexes)} at {list(_shown(where))}"))
            continue
        place = _whole(unit, where)
        if place is None:
            found.append(Anomaly("torn", f"{unit}: is at {list(_shown(where))}"))
            continue
        if not place.segment.range.contains(key_hash(unit.key)):
            found.append(Anomaly("foreign", f"{unit}: is in segment {place.segment.number} of {place.segment.range}"))
        places[number] = place
    return places


def _shown(where: Sequence[tuple[Segment, int]]) -> Iterator[str]:
    for segment, index in where:
        message = segment.messages[index]
        yield f"{segment.number}:[{message.begin}, {message.end})#{message.part}"


def _whole(unit: Unit, where: Sequence[tuple[Segment, int]]) -> Place | None:
    """Return the place of a unit if its messages are contiguous, in order and correct."""
    segment, first = where[0]
    count = unit.events + unit.transaction
    messages = segment.messages[first : first + count]
    if len(messages) < count or any(other is not segment for other, _ in where):
        return None
    flags = CONTINUE if unit.transaction else 0
    for index, message in enumerate(messages[: unit.events]):
        if (message.unit, message.part, message.flags) != (unit.number, index, flags):
            return None
    last = messages[-1]
    if unit.transaction and (last.flags != ACK or last.sequence < 0 or last.producer != messages[0].producer):
        return None
    return Place(segment, first, messages[0].begin, last.end)


def _counted(unit: Unit, attempt: Attempt) -> bool:
    """Return True if only the registers report the unit as durable.

    The place of an event of an earlier process is not recorded. The place of a transaction was not found.
    """
    return attempt.was_durable or (attempt.deduplicated and not unit.transaction and attempt.begin == -1)


def _check_outcome(unit: Unit, place: Place | None, found: list[Anomaly]) -> None:
    if place is None:
        # Once the program continues without a unit, the registers count it as durable: they have the last sequence.
        counted = [_counted(unit, each) and each.returned < unit.given_up for each in unit.attempts]
        if any(each.outcome is UnitOutcome.OK and not _counted(unit, each) for each in unit.attempts):
            found.append(Anomaly("lost", str(unit)))
        elif any(counted):
            found.append(Anomaly("lost", f"{unit}: it counted as durable"))
    if unit.outcome is UnitOutcome.NOT_APPLIED and place is not None:
        found.append(Anomaly("phantom", f"{unit}: is at {place.segment.number}:[{place.begin}, {place.end})"))
    if place is None:
        return
    for attempt in unit.attempts:
        if attempt.outcome is not UnitOutcome.OK:
            continue
        reported = attempt.segment, attempt.begin, attempt.end
        if not _counted(unit, attempt) and reported != (place.segment.number, place.begin, place.end):
            found.append(Anomaly("misplaced", f"{unit}: {place.segment.number}:[{place.begin}, {place.end})"))
        if attempt.fence != attempt.last_fence and not attempt.deduplicated:
            found.append(Anomaly("unfenced", str(unit)))
        if attempt.expected_offset is not None and not attempt.deduplicated and attempt.expected_offset != place.begin:
            found.append(Anomaly("misplaced", f"{unit}: was to begin at {attempt.expected_offset}"))


def _check_ended(history: History, found: list[Anomaly]) -> None:
    """Check that no unit counts as durable for a writer that has ended.

    The registers may then have the entry of another process, which continued without the writer's units.
    """
    ended: dict[str, float] = {}
    for unit in history.units.values():
        for attempt in unit.attempts:
            if attempt.has_ended:
                ended[attempt.process] = min(attempt.returned, ended.get(attempt.process, math.inf))
    for unit in history.units.values():
        for attempt in unit.attempts:
            is_late = attempt.returned > ended.get(attempt.process, math.inf)
            if is_late and attempt.outcome is UnitOutcome.OK and _counted(unit, attempt):
                found.append(Anomaly("revived", f"{unit}: {attempt.process} had already ended"))


def _check_order(
    history: History,
    places: dict[int, Place],
    several: Mapping[int, Sequence[Part]],
    stable: Collection[str],
    found: list[Anomaly],
) -> None:
    by_key: defaultdict[str, list[tuple[int, int, Unit]]] = defaultdict(list)
    for number, place in places.items():
        unit = history.units[number]
        # A successor segment has a larger number than its predecessors.
        by_key[unit.key].append((place.segment.number, place.index, unit))
    for number, parts in several.items():
        unit = history.units[number]
        for part in parts:
            for key in {unit.key_of(index) for index in part.indexes}:
                by_key[key].append((part.segment.number, part.commit.index, unit))
    for key, line in by_key.items():
        line.sort(key=lambda entry: entry[:2])
        latest: dict[str | int, Unit] = {}
        begun: Unit | None = None
        for _, _, unit in line:
            # One writer may write transactions on several keys concurrently.
            who = (
                unit.number
                if unit.keys
                else unit.writer
                if unit.writer in stable
                else f"{unit.writer} {unit.attempts[0].process}"
            )
            before = latest.get(who)
            if before is not None and before.number > unit.number:
                found.append(Anomaly("reordered", f"key {key}: {before} is before {unit}"))
            latest[who] = unit
            if begun is not None and unit.acknowledged < begun.invoked:
                found.append(Anomaly("reordered", f"key {key}: {begun} began after and is before {unit}"))
            if begun is None or unit.invoked > begun.invoked:
                begun = unit


def _check_segment(history: History, segment: Segment, found: list[Anomaly]) -> None:
    clocks: dict[bytes, Message] = {}
    for message in segment.messages:
        before = clocks.get(message.producer)
        # Only messages that commit nothing, and messages of transactions on several keys, may be repeated.
        unit = history.units.get(message.unit)
        may_repeat = message.sequence < 0 if unit is None else bool(unit.keys)
        if before is not None and before.clock >= message.clock and not may_repeat:
            found.append(Anomaly("clock", f"segment {segment.number}: {before} is before {message}"))
        if before is None or before.clock < message.clock:
            clocks[message.producer] = message
    if segment.sealed_at is not None and segment.sealed_at != len(segment.content):
        found.append(
            Anomaly(
                "beyond-seal",
                f"segment {segment.number} was sealed at {segment.sealed_at} and ends at {len(segment.content)}",
            )
        )
