"""The registers of lanes: the transaction in progress of a producer id, and the appends that it allows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from coranto import labels
from coranto.errors import CorruptData
from coranto.messages.uuids import ProducerId
from coranto.streams.model.lanes import LaneChange, LanePool, LaneStep, LaneUse, after_refusal, lanes_in, parameters
from coranto.streams.model.stream import HELD_LABEL, RESTORED_LABEL
from coranto.wire import protocol_pb2 as pb
from tests.platform.streams.full_counts import remembered_producers

ONE = LaneUse(ProducerId(bytes.fromhex("010000000001")), "a1", 16)
NEXT = ONE._replace(txn="b2", begin=4000)
OTHER = LaneUse(ProducerId(bytes.fromhex("010000000002")), "c3", 17)


@dataclass
class Segment:
    """The registers of a segment, changed as by a broker."""

    registers: pb.LabelSet = field(default_factory=lambda: labels.label_set({HELD_LABEL: "1"}))

    def append(self, *changes: LaneChange) -> bool:
        found: dict[str, Any] = parameters(changes)
        check = found.get("check_registers", pb.LabelSelector())
        strict = any(label.name == HELD_LABEL for label in check.include.labels)
        if (self.registers.labels or strict) and not labels.matches(check, self.registers):
            return False
        kept = labels.subtract(self.registers, found.get("subtract_registers", pb.LabelSet()))
        self.registers = labels.union(found.get("union_registers", pb.LabelSet()), kept)
        return True


def begin(use: LaneUse) -> LaneChange:
    return LaneChange(LaneStep.BEGIN, use)


def end(use: LaneUse) -> LaneChange:
    return LaneChange(LaneStep.END, use)


def test_a_lane_serves_one_transaction_at_a_time_and_ends_each_once() -> None:
    segment = Segment()
    assert segment.append(begin(ONE))
    assert not segment.append(begin(NEXT)), "the previous transaction has not ended"
    assert lanes_in(segment.registers) == (ONE,)
    assert segment.append(end(ONE))
    assert not segment.append(end(ONE))
    assert after_refusal(segment.registers, ONE) is None
    assert segment.append(begin(NEXT))
    assert not segment.append(end(ONE)), "it would drop the events of the next"
    assert after_refusal(segment.registers, ONE) is None
    assert not segment.append(LaneChange(LaneStep.END_AFTER_LOSS, ONE))
    assert segment.append(end(NEXT))
    assert lanes_in(segment.registers) == ()


def test_changes_of_several_lanes_are_applied_together_or_not_at_all() -> None:
    segment = Segment()
    assert segment.append(begin(ONE), begin(OTHER))
    assert set(lanes_in(segment.registers)) == {ONE, OTHER}
    assert not segment.append(end(ONE), end(OTHER._replace(txn="d4")))
    assert set(lanes_in(segment.registers)) == {ONE, OTHER}
    assert segment.append(end(ONE), LaneChange(LaneStep.DROP, OTHER))
    assert lanes_in(segment.registers) == ()


def test_dropping_a_transaction_keeps_the_next_one_of_its_lane() -> None:
    segment = Segment()
    segment.append(begin(NEXT))
    assert segment.append(LaneChange(LaneStep.DROP, ONE))
    assert lanes_in(segment.registers) == (NEXT,)


@pytest.mark.parametrize("left", [{}, {HELD_LABEL: "1", RESTORED_LABEL: "1f"}], ids=["lost", "restored"])
def test_after_a_loss_of_registers_a_transaction_ends_unless_its_lane_was_reused(left: dict[str, str]) -> None:
    segment = Segment(labels.label_set(left))
    assert not segment.append(end(ONE))
    assert after_refusal(segment.registers, ONE) is LaneStep.END_AFTER_LOSS
    assert segment.append(LaneChange(LaneStep.END_AFTER_LOSS, ONE))
    segment.registers = labels.union(segment.registers, labels.label_set({HELD_LABEL: "1", RESTORED_LABEL: "1f"}))
    assert segment.append(begin(NEXT))
    assert not segment.append(LaneChange(LaneStep.END_AFTER_LOSS, ONE))
    assert after_refusal(segment.registers, ONE) is None
    assert after_refusal(segment.registers, NEXT) is LaneStep.END


def test_a_lane_is_reused_only_after_its_end_was_recorded() -> None:
    numbers = iter(range(100))
    pool = LanePool(lambda: ProducerId(bytes([1, 0, 0, 0, 0, next(numbers)])))
    first = LaneUse(pool.take(), "a", 1)
    assert pool.take() != first.producer
    pool.add_ended(first)
    assert pool.take() != first.producer
    assert pool.take_ended() == [first]
    assert pool.take_ended() == []
    assert pool.take() != first.producer
    pool.free([first])
    assert pool.take() == first.producer


@pytest.mark.parametrize("at_once", [1, 32])
def test_reader_state_does_not_grow(at_once: int) -> None:
    assert set(remembered_producers(2_000, at_once=at_once)) == {2 * at_once}


@pytest.mark.parametrize(("name", "value"), [("xyz", "a1.10"), ("010000000001", "a1"), ("010000000001", "a1.z")])
def test_a_register_that_is_not_of_a_lane_is_corrupt(name: str, value: str) -> None:
    with pytest.raises(CorruptData, match="is not a register of a lane"):
        lanes_in(labels.label_set({f"coranto.dev/lane-{name}": value}))
