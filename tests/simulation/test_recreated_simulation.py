"""Journals that are recreated, and stores that are restored: seeds are sound, and planted bugs are caught."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from coranto.client.read_progress import ReadProgress
from coranto.messages.checkpoints import Source
from coranto_broker.append import fsm
from coranto_broker.recovery import in_sync_records
from coranto_consumers.journals import losses
from coranto_consumers.runtime import recreated

from .coverage import missing
from .recreated import Report, run

SEEDS = 16
INTERESTING = {
    "a journal was created again": 2 * SEEDS,
    "a running shard noticed": 1,
    "a shard continued where content was lost": 4,
    "the store went back": SEEDS,
    "a journal lost messages": SEEDS,
    "a shard had read lost messages": SEEDS // 2,
}


@functools.cache
def report_of(seed: int) -> Report:
    return run(seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    report = report_of(seed)
    assert not report.anomalies, f"seed {seed}: {report.anomalies}"


def test_the_seeds_cover_the_interesting_paths() -> None:
    coverage: Counter[str] = Counter()
    for seed in range(SEEDS):
        coverage += report_of(seed).coverage
    assert missing(coverage, INTERESTING) == {}


def is_caught() -> bool:
    return any(run(seed).anomalies for seed in range(8 * SEEDS))


def test_a_shard_that_compares_no_ids_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadProgress, "expected_id", "")
    monkeypatch.setattr(recreated, "loss_by_id", lambda source, journal, head, found: None)
    assert is_caught()


def test_a_checkpoint_that_keeps_no_ids_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accepted wherever the journal has grown beyond it."""
    real = Source.__init__

    def without(self: Source, *arguments: object, **options: object) -> None:
        real(self, *arguments[:2], **{**options, "journal_id": ""})  # type: ignore[arg-type]

    monkeypatch.setattr(Source, "__init__", without)
    assert is_caught()


def test_brokers_that_give_all_journals_one_id_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_sync_records, "first_id", lambda cluster, create_revision: "one")
    assert is_caught()


def test_a_shard_that_compares_ids_only_at_its_start_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadProgress, "expected_id", "")
    assert is_caught()


def test_a_journal_that_keeps_its_id_after_its_head_was_reset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard then skips the content between the new head and its own offset."""
    monkeypatch.setattr(fsm, "fallen_id", lambda journal_id, offset, revision: journal_id)
    assert is_caught()


def test_a_shard_that_restarts_at_offset_0_after_a_head_reset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the remaining content of its journal a second time."""
    monkeypatch.setattr(losses, "held_through", lambda known, offset, found: 0)
    assert is_caught()
