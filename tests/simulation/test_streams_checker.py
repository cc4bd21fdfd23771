"""The checker of streams finds each anomaly in a hand-made history, and none in a correct one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, build_uuid
from coranto.streams.model.events import BytesEvents, JsonEvents
from coranto.streams.model.keys import KEY_SPACE, KeyRange, key_hash

from .streams.checker import check
from .streams.history import Attempt, History, Unit, UnitOutcome
from .streams.segments import Segment, Unreadable, parse

KEY = "a key"
PRODUCERS = {"ada": ProducerId(b"\x01adaxx"), "bob": ProducerId(b"\x01bobxx")}


class Scenario:
    """A stream with one segment and sequential units, one per second."""

    def __init__(self, *, json_lines: bool) -> None:
        self.history = History()
        self.segments = {0: b""}
        self.sealed: dict[int, int] = {}
        self.ranges = {0: KeyRange.FULL}
        self.stable = {"ada"}
        self.now = 0.0
        self.clock = 1 << 20
        self.json_lines = json_lines

    def write(
        self, writer: str, events: int, *, to: int = 0, outcome: UnitOutcome = UnitOutcome.OK, there: bool = True
    ) -> Unit:
        unit = self.history.add(writer, KEY, events=max(1, events), padding=3, transaction=events > 0)
        attempt = Attempt(f"{writer}.1", self.now, self.now + 0.5, outcome, to)
        unit.attempts.append(attempt)
        self.now += 1.0
        if there:
            begin = len(self.segments[to])
            self.put(to, *self.messages(unit))
            if outcome is UnitOutcome.OK:
                attempt.begin, attempt.end = begin, len(self.segments[to])
        elif outcome is UnitOutcome.OK:
            attempt.begin, attempt.end = 0, 10
        return unit

    def messages(self, unit: Unit) -> list[bytes]:
        flags = Flags.CONTINUE_TXN if unit.transaction else Flags.OUTSIDE_TXN
        return [
            *(self.event(unit, index, flags) for index in range(unit.events)),
            *([self.ending(unit)] if unit.transaction else []),
        ]

    def event(self, unit: Unit, index: int, flags: Flags) -> bytes:
        self.clock += CLOCK_TICK
        uuid = build_uuid(PRODUCERS[unit.writer], self.clock, flags)
        if self.json_lines:
            return JsonEvents().stamp(JsonEvents().encode(unit.event(index)), uuid)
        return BytesEvents().stamp(BytesEvents().encode(unit.content(index)), uuid)

    def ending(self, unit: Unit) -> bytes:
        self.clock += CLOCK_TICK
        uuid = build_uuid(PRODUCERS[unit.writer], self.clock, Flags.ACK_TXN)
        format = JsonEvents() if self.json_lines else BytesEvents()
        return format.transaction_end(uuid, unit.writer, unit.number)

    def put(self, to: int, *messages: bytes) -> None:
        self.segments[to] += b"".join(messages)

    def anomalies(self) -> list[str]:
        segments = [
            Segment(n, self.ranges[n], content, self.sealed.get(n), parse(content, json_lines=self.json_lines))
            for n, content in self.segments.items()
        ]
        return [anomaly.name for anomaly in check(self.history, segments, self.stable)[0]]


def good(json_lines: bool = True) -> Scenario:
    scenario = Scenario(json_lines=json_lines)
    scenario.write("ada", 0)
    scenario.write("ada", 3)
    scenario.write("bob", 1)
    scenario.write("bob", 2, outcome=UnitOutcome.NOT_APPLIED, there=False)
    scenario.write("ada", 2, outcome=UnitOutcome.UNKNOWN)
    scenario.write("bob", 2, outcome=UnitOutcome.UNKNOWN, there=False)
    scenario.sealed[0] = len(scenario.segments[0])
    scenario.segments[1], scenario.ranges[1] = b"", KeyRange.FULL
    scenario.write("ada", 4, to=1)
    return scenario


@pytest.mark.parametrize("json_lines", [True, False])
def test_a_correct_history_has_no_anomalies(json_lines: bool) -> None:
    assert good(json_lines).anomalies() == []


def _part(scenario: Scenario) -> None:
    unit = scenario.write("ada", 3, outcome=UnitOutcome.UNKNOWN, there=False)
    scenario.put(1, *scenario.messages(unit)[:2])


def _tear(scenario: Scenario) -> None:
    first = scenario.write("ada", 2, outcome=UnitOutcome.UNKNOWN, there=False)
    messages = scenario.messages(first)
    scenario.put(1, *messages[:1])
    scenario.write("bob", 0, to=1)
    scenario.put(1, *messages[1:])


def _leave_out_the_end(scenario: Scenario) -> None:
    unit = scenario.write("ada", 2, outcome=UnitOutcome.UNKNOWN, there=False)
    scenario.put(1, *scenario.messages(unit)[:2])


def _spread(scenario: Scenario) -> None:
    unit = scenario.write("ada", 2, outcome=UnitOutcome.UNKNOWN, there=False)
    messages = scenario.messages(unit)
    scenario.put(1, messages[0])
    scenario.segments[2], scenario.ranges[2] = b"".join(messages[1:]), KeyRange.FULL


def _double(scenario: Scenario) -> None:
    scenario.put(1, *scenario.messages(scenario.write("ada", 2, to=1)))


def _lose(scenario: Scenario) -> None:
    scenario.write("ada", 2, there=False)


def _revive(scenario: Scenario) -> None:
    expired = scenario.write("ada", 2, outcome=UnitOutcome.NOT_APPLIED, there=False)
    expired.attempts[0].error = "WriterExpired: not known any more"
    _count(scenario).give_up(0.0)


def _lose_a_counted_event(scenario: Scenario) -> None:
    _count(scenario).give_up(scenario.now)


def _lose_a_placed_event(scenario: Scenario) -> None:
    unit = _count(scenario)
    unit.give_up(0.0)
    unit.attempts.append(replace(unit.attempts[0], deduplicated=False, begin=0, end=10))


def _count(scenario: Scenario) -> Unit:
    """Count a missing event as durable, according to the registers."""
    unit = scenario.write("ada", 0, there=False)
    unit.attempts = [replace(unit.attempts[0], deduplicated=True, begin=-1, end=-1)]
    return unit


def _apply_what_failed(scenario: Scenario) -> None:
    scenario.write("ada", 1, to=1, outcome=UnitOutcome.NOT_APPLIED)


def _misplace(scenario: Scenario) -> None:
    scenario.write("ada", 2, to=1).attempts[0].begin += 1


def _another_place_the_second_time(scenario: Scenario) -> None:
    unit = scenario.write("ada", 2, to=1)
    unit.attempts.append(replace(unit.attempts[0], begin=0, deduplicated=True))


def _ignore_the_offset(scenario: Scenario) -> None:
    unit = scenario.write("ada", 2, to=1)
    unit.attempts[0].expected_offset = unit.attempts[0].begin + 7


def _ignore_the_fence(scenario: Scenario) -> None:
    attempt = scenario.write("ada", 2, to=1).attempts[0]
    attempt.fence, attempt.last_fence = 3, 4


def _strange_segment(scenario: Scenario) -> None:
    place = key_hash(KEY)
    scenario.ranges[1] = KeyRange(place + 1, KEY_SPACE)


def _nobodys(scenario: Scenario) -> None:
    unit = scenario.write("ada", 0, to=1)
    unit.number = 77
    scenario.put(1, *scenario.messages(unit))


def _reorder_one_writers(scenario: Scenario) -> None:
    first, second = scenario.write("ada", 1, to=1), scenario.write("ada", 1, to=1)
    first.attempts[0].returned = second.attempts[0].returned = 99.0
    for unit, other in ((first, 0), (second, 0)):
        unit.attempts[other].outcome = UnitOutcome.UNKNOWN
    first.number, second.number = second.number, first.number
    scenario.history.units = {unit.number: unit for unit in scenario.history.units.values()}
    scenario.segments[1] = b""
    scenario.history.units[7].attempts[0].outcome = UnitOutcome.UNKNOWN
    for unit in (scenario.history.units[9], scenario.history.units[8]):
        scenario.put(1, *scenario.messages(unit))


def _reorder_over_time(scenario: Scenario) -> None:
    """Swap two writers' units. The first one began after the acknowledgement of the second one."""
    scenario.write("bob", 1, to=1).attempts[0].invoked = 98.0
    scenario.write("ada", 1, to=1)


def _reorder_over_segments(scenario: Scenario) -> None:
    unit = scenario.write("ada", 1, to=1, outcome=UnitOutcome.UNKNOWN)
    scenario.segments[2], scenario.ranges[2] = b"", KeyRange.FULL
    scenario.put(2, *scenario.messages(scenario.history.units[1]))
    scenario.segments[0] = b""
    scenario.sealed.clear()
    scenario.history.units = {1: scenario.history.units[1], unit.number: unit}
    scenario.history.units[1].attempts[0].outcome = UnitOutcome.UNKNOWN
    scenario.segments[1] = b""
    scenario.put(1, *scenario.messages(unit))


def _turn_the_clock_back(scenario: Scenario) -> None:
    scenario.clock -= 1000 * CLOCK_TICK
    scenario.write("ada", 1, to=1)


def _write_on_after_the_seal(scenario: Scenario) -> None:
    scenario.write("bob", 1)


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (_part, "partial"),
        (_tear, "torn"),
        (_leave_out_the_end, "torn"),
        (_spread, "torn"),
        (_double, "duplicate"),
        (_lose, "lost"),
        (_count, "lost"),
        (_revive, "revived"),
        (_lose_a_counted_event, "lost"),
        (_lose_a_placed_event, "lost"),
        (_apply_what_failed, "phantom"),
        (_misplace, "misplaced"),
        (_another_place_the_second_time, "misplaced"),
        (_ignore_the_offset, "misplaced"),
        (_ignore_the_fence, "unfenced"),
        (_strange_segment, "foreign"),
        (_nobodys, "foreign"),
        (_reorder_one_writers, "reordered"),
        (_reorder_over_time, "reordered"),
        (_reorder_over_segments, "reordered"),
        (_turn_the_clock_back, "clock"),
        (_write_on_after_the_seal, "beyond-seal"),
    ],
)
def test_each_anomaly_is_found(harm: Callable[[Scenario], None], name: str) -> None:
    scenario = good()
    harm(scenario)
    assert name in scenario.anomalies()


def test_an_abandoned_event_may_count_as_durable_later() -> None:
    scenario = good()
    unit = _count(scenario)
    unit.give_up(unit.attempts[0].returned)
    assert scenario.anomalies() == []


def test_bytes_that_no_writer_writes_are_unreadable() -> None:
    for json_lines, content in ((True, b"{}\n"), (True, b'{"_meta":'), (False, b"\x00" * 30), (False, b"\x66")):
        with pytest.raises(Unreadable):
            parse(content, json_lines=json_lines)
    assert json.loads(Unit(1, "ada", KEY, 2, 3, True).content(1)) == Unit(1, "ada", KEY, 2, 3, True).event(1)
