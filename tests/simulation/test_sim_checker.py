"""The checker finds each anomaly in a hand-made history, and none in a good one."""

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


class Told:
    """Builds a history of appends that follow one another, a second each."""

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


def good() -> Told:
    told = Told()
    told.append(union="ada")
    told.append(OperationOutcome.FAIL, there=False)
    told.look(OperationKind.HEAD)
    told.append(check="ada", union="bob")
    told.append(OperationOutcome.INFO, there=False)
    told.append(OperationOutcome.INFO)
    told.look(OperationKind.BARRIER)
    told.append()
    return told


def stored(content: bytes, begin: int, end: int) -> tuple[Fragment, bytes]:
    data = content[begin:end]
    return Fragment(J, begin, end, sum_of(data), Codec.NONE), data


def test_a_good_history_is_good() -> None:
    told = good()
    final = told.final()
    final.fragments = [stored(told.content, 0, 30), stored(told.content, 30, len(told.content))]
    final.fully_stored = True
    final.replicas = [Observation("a replica", J, 10, told.content[10:40], 9.0)]
    told.history.observations.append(Observation("a reader", J, 0, told.content, 9.0))
    assert told.anomalies(final) == []


def _lose(told: Told) -> None:
    told.append(there=False)


def _misplace(told: Told) -> None:
    told.append().begin += 1


def _abort(told: Told) -> None:
    told.append(OperationOutcome.FAIL)


def _double(told: Told) -> None:
    operation = told.append()
    told.content += operation.content


def _tear(told: Told) -> None:
    operation = told.append(OperationOutcome.INFO)
    told.content = told.content[: operation.begin + 15]
    told.append()


def _drift(told: Told) -> None:
    told.append(union="cleo").registers = labels.label_set(owner="ada")


def _forget_registers(told: Told) -> None:
    told.registers = pb.LabelSet()


def _unchecked(told: Told) -> None:
    told.append(union="ada")
    told.append(check="bob")


def _ignore_offset(told: Told) -> None:
    told.append().offset = 1


def _reorder(told: Told) -> None:
    """The later append is in front of the earlier one, which had been acknowledged before it began."""
    first, second = told.append(), told.append()
    first.invoked, second.invoked = second.invoked, first.invoked
    first.returned, second.returned = second.returned, first.returned


def _stale_barrier(told: Told) -> None:
    head = len(told.content)
    told.append()
    told.look(OperationKind.BARRIER, head)


def _stale_head(told: Told) -> None:
    head = len(told.content)
    told.append()
    told.look(OperationKind.HEAD, head)


def _future_head(told: Told) -> None:
    # Further than appends that came to nothing could have brought a single replica.
    told.look(OperationKind.HEAD, 2 * len(told.content) + 10_000)


def _wrong_refusal(told: Told) -> None:
    for operation in told.history.operations:
        if operation.outcome is OperationOutcome.INFO and operation.begin < 0:
            operation.outcome = OperationOutcome.FAIL  # Or else the refusal might rest on it.
    operation = told.append(OperationOutcome.FAIL, there=False)
    operation.offset, operation.refusal = len(told.content), pb.WRONG_APPEND_OFFSET


def _changing_bytes(told: Told) -> None:
    told.history.observations.append(Observation("a reader", J, 3, b"?" + told.content[4:9], 1.0))


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
def test_each_anomaly_is_found(harm: Callable[[Told], None], name: str) -> None:
    told = good()
    harm(told)
    assert name in told.anomalies()


def test_a_read_of_an_append_that_came_to_nothing_is_an_anomaly() -> None:
    told = good()
    operation = told.append(OperationOutcome.INFO, there=False)
    kept = len(told.content) - 10
    seen = bytes(told.content[kept:]) + operation.content
    told.append(OperationOutcome.OK)
    assert told.anomalies() == []
    told.history.observations.append(Observation("reader", operation.journal, kept, seen, 9.0))
    assert told.anomalies() == ["inconsistent-offsets"]


def test_a_head_may_lag_where_brokers_do_not_know_better() -> None:
    told = good()
    _stale_head(told)
    assert told.anomalies(fresh=False) == []


def test_a_refusal_may_rest_on_an_append_that_came_to_nothing() -> None:
    told = good()
    operation = told.append(OperationOutcome.FAIL, there=False)
    operation.offset, operation.refusal = len(told.content), pb.WRONG_APPEND_OFFSET
    assert told.anomalies() == []


def test_replicas_and_fragments_are_compared() -> None:
    told = good()
    content = told.content
    end = len(content)
    final = told.final()
    final.replicas = [Observation("a replica", J, 0, content[:9] + b"#", 9.0)]
    assert told.anomalies(final) == ["diverged-replica"]
    final = told.final()
    for fragments in ([stored(content, 0, 30), stored(content, 40, end)], [stored(content, 0, 30)]):
        final.fragments = fragments
        assert told.anomalies(final) == []
        assert told.anomalies(replace(final, fully_stored=True)) == ["fragment-gap"]
    fragment, data = stored(content, 0, 30)
    final.fragments = [(fragment, data[:-1] + b"#")]
    assert told.anomalies(final) == ["corrupt-fragment"]
    final.fragments = [stored(b"#" * 30, 0, 30)]
    assert told.anomalies(final) == ["diverged-fragment"]


# -- Linearizability -------------------------------------------------------------------------------------------------


def counter(calls: list[tuple[float, float, str, int]]) -> Call | None:
    """A counter: `add` takes it from one value to the next, `read` sees a value."""

    def step_of(kind: str, value: int) -> Callable[[object], object]:
        if kind == "add":
            return lambda state: value + 1 if state == value else None
        return lambda state: state if state == value else None

    return first_impossible(0, [Call(a, b, step_of(kind, value), f"{kind} {value}") for a, b, kind, value in calls])


def test_overlapping_calls_may_take_any_order() -> None:
    assert counter([(0, 9, "add", 1), (1, 8, "add", 0), (2, 3, "read", 0), (4, 5, "read", 2)]) is None
    assert counter([(0, float("inf"), "add", 0), (5, 6, "read", 0), (7, 8, "read", 1)]) is None


def test_calls_that_follow_one_another_may_not() -> None:
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
