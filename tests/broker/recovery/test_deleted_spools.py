"""Spools of deleted journals: kept for a while, listed, recovered, and removed."""

from __future__ import annotations

from pathlib import Path

from coranto.effects import LocalDisk
from coranto_broker.recovery.deleted_spools import FOLDER, NOTE, DeletedSpools
from tests.broker.running import ManualClock

J = "test/journal"


def spool(data_dir: Path, revision: int = 7) -> Path:
    folder = data_dir / "spools" / "test_journal-0a" / str(revision)
    folder.mkdir(parents=True)
    (folder / f"{0:016x}.content").write_bytes(b"abc")
    return folder


def test_a_spool_is_kept_for_a_while_and_can_be_recovered(tmp_path: Path) -> None:
    clock = ManualClock()
    deleted = DeletedSpools(tmp_path, LocalDisk(), clock, keep_seconds=60.0)
    folder = spool(tmp_path)
    deleted.take(folder, J, 7)
    assert not folder.exists()
    deleted.sweep()
    (kept,) = deleted
    assert (kept.journal, kept.create_revision, kept.until) == (J, 7, clock.now() + 60)
    deleted.bring_back(kept, folder)
    assert [path.name for path in folder.iterdir()] == [f"{0:016x}.content"]
    assert [*deleted] == []


def test_two_spools_of_one_revision_are_kept_separately(tmp_path: Path) -> None:
    deleted = DeletedSpools(tmp_path, LocalDisk(), ManualClock(), keep_seconds=60.0)
    for _ in range(2):
        deleted.take(spool(tmp_path), J, 7)
    assert sorted(each.path.name for each in deleted) == ["7", "7.2"]
    (tmp_path / FOLDER / "test_journal-0a" / "7" / NOTE).write_text("{}")
    assert [each.path.name for each in deleted] == ["7.2"], "without its time it stays"


def test_spools_are_removed_immediately_if_they_are_not_to_be_kept(tmp_path: Path) -> None:
    deleted = DeletedSpools(tmp_path, LocalDisk(), ManualClock(), keep_seconds=0.0)
    deleted.take(spool(tmp_path), J, 7)
    assert [*deleted] == []
    assert not (tmp_path / FOLDER).exists()
