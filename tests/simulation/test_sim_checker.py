"""The checker finds each anomaly in a hand-made history, and none in a correct one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.testing.histories import History, Observation, Operation, OperationKind, OperationOutcome, unique_content
from coranto.wire import protocol_pb2 as pb
from tests.simulation.kit.checker import FinalJournal, check
from tests.simulation.kit.linearizability import Call, first_impossible

J = "a/journal"
RNG = random.Random(0)


class Scenario:
    """A history of sequential appends, one per second."""

    def __init__(self) -> None:
        self.history = History()
        self.content = b""
        self.registers = pb.LabelSet()
        self.now = 0.0

    def append(
        self, outcome: OperationOutcome = OperationOutcome.OK, *, there: bool = True, union: str = "", check: str = ""
    ) -> Operation:
        operation = self._begin(OperationKind.APPEND)
        operation.content = unique_content(operation.number, RNG, 20, 60)
        operation.outcome = outcome
        if check:
            operation.check = labels.parse_selector(f"owner={check}")
        if union:
            operation.union = labels.label_set(owner=union)
        if there:
            operation.begin = len(self.content)
            self.content += operation.content
            operation.end = len(self.content)
            if union:
                self.registers = labels.label_set(owner=union)
            operation.registers = self.registers
        return operation

    def look(self, kind: OperationKind, head: int | None = None) -> Operation:
        operation = self._begin(kind)
        operation.outcome = OperationOutcome.OK
        operation.begin = operation.end = len(self.content) if head is None else head
        operation.registers = self.registers
        return operation

    def _begin(self, kind: OperationKind) -> Operation:
        operation = self.history.begin("client", kind, J, self.now)
        operation.returned = self.now + 0.5
        self.now += 1.0
        return operation

    def final(self) -> FinalJournal:
        return FinalJournal(self.content, self.registers)

    def anomalies(self, final: FinalJournal | None = None, *, fresh: bool = True) -> list[str]:
        return [found.name for found in check(self.history, {J: final or self.final()}, fresh_heads=fresh)]


def good() -> Scenario:
    scenario = Scenario()
    scenario.append(union="ada")
    scenario.append(OperationOutcome.FAIL, there=False)
    scenario.look(OperationKind.HEAD)
    scenario.append(check="ada", union="bob")
    scenario.append(OperationOutcome.INFO, there=False)
    scenario.append(OperationOutcome.INFO)
    scenario.look(OperationKind.BARRIER)
    scenario.append()
    return scenario


def stored(content: bytes, begin: int, end: int) -> tuple[Fragment, bytes]:
    data = content[begin:end]
    return Fragment(J, begin, end, sum_of(data), Codec.NONE), data


def test_a_correct_history_has_no_anomalies() -> None:
    scenario = good()
    final = scenario.final()
    final.fragments = [stored(scenario.content, 0, 30), stored(scenario.content, 30, len(scenario.content))]
    final.fully_stored = True
    final.replicas = [Observation("a replica", J, 10, scenario.content[10:40], 9.0)]
    scenario.history.observations.append(Observation("a reader", J, 0, scenario.content, 9.0))
    assert scenario.anomalies(final) == []


def _lose(scenario: Scenario) -> None:
    scenario.append(there=False)


def _misplace(scenario: Scenario) -> None:
    scenario.append().begin += 1


def _abort(scenario: Scenario) -> None:
    scenario.append(OperationOutcome.FAIL)


def _double(scenario: Scenario) -> None:
    operation = scenario.append()
    scenario.content += operation.content


def _tear(scenario: Scenario) -> None:
    operation = scenario.append(OperationOutcome.INFO)
    scenario.content = scenario.content[: operation.begin + 15]
    scenario.append()


def _drift(scenario: Scenario) -> None:
    scenario.append(union="cleo").registers = labels.label_set(owner="ada")


def _forget_registers(scenario: Scenario) -> None:
    scenario.registers = pb.LabelSet()


def _unchecked(scenario: Scenario) -> None:
    scenario.append(union="ada")
    scenario.append(check="bob")


def _ignore_offset(scenario: Scenario) -> None:
    scenario.append().offset = 1


def _reorder(scenario: Scenario) -> None:
    """The later append is before the earlier one, which was acknowledged before it began."""
    first, second = scenario.append(), scenario.append()
    first.invoked, second.invoked = second.invoked, first.invoked
    first.returned, second.returned = second.returned, first.returned


def _stale_barrier(scenario: Scenario) -> None:
    head = len(scenario.content)
    scenario.append()
    scenario.look(OperationKind.BARRIER, head)


def _stale_head(scenario: Scenario) -> None:
    head = len(scenario.content)
    scenario.append()
    scenario.look(OperationKind.HEAD, head)


def _future_head(scenario: Scenario) -> None:
    # Further than uncommitted appends could have moved a single replica.
    scenario.look(OperationKind.HEAD, 2 * len(scenario.content) + 10_000)


def _wrong_refusal(scenario: Scenario) -> None:
    for operation in scenario.history.operations:
        if operation.outcome is OperationOutcome.INFO and operation.begin < 0:
            operation.outcome = OperationOutcome.FAIL  # Otherwise the refusal might result from it.
    operation = scenario.append(OperationOutcome.FAIL, there=False)
    operation.offset, operation.refusal = len(scenario.content), pb.WRONG_APPEND_OFFSET


def _changing_bytes(scenario: Scenario) -> None:
    scenario.history.observations.append(Observation("a reader", J, 3, b"?" + scenario.content[4:9], 1.0))


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (_lose, "lost-write"),
        (_misplace, "inconsistent-offsets"),
        (_abort, "aborted-read"),
        (_double, "duplicate"),
        (_tear, "torn-append"),
        (_drift, "register-drift"),
        (_forget_registers, "register-drift"),
        (_unchecked, "unchecked-registers"),
        (_ignore_offset, "misplaced-append"),
        (_reorder, "not-linearizable"),
        (_stale_barrier, "not-linearizable"),
        (_stale_head, "stale-head"),
        (_future_head, "future-head"),
        (_wrong_refusal, "not-linearizable"),
        (_changing_bytes, "inconsistent-offsets"),
    ],
)
def test_each_anomaly_is_found(harm: Callable[[Scenario], None], name: str) -> None:
    scenario = good()
    harm(scenario)
    assert name in scenario.anomalies()


def test_a_read_of_an_uncommitted_append_is_an_anomaly() -> None:
    scenario = good()
    operation = scenario.append(OperationOutcome.INFO, there=False)
    kept = len(scenario.content) - 10
    seen = bytes(scenario.content[kept:]) + operation.content
    scenario.append(OperationOutcome.OK)
    assert scenario.anomalies() == []
    scenario.history.observations.append(Observation("reader", operation.journal, kept, seen, 9.0))
    assert scenario.anomalies() == ["inconsistent-offsets"]


def test_a_head_may_lag_where_stale_reads_are_allowed() -> None:
    scenario = good()
    _stale_head(scenario)
    assert scenario.anomalies(fresh=False) == []


def test_a_refusal_may_result_from_an_uncommitted_append() -> None:
    scenario = good()
    operation = scenario.append(OperationOutcome.FAIL, there=False)
    operation.offset, operation.refusal = len(scenario.content), pb.WRONG_APPEND_OFFSET
    assert scenario.anomalies() == []


def test_replicas_and_fragments_are_compared() -> None:
    scenario = good()
    content = scenario.content
    end = len(content)
    final = scenario.final()
    final.replicas = [Observation("a replica", J, 0, content[:9] + b"#", 9.0)]
    assert scenario.anomalies(final) == ["diverged-replica"]
    final = scenario.final()
    for fragments in ([stored(content, 0, 30), stored(content, 40, end)], [stored(content, 0, 30)]):
        final.fragments = fragments
        assert scenario.anomalies(final) == []
        assert scenario.anomalies(replace(final, fully_stored=True)) == ["fragment-gap"]
    fragment, data = stored(content, 0, 30)
    final.fragments = [(fragment, data[:-1] + b"#")]
    assert scenario.anomalies(final) == ["corrupt-fragment"]
    final.fragments = [stored(b"#" * 30, 0, 30)]
    assert scenario.anomalies(final) == ["diverged-fragment"]


# -- Linearizability -------------------------------------------------------------------------------------------------


def counter(calls: list[tuple[float, float, str, int]]) -> Call | None:
    """A counter: `add` increments it from an expected value, `read` sees a value."""

    def step_of(kind: str, value: int) -> Callable[[object], object]:
        if kind == "add":
            return lambda state: value + 1 if state == value else None
        return lambda state: state if state == value else None

    return first_impossible(0, [Call(a, b, step_of(kind, value), f"{kind} {value}") for a, b, kind, value in calls])


def test_overlapping_calls_may_take_any_order() -> None:
    assert counter([(0, 9, "add", 1), (1, 8, "add", 0), (2, 3, "read", 0), (4, 5, "read", 2)]) is None
    assert counter([(0, float("inf"), "add", 0), (5, 6, "read", 0), (7, 8, "read", 1)]) is None


def test_sequential_calls_keep_their_order() -> None:
    assert counter([(0, 1, "add", 0), (2, 3, "read", 0)]) is not None
    assert counter([(0, 9, "add", 0), (1, 2, "read", 1), (3, 4, "read", 0)]) is not None


def test_a_long_history_of_many_clients_is_decided_quickly() -> None:
    rng = random.Random(1)
    calls: list[tuple[float, float, str, int]] = []
    for value in range(3000):
        at = float(value)
        calls.append((at - rng.uniform(0, 8), at + rng.uniform(0, 8), "add", value))
        if value % 5 == 0:
            calls.append((at + 0.1 - rng.uniform(0, 3), at + 0.1 + rng.uniform(0, 3), "read", value + 1))
    assert counter(calls) is None
    found = counter([*calls, (2000.0, 2001.0, "read", 1500)])
    assert found is not None
