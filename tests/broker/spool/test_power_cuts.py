"""Power cuts at any instant: no promised content is lost, and planted bugs in spools are caught."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coranto.testing.sim.disk import ProcessDisk
from coranto_broker.spool import commit_check
from coranto_broker.spool.durable_spool import SpoolFolder
from coranto_broker.spool.flush import Flusher
from coranto_broker.spool.shared_file import SharedFile

from .power_cuts import Broken, run

SEEDS = 50
"""The number of spools, with some four power cuts each. `python -m tests.broker.spool.power_cuts` runs 10,000 cuts."""

INTERESTING = {
    "a loss was told",
    "a spool failed and was recovered",
    "a write or sync failed",
    "acknowledged",
    "commits were undone",
    "content came with its proposal",
    "life ended: cut",
    "life ended: cut in write",
    "life ended: fail",
    "life ended: kill",
    "recovery met a sync that failed",
}


def test_no_promised_content_is_lost_in_a_power_cut() -> None:
    seen: Counter[str] = Counter()
    cuts = sum(run(seed, seen) for seed in range(SEEDS))
    assert cuts > 2 * SEEDS
    assert sorted(what for what in INTERESTING if not seen[what]) == []


# -- Planted bugs: one in each of these spools -------------------------------------------------------------------------


def is_caught() -> bool:
    for seed in range(200):
        try:
            run(seed)
        except Broken:
            return True
    return False


def nothing(*_: Any) -> None:
    return None


def test_reading_only_the_last_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_check, "_longest", lambda records, *_: (min(records), None))
    assert is_caught()


def test_trusting_the_sync_after_a_failed_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: SharedFile) -> None:
        self._open().sync()

    monkeypatch.setattr(SharedFile, "sync", sync)
    monkeypatch.setattr(SpoolFolder, "distrust", nothing)
    for name in ("require_sound", "_report_failure"):
        monkeypatch.setattr(Flusher, name, nothing)
    assert is_caught()


def test_trusting_reads_after_a_failed_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpoolFolder, "distrust", nothing)
    assert is_caught()


def test_folders_that_are_not_synced_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync_folder(self: ProcessDisk, folder: Path) -> None:
        return None

    monkeypatch.setattr(ProcessDisk, "sync_folder", sync_folder)
    assert is_caught()


def test_removing_a_log_before_its_successor_is_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def supersede(self: Flusher, log: SharedFile, *, unflushed: bool) -> None:
        log.discard()

    monkeypatch.setattr(Flusher, "supersede", supersede)
    assert is_caught()


def test_dropping_a_fragment_before_the_log_behind_it_is_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flusher, "ensure_flushed", lambda *_: True)
    assert is_caught()
