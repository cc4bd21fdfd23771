"""Check of transactions on several keys: the segments' content against the answers to the writers.

Committed events are computed independently from the messages' flags and clocks. Anomalies, by name:

=======================  ===============================================================================================
`partial`                only some of a transaction's events are committed
`torn`                   the events of one segment are not in the order of the writes
`duplicate`              an event is committed twice, or under two producers
`foreign`                an event is in a segment that its key does not belong to
`lost`                   an acknowledged transaction is not committed
`phantom`                a transaction that was reported as not applied is committed
`misplaced`              events are not at the reported offsets
`undecided`              events are committed without a recorded decision
`undelivered`            a decision is recorded, but a segment lacks the commit
=======================  ===============================================================================================
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coranto.streams.model.keys import key_hash

from .anomalies import Anomaly
from .history import Attempt, History, Unit, UnitOutcome
from .segments import ACK, CONTINUE, Message, Segment, parse


class Committed(NamedTuple):
    """Events committed together by the message at `index`, which ends at offset `end`."""

    index: int
    end: int
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The committed part of a transaction in one segment."""

    segment: Segment
    commit: Committed

    @property
    def producer(self) -> bytes:
        return self.commit.messages[0].producer

    @property
    def indexes(self) -> list[int]:
        return [message.part for message in self.commit.messages]


@dataclass(slots=True)
class _Producer:
    decided: int
    pending: list[Message] = field(default_factory=list)


def committed(messages: Iterable[Message]) -> Iterator[Committed]:
    """Return the messages that read-committed readers get from a segment, in order."""
    producers: dict[bytes, _Producer] = {}
    for index, message in enumerate(messages):
        state = producers.setdefault(message.producer, _Producer(message.clock - 1))
        if message.flags == CONTINUE:
            if message.clock > max([state.decided, *(each.clock for each in state.pending)]):
                state.pending.append(message)
            continue
        pending, state.pending = state.pending, []
        if message.flags == ACK:
            found = tuple(each for each in pending if each.clock <= message.clock)
            if message.clock > state.decided and found:
                yield Committed(index, message.end, found)
        elif message.clock > state.decided:
            yield Committed(index, message.end, (message,))
        state.decided = max(state.decided, message.clock)


def check_several(
    history: History, segments: Sequence[Segment], decisions: bytes, *, json_lines: bool
) -> tuple[list[Anomaly], dict[int, list[Part]]]:
    """Return all anomalies, and the committed parts of transactions. `decisions` is the content of their journal."""
    found: list[Anomaly] = []
    parts: defaultdict[int, list[Part]] = defaultdict(list)
    for segment in segments:
        for commit in committed(segment.messages):
            unit = history.units.get(commit.messages[0].unit)
            if unit is not None and unit.keys:
                parts[unit.number].append(Part(segment, commit))
    for unit in history.units.values():
        if unit.keys:
            _check(unit, parts.get(unit.number, []), found)
    _check_decisions(history, segments, parts, decisions, json_lines, found)
    return found, dict(parts)


def _check(unit: Unit, parts: Sequence[Part], found: list[Anomaly]) -> None:
    shown = [f"{part.segment.number}: {part.indexes}" for part in parts]
    indexes = [index for part in parts for index in part.indexes]
    if any(message.unit != unit.number for part in parts for message in part.commit.messages):
        found.append(Anomaly("torn", f"{unit}: is committed together with others: {shown}"))
    elif len(indexes) > len(set(indexes)) or len({part.producer for part in parts}) > 1:
        found.append(Anomaly("duplicate", f"{unit}: is committed as {shown}"))
    elif indexes and len(indexes) < unit.events:
        found.append(Anomaly("partial", f"{unit}: is committed as {shown}"))
    if any(part.indexes != sorted(part.indexes) for part in parts):
        found.append(Anomaly("torn", f"{unit}: is committed as {shown}"))
    for part in parts:
        strange = [index for index in part.indexes if not part.segment.range.contains(key_hash(unit.key_of(index)))]
        if strange:
            found.append(Anomaly("foreign", f"{unit}: events {strange} are in segment {part.segment.number}"))
    if unit.outcome is UnitOutcome.OK and not parts:
        found.append(Anomaly("lost", str(unit)))
    if unit.outcome is UnitOutcome.NOT_APPLIED and parts:
        found.append(Anomaly("phantom", f"{unit}: {shown}"))
    for attempt in unit.attempts:
        if attempt.outcome is UnitOutcome.OK:
            _check_positions(unit, attempt, parts, found)


def _check_positions(unit: Unit, attempt: Attempt, parts: Sequence[Part], found: list[Anomaly]) -> None:
    if attempt.positions.keys() != {part.segment.number for part in parts}:
        found.append(Anomaly("misplaced", f"{unit}: is reported to be in segments {sorted(attempt.positions)}"))
        return
    for part in parts:
        begin, end = attempt.positions[part.segment.number]
        # Events that were repeated after a lost answer may be there twice: one copy is at the reported offsets.
        there = [each for each in part.segment.messages if begin <= each.begin < end]
        if [each.part for each in there] != part.indexes or {each.unit for each in there} != {unit.number}:
            found.append(Anomaly("misplaced", f"{unit}: {there} is at [{begin}, {end}) of {part.segment.number}"))


def _check_decisions(
    history: History,
    segments: Sequence[Segment],
    parts: dict[int, list[Part]],
    decisions: bytes,
    json_lines: bool,
    found: list[Anomaly],
) -> None:
    wanted = _decided(decisions, json_lines)
    there = {(part.segment.journal, part.producer): unit for unit, each in parts.items() for part in each}
    by_name = {segment.journal: segment for segment in segments}
    for journal, producer in sorted(wanted - there.keys()):
        sent = [message for message in by_name[journal].messages if message.producer == producer and message.unit >= 0]
        what = history.units[sent[0].unit] if sent else "nothing"
        found.append(Anomaly("undelivered", f"{journal}: {what}"))
    strange = sorted(there.keys() - wanted)
    found += [Anomaly("undecided", f"{place[0]}: {history.units[there[place]]}") for place in strange]


def _decided(content: bytes, json_lines: bool) -> set[tuple[str, bytes]]:
    """Return the content that the first decision on each transaction commits, by journal and producer."""
    settled: set[str] = set()
    found: set[tuple[str, bytes]] = set()
    for line in content.splitlines():
        record = json.loads(line)
        for word in ("decided", "void"):
            if word in record and record[word] not in settled:
                settled.add(record[word])
                for journal, ack in record.get("acks", {}).items():
                    found.add((journal, parse(base64.b64decode(ack), json_lines=json_lines)[0].producer))
    return found
