"""This machine's disk, behind its interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from coranto.effects import LocalDisk, SystemClock

DISK = LocalDisk()


def test_files_are_appended_to_and_can_be_truncated(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    file = DISK.open(path)
    file.write(b"one")
    file.write(memoryview(b"two"))
    assert (file.size(), file.read_at(2, 10), file.read_at(9, 1)) == (6, b"etwo", b"")
    file.truncate(4)
    file.write(b"!")
    file.sync()
    file.close()
    file.close()
    again = DISK.open(path)
    again.write(b"?")
    again.close()
    assert DISK.read(path) == b"onet!?"


def test_a_file_is_replaced_atomically_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    for content in (b"old and long", b"new"):
        DISK.write_atomic(path, content)
        assert DISK.read(path) == content
    assert DISK.list(path.parent) == ["file"]


def test_listing_or_removing_an_absent_path_is_not_an_error(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert DISK.list(nothing) == []
    DISK.remove(nothing)
    DISK.remove_tree(nothing)
    DISK.sync_folder(nothing)
    with pytest.raises(FileNotFoundError):
        DISK.read(nothing)


def test_a_tree_is_removed_without_the_targets_of_its_links(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    DISK.write_atomic(kept / "file", b"content")
    DISK.write_atomic(tmp_path / "tree" / "deep" / "file", b"content")
    (tmp_path / "tree" / "link").symlink_to(kept)
    DISK.remove_tree(tmp_path / "tree")
    assert DISK.list(tmp_path) == ["kept"]
    DISK.rename(kept, tmp_path / "further" / "down")
    assert DISK.read(tmp_path / "further" / "down" / "file") == b"content"


async def test_the_machines_clock_does_not_go_backwards() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0)
    assert clock.monotonic() >= before
