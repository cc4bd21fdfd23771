"""Real consumers in the simulated world: seeds are sound and cover the interesting paths, planted bugs are caught."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coranto.messages import Checkpoint, Envelope, ProducerId, ProducerState, Pruning, Sequencer, Source
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.runtime.appends import OrderedAppends
from coranto_consumers.runtime.intake import Intake
from coranto_consumers.stores import JsonFileStore
from tests.sampling import sampled
from tests.simulation.consumers.application import WatchedStore
from tests.simulation.consumers.database import DatabaseFaults, SimDatabase, SimSqlStore
from tests.simulation.consumers.options import FAULTS, options_of
from tests.simulation.consumers.run import Prepare, Report, run
from tests.simulation.consumers.world import ConsumerWorld

from .coverage import finds_anomaly, missing, seeds_until

SEEDS = 24

INTERESTING = {
    *(f"fault: {fault}" for fault in FAULTS),
    "a consumer exited gracefully",
    "a consumer lost its lease or etcd",
    "a message was delivered again",
    "a producer repeated an append",
    "a producer's clock was off by a day or more",
    "a producer's transaction was abandoned",
    "a producer's transaction was committed",
    "a producer's transaction was rolled back",
    "json: a later owner restored what an earlier one had committed",
    "log: recorder.failed",
    "log: recovery_log.played",
    "log: shard.restarting",
    "log: sqlite_store.copied",
    "sql: a later owner restored what an earlier one had committed",
    "sqlite: a later owner restored what an earlier one had committed",
}
"""Paths that some run must take, so that the others prove something."""


@functools.cache
def report_of(seed: int) -> Report:
    return run(options_of(seed))


@pytest.mark.parametrize("seed", sampled(range(SEEDS), 2))
def test_seed(seed: int) -> None:
    report = report_of(seed)
    assert report.sound, f"\n{report}"


def test_the_seeds_cover_the_interesting_paths() -> None:
    wanted = dict.fromkeys(INTERESTING, 1)
    coverage: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in seeds_until(SEEDS, coverage, wanted):
        report = report_of(seed)
        assert report.sound, f"\n{report}"
        coverage += report.coverage
        outcomes += report.outcomes
    assert missing(coverage, wanted) == {}
    assert outcomes["effects"] > 20 * SEEDS


def test_a_commit_unknown_to_its_owner_counts_once() -> None:
    def kill_during_commit(world: ConsumerWorld) -> None:
        for machine in world.consumers:
            machine.at_step["commit"] = functools.partial(world.loop.later, 0.0001, machine.kill)

    options = options_of(1, shards=("sql",), inputs=1, sources=((0,),), faults=(), broker_faults=())
    report = run(options, prepare=kill_during_commit)
    assert report.sound, f"\n{report}"
    assert report.coverage["a commit took place and its owner never knew"]


def test_a_run_is_reproducible_in_another_process() -> None:
    code = (
        "from tests.simulation.consumers.options import options_of\n"
        "from tests.simulation.consumers.run import run\n"
        "report = run(options_of(4, transactions=3, seconds=5.0))\n"
        "print(report.digest, report.steps)\n"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    here = run(options_of(4, transactions=3, seconds=5.0))
    assert there == f"{here.digest} {here.steps}"
    assert report_of(5).digest != here.digest


def test_a_failure_prints_its_replay_command() -> None:
    report = run(options_of(3, transactions=1, seconds=1.0), prepare=lambda world: world.problems.append("made up"))
    assert not report.sound
    assert "python -m tests.simulation.consumers --seed 3" in str(report)
    assert "max_txn_seconds=" in str(report)


# -- Planted bugs: each of these consumers has one bug, and the checker names its effect ----------------------------


def is_caught(*names: str, prepare: Prepare | None = None, **options: Any) -> bool:
    given = {"broker_faults": (), "consumers": 3, "lease_seconds": 2.0, "inputs": 1, "sources": ((0,),), **options}
    return finds_anomaly(names, lambda seed: run(options_of(seed, **given), prepare=prepare))


def test_acknowledgements_before_the_commit_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OrderedAppends.add

    def without_waiting(self: OrderedAppends, journal: str, content: bytes, **_: object) -> Any:
        return real(self, journal, content)

    monkeypatch.setattr(OrderedAppends, "add", without_waiting)
    assert is_caught("early-ack", shards=("sql",), faults=())


def test_acknowledgements_not_repeated_after_a_takeover_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WatchedStore.restore_checkpoint

    async def forget(self: WatchedStore, shard: str) -> Checkpoint:
        return Checkpoint((await real(self, shard)).sources)

    monkeypatch.setattr(WatchedStore, "restore_checkpoint", forget)

    def kill_before_acknowledging(world: ConsumerWorld) -> None:
        for machine in world.consumers:
            machine.at_step["acknowledge"] = machine.kill

    assert is_caught("missing-ack", shards=("sql",), faults=(), prepare=kill_before_acknowledging)


def test_a_database_without_a_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDatabase, "checks_fences", False)
    assert is_caught("zombie-commit", shards=("sql",), faults=("zombie",))


def test_a_recorder_that_ignores_its_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its recording after a takeover is at a wrong offset, and thus lost, although it is confirmed.
    async def append(self: Recorder, groups: Sequence[Any]) -> None:
        pieces = [piece for group in groups for piece in group.pieces]
        if pieces:
            await self._client.append(self.log, pieces, retry_unknown=True)

    monkeypatch.setattr(Recorder, "_append", append)
    assert is_caught("lost-commit", "zombie-commit", shards=("json",), faults=("zombie",))


def test_a_store_that_confirms_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = JsonFileStore.start_commit

    async def without_waiting(
        self: JsonFileStore[Any], shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        await real(self, shard, checkpoint, wait_for)

        async def done() -> None:
            """Do not wait for the log."""

        return done()

    monkeypatch.setattr(JsonFileStore, "start_commit", without_waiting)
    assert is_caught(
        "lost-commit", "stray-ack", "output-of-nothing", shards=("json",), faults=("kill consumer", "zombie")
    )


def test_checkpoints_without_producers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Intake.checkpoint

    def forgetful(self: Intake[Any], pruning: Pruning) -> dict[str, Source]:
        return {journal: Source(source.read_through) for journal, source in real(self, pruning).items()}

    monkeypatch.setattr(Intake, "checkpoint", forgetful)
    assert is_caught(
        "lost-message", "duplicate-delivery", shards=("sql",), max_txn_seconds=0.05, faults=("move shard",)
    )


def test_pruning_of_producers_by_the_newest_clock_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def prune(
        self: Pruning, journal: str, producers: Mapping[ProducerId, ProducerState], read_through: int
    ) -> dict[ProducerId, ProducerState]:
        newest = max((state.last_ack for state in producers.values()), default=0)
        oldest = newest - (int(self.horizon_s * 10_000_000) << 4)
        return {producer: state for producer, state in producers.items() if state.last_ack >= oldest}

    monkeypatch.setattr(Pruning, "prune", prune)
    options = {"shards": ("sql",), "max_txn_seconds": 0.05, "faults": (), "producer_skews": (0.0, 1.1 * 24 * 3600)}
    assert is_caught("lost-message", **options)
    assert is_caught("duplicate-delivery", **options)


def test_pruning_of_open_transactions_by_their_clocks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Pruning.forgets

    def forgets(self: Pruning, state: ProducerState, read_through: int, first_offset: int = 0) -> bool:
        return real(replace(self, distance=0), replace(state, begin=-1), read_through)

    monkeypatch.setattr(Pruning, "forgets", forgets)
    skews = (0.0, -1.1 * 24 * 3600)
    assert is_caught("lost-message", shards=("sql",), max_txn_seconds=0.05, faults=(), producer_skews=skews)


def test_delivery_of_rolled_back_messages_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sequencer._queue_ack

    def commit_all(self: Sequencer[Any], envelope: Envelope[Any], partial: Any) -> Any:
        return real(self, envelope._replace(clock=max(envelope.clock, partial.top)), partial)

    monkeypatch.setattr(Sequencer, "_queue_ack", commit_all)
    assert is_caught("aborted-delivery", shards=("sql",), faults=(), transactions=14)


def test_blindly_repeated_commits_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimSqlStore, "retries_blindly", True)

    def lose_answers(world: ConsumerWorld) -> None:
        world.database.faults = DatabaseFaults(lose_answer=0.1)

    assert is_caught("duplicate-commit", shards=("sql",), faults=(), prepare=lose_answers)
