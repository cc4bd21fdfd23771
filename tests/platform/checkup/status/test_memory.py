"""The last snapshot, kept for the next status."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.checkup.status.memory import load, memory_file, save
from coranto.checkup.status.values import ClusterSnapshot, JournalPlace

LOOK = ClusterSnapshot(100.0, "c1", 50, 3, {"a#1": "0.2.0"}, {"j/1": JournalPlace(1, 2, "a#1")}, ("broker x",))


def test_a_snapshot_is_kept(tmp_path: Path) -> None:
    path = memory_file("c1", {"XDG_STATE_HOME": str(tmp_path)})
    assert path == tmp_path / "coranto" / "status-c1.json.gz"
    assert load(path) is None
    save(path, LOOK)
    assert load(path) == LOOK
    assert path.parent.stat().st_mode & 0o077 == 0


def test_without_the_variable_the_file_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for environment in ({}, {"XDG_STATE_HOME": "relative"}):
        assert memory_file("c1", environment) == tmp_path / ".local/state/coranto/status-c1.json.gz"


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\x1f\x8b\x08\x00", b'{"at": 1}'])
def test_a_damaged_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "status"
    path.write_bytes(content)
    assert load(path) is None
    save(path, LOOK)
    path.write_bytes(path.read_bytes()[: len(content) + 20])
    assert load(path) is None
