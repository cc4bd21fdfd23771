"""Reader groups and transactions on several keys in the simulation of streams, and planted bugs for it to find."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from coranto.streams.control.decisions import Decisions, Gate
from coranto.streams.control.transaction_ends import LaneEnd
from coranto.streams.groups.group_reader import GroupReader
from coranto.streams.groups.group_state import CheckpointPassed, GroupState, Positions, Released
from coranto.streams.model import lanes
from coranto.streams.model.frontier import Completion, Frontier
from coranto.streams.model.lanes import LaneChange, LaneStep
from coranto.streams.model.positions import SegmentPosition
from coranto.streams.model.stream import Stream
from coranto.streams.writer.multi_key.writer import MultiKeyWriter

from .coverage import finds_anomaly, missing, seeds_until
from .streams.options import shared_options_of
from .streams.run import run

SEEDS = 7
WANTED = {
    "group: a checkpoint was complete": 20,
    "group: a reader died": 3,
    "group: a reader left": 10,
    "group: a reader was told that it is out": 2,
    "group: a segment was completed": 10,
    "group: a segment was released": 5,
    "group: a segment was taken up by another one": 2,
    "group: events came again after a death": 2,
    "several keys: a commit was read back": 20,
    "several keys: in several segments": 80,
    "several keys: the writer died, and it was committed": 2,
    "several keys: the writer died, and it was dropped": 10,
    "the stream was scaled": 5,
}


@pytest.mark.timeout(900)
def test_reader_groups_and_transactions_on_several_keys_are_sound() -> None:
    total: Counter[str] = Counter()
    for seed in seeds_until(SEEDS, total, WANTED):
        report = run(shared_options_of(seed))
        assert report.sound, str(report)
        total += report.coverage
    assert missing(total, WANTED) == {}


# -- Planted bugs ------------------------------------------------------------------------------------------------------


FEW: dict[str, Any] = {"brokers": 2, "replication": 1, "faults": (), "readers": 0, "units": 8, "writers": 1}


def caught(*names: str, first: int = 0, **options: Any) -> bool:
    return finds_anomaly(names, lambda seed: run(shared_options_of(seed, **FEW | options)), first)


SEVERAL = {"movers": 2, "moves": 30, "members": 0, "harm": 0.2, "window": 4, "segments": 3, "sealed": True}
GROUP = {"movers": 1, "moves": 20, "members": 3, "units": 30, "harm": 0.0, "scale_seconds": 0.7, "sealed": True}


@pytest.mark.parametrize("options", [SEVERAL, GROUP], ids=["several keys", "a group"])
def test_there_is_no_anomaly_without_planted_bugs(options: dict[str, Any]) -> None:
    report = run(shared_options_of(0, **FEW | options))
    assert report.sound, str(report)


def test_decisions_that_ignore_the_gate_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def decide(self: Decisions, txn: str, acks: Mapping[str, bytes], token: str, **options: Any) -> None:
        gate = await self.gate()
        await right(self, txn, acks, gate.token or token, **options)

    right = Decisions.decide
    monkeypatch.setattr(Decisions, "decide", decide)
    assert caught("partial", "undelivered", "lost", **SEVERAL | {"scale_seconds": 0.2, "harm": 0.0})


def test_unfinished_decisions_of_dead_writers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def finish(self: Decisions, gate: Gate) -> int:
        return 0

    monkeypatch.setattr(Decisions, "finish", finish)
    assert caught("partial", "undelivered", first=1, **SEVERAL)


def test_a_decision_treated_as_failed_after_a_lost_answer_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def was_decided(self: Decisions, txn: str, begin: int) -> bool:
        return False

    monkeypatch.setattr(Decisions, "was_decided", was_decided)
    assert caught("undelivered", "duplicate", "phantom", "partial", first=11, **SEVERAL | {"harm": 0.4})


def test_acknowledgements_before_the_decision_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def append(self: MultiKeyWriter[Any], part: Any) -> Any:
        found = await right(self, part)
        await self._acknowledge(part)
        return found

    right = MultiKeyWriter._append
    monkeypatch.setattr(MultiKeyWriter, "_append", append)
    assert caught("undecided", "partial", **SEVERAL)


def slow_recovery(patch: pytest.MonkeyPatch) -> None:
    """Let processes that recover the stream stall after they have read the decisions."""

    async def acknowledge(self: Decisions, journal: str, ends: list[LaneEnd], settled: int) -> None:
        await asyncio.sleep(3.0)
        await right(self, journal, ends, settled)

    right = Decisions._acknowledge
    patch.setattr(Decisions, "_acknowledge", acknowledge)


def test_late_acknowledgements_that_end_another_transaction_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(changes: Iterable[LaneChange]) -> dict[str, Any]:
        given = list(changes)
        found = lanes.parameters(given)
        if any(change.step is LaneStep.END for change in given):
            found.pop("check_registers")
        return found

    slow_recovery(monkeypatch)
    for seed in range(2):
        report = run(shared_options_of(seed, **FEW | SEVERAL))
        assert report.sound, str(report)
    monkeypatch.setattr("coranto.streams.control.transaction_ends.parameters", careless)
    monkeypatch.setattr("coranto.streams.writer.multi_key.writer.parameters", careless)
    assert caught("lost", "partial", "undelivered", **SEVERAL | {"harm": 0.4, "moves": 60})


def test_readers_that_record_read_instead_of_consumed_events_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def advances(self: GroupReader[Any], state: GroupState) -> Positions:
        sources = self._pool.sources
        return {number: sources[number].position for number in state.owned_by(self.id) if number in sources}

    monkeypatch.setattr(GroupReader, "_advances", advances)
    assert caught("group-skipped", first=3, **GROUP)


def test_segments_released_at_their_acquired_positions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: Released, state: GroupState) -> GroupState:
        begun = {number: state.frontier.open[number] for number in self.positions}
        return right(replace(self, positions=begun), state)

    right = Released.apply
    monkeypatch.setattr(Released, "apply", apply)
    assert caught("group-again", "group-state", **GROUP | {"scale_seconds": 0.0, "segments": 3})


def test_successors_read_before_all_predecessors_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def completion(self: Frontier, number: int, end: int, stream: Stream) -> Completion:
        found = right(self, number, end, stream)
        begins = {each: stream.segments[each].begin for each in found.waiting}
        opened = {each: begin for each, begin in (found.opened | begins).items() if each not in self.open}
        return replace(found, opened=opened, waiting={})

    right = Frontier.completion
    monkeypatch.setattr(Frontier, "completion", completion)
    assert caught("group-state", "group-reordered", **GROUP)


def test_checkpoints_passed_at_former_positions_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: CheckpointPassed, state: GroupState) -> GroupState:
        return right(replace(self, positions=state.owned_by(self.reader)), state)

    right = CheckpointPassed.apply
    monkeypatch.setattr(CheckpointPassed, "apply", apply)
    assert caught("group-checkpoint", "group-state", **GROUP)


def test_positions_that_cover_uncommitted_messages_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(self: GroupReader[Any], state: GroupState) -> Positions:
        return {number: SegmentPosition(at.offset, (), at.complete) for number, at in right(self, state).items()}

    right = GroupReader._advances
    monkeypatch.setattr(GroupReader, "_advances", bare)
    assert caught("group-unread", "group-skipped", **GROUP | {"moves": 60, "units": 1, "congestion": 0.1, "window": 16})
