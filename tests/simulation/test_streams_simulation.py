"""Thousands of transactions on simulated streams, and planted bugs for the checker to find.

In every run, `tests.simulation.streams.checker` and `.follower` check T1 (all or nothing), T2 (contiguous), T3
(invisible before), T4 (read back), T10 (lost answers), T11 (another process continues), T12 (of any size), T13 (sealed,
split and merged), T14 (in order with plain events), T20 (conditional) and T23 (pipelined).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from coranto.client.append.prepared import PreparedAppend
from coranto.errors import CorantoError
from coranto.messages.uuids import Flags, build_uuid
from coranto.streams.model import registers
from coranto.streams.model.registers import Advances, Conditions
from coranto.streams.writer.gaps import Gaps
from coranto.streams.writer.routing import Routing
from coranto.streams.writer.segment_writer import SegmentWriter
from coranto.streams.writer.sending import Sender
from coranto.streams.writer.units import Attempt
from coranto.wire import protocol_pb2 as pb
from tests.sampling import sampled

from .coverage import PLANTED_SEEDS, finds_anomaly, missing, seeds_until
from .streams.boundaries import MESSAGES
from .streams.options import lost_answers_options_of, options_of
from .streams.run import run

SEEDS = 11
"""`python -m tests.simulation.streams --seeds 44` has ten thousand transactions."""
WANTED = {
    "the stream was scaled": 7,
    "segments": 35,
    "a commit was read back": 250,
    "a unit was deduplicated": 5,
    "a program goes on in another process": 5,
    "a program goes on in the same process": 1,
    "a program was taken for dead": 1,
    "waiting for a commit was cancelled": 25,
    "a transaction was aborted": 12,
    "a transaction was timed out": 12,
    "a transaction was left by an exception": 12,
    "a fence held": 2,
    "failed: PreconditionFailed (not_applied)": 12,
    "failed: WriterFenced (not_applied)": 1,
    "failed: WriterExpired (not_applied)": 1,
    **{f"break {side} {message}": 1 for side in ("before", "after") for message in MESSAGES},
}


@pytest.mark.timeout(1500)
def test_thousands_of_transactions_are_whole_once_and_in_order() -> None:
    total: Counter[str] = Counter()
    for seed in seeds_until(SEEDS, total, WANTED):
        report = run(options_of(seed))
        assert report.sound, str(report)
        total += report.coverage + report.outcomes
    assert missing(total, WANTED) == {}
    assert total["transaction ok"] + total["transaction unknown"] >= 2_500
    for act in ("cut", "kill broker", "kill writer", "move primary", "usurp"):
        assert sum(count for name, count in total.items() if name.startswith(act)), act


def test_t10_faults_in_every_append_duplicate_and_lose_nothing() -> None:
    """The full check of T10 is `python -m tests.simulation.streams --lost-answers --seeds 10000`."""
    total: Counter[str] = Counter()
    for seed in range(20):
        report = run(lost_answers_options_of(seed))
        assert report.sound, str(report)
        total += report.coverage + report.outcomes
    assert total["transaction ok"] > 100
    lost = ("after commit", "after end", "before response", "before status")
    assert sum(count for name, count in total.items() if name.endswith(lost)) >= 10


def test_writers_beyond_the_limit_continue() -> None:
    """Writers that evict each other get many answers about registers. Answers to earlier attempts are outdated."""
    overbooked = {"writers": 2, "stable": 0, "max_writers": 1, "segments": 1, "keys": 12}
    total: Counter[str] = Counter()
    for seed in range(10):
        report = run(options_of(seed, units=60, in_flight=2, seconds=3.0, harm=0.1, **overbooked))
        assert report.sound, str(report)
        total += report.outcomes
    assert total["transaction ok"] > 500


def test_a_seed_is_reproducible() -> None:
    one, again, other = run(options_of(7)), run(options_of(7)), run(options_of(8))
    assert (one.digest, one.steps) == (again.digest, again.steps)
    assert one.digest != other.digest


@pytest.mark.parametrize("sizes", sampled([(1 << 16, 40), ((4 << 20) - 1000, 8)], 2))
def test_large_transactions_are_sound(sizes: tuple[int, int]) -> None:
    largest, units = sizes
    large = {"largest": largest, "units": units, "writers": 2, "stable": 1, "harm": 0.5, "scale_seconds": 0.7}
    wanted = f"a unit of more than {'8 MiB' if units == 8 else '64 KiB'}"
    total: Counter[str] = Counter()
    for seed in range(3, 33):  # One in five has a unit of that size.
        report = run(options_of(seed, brokers=2, faults=(), **large))
        assert report.sound, str(report)
        total += report.coverage
        if total[wanted]:
            break
    assert total[wanted]
    assert sum(count for name, count in total.items() if name.startswith("break"))


# -- Planted bugs ------------------------------------------------------------------------------------------------------


def caught(*names: str, first: int = 0, seeds: int = PLANTED_SEEDS, **options: Any) -> bool:
    given: dict[str, Any] = {"brokers": 2, "replication": 1, "faults": (), "readers": 0, "units": 60, "writers": 2}
    return finds_anomaly(names, lambda seed: run(options_of(seed, **given | options)), first, seeds)


def aborted(append: PreparedAppend) -> pb.AppendRequest:
    """Abort a prepared append, and return its parameters."""
    append.abort()
    return append._parameters


HARD = {"harm": 0.4, "in_flight": 4, "window": 16, "keys": 2, "stable": 0, "scale_seconds": 0.0}


def test_there_is_no_anomaly_without_planted_bugs() -> None:
    for seed in range(2):
        report = run(options_of(seed, brokers=2, replication=1, faults=(), readers=0, units=60, writers=2, **HARD))
        assert report.sound, str(report)


def test_appends_that_check_no_register_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = registers.advance

    def careless(*args: Any) -> Conditions:
        return checked(*args)._replace(check=pb.LabelSelector())

    def unchecked(self: Advances, before: str, after: str) -> pb.AppendRequest:
        parameters = pb.AppendRequest()
        parameters.CopyFrom(self._template)
        parameters.union_registers.labels[0].value = after
        return parameters

    monkeypatch.setattr(registers, "advance", careless)
    monkeypatch.setattr(Advances, "parameters", unchecked)
    assert caught("duplicate", "reordered", "lost", "clock", **HARD)


def test_blindly_repeated_appends_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sender._append

    async def blind(self: Sender, attempt: Attempt) -> None:
        if attempt.append is None:
            await right(self, attempt)
            return
        union = aborted(attempt.append).union_registers
        try:
            attempt.result = await self._shared.client.append(
                self._reconciler.segment.journal, attempt.content, union_registers=union, retry_unknown=True
            )
        except CorantoError as error:
            attempt.error = error

    monkeypatch.setattr(Sender, "_append", blind)
    assert caught("duplicate", **HARD)


def test_keys_that_move_to_a_successor_too_early_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_predecessors(*_: Any) -> None:
        """Do not wait."""

    def route(self: Routing, key_hash: int) -> SegmentWriter:
        superseded, self._superseded = self._superseded, []
        try:
            return right(self, key_hash)
        finally:
            self._superseded = superseded

    right = Routing.route
    monkeypatch.setattr(Routing, "wait_for_predecessors", wait_for_predecessors)
    monkeypatch.setattr(Routing, "route", route)
    assert caught("reordered", first=40, **HARD | {"scale_seconds": 0.3, "harm": 0.2})


def test_sequences_applied_above_a_gap_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    options = HARD | {"harm": 0.6, "stable": 2, "scale_seconds": 0.7, "faults": ("pause",)}
    assert not caught("lost", seeds=16, **options)
    monkeypatch.setattr(Gaps, "first_before", lambda *_: None)
    assert caught("lost", **options)


def test_registers_that_change_without_their_content_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Sender._append

    async def in_two(self: Sender, attempt: Attempt) -> None:
        if attempt.append is None:
            await right(self, attempt)
            return
        client, shared, parameters = self._shared.client, self._shared, aborted(attempt.append)
        nothing = shared.events.acknowledgement(
            build_uuid(shared.identity.producer, attempt.first_clock, Flags.ACK_TXN)
        )
        try:
            await client.append(
                self._reconciler.segment.journal,
                nothing,
                check_registers=parameters.check_registers,
                union_registers=parameters.union_registers,
                subtract_registers=parameters.subtract_registers,
            )
            attempt.result = await client.append(self._reconciler.segment.journal, attempt.content)
        except CorantoError as error:
            attempt.error = error
            attempt.doubtful = True

    monkeypatch.setattr(Sender, "_append", in_two)
    assert caught("lost", **HARD)
