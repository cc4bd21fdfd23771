"""Fragments shared by the processes of a machine: each is fetched once, and never kept unverified."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import shutil
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from coranto.client import disk_cache
from coranto.client.direct import DirectReader
from coranto.client.disk_cache import DiskCache
from coranto.errors import CorruptFragment
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec, Fragment, sum_of

LENGTH = 1000


def content_of(number: int) -> bytes:
    return bytes([number]) * LENGTH


def fragment_of(number: int, codec: Codec = Codec.ZSTANDARD) -> Fragment:
    content = content_of(number)
    return Fragment("a/journal", LENGTH * number, LENGTH * (number + 1), sum_of(content), codec, "file:///", 1)


class Fetches:
    """Content by fragment, with a count of fetches."""

    def __init__(self, cache: DiskCache) -> None:
        self._cache = cache
        self.count = 0

    def get(self, number: int) -> bytes | None:
        def fill(content) -> None:
            self.count += 1
            content[:] = content_of(number)

        found = self._cache.content(fragment_of(number), fill)
        return None if found is None else bytes(found)


@pytest.mark.parametrize("in_memory_bytes", [LENGTH - 1, LENGTH])
def test_content_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory_bytes: int) -> None:
    monkeypatch.setattr(disk_cache, "_IN_MEMORY_BYTES", in_memory_bytes)
    fetches = Fetches(DiskCache(tmp_path / "new" / "folder"))
    assert [fetches.get(7), fetches.get(7), fetches.get(8)] == [content_of(7), content_of(7), content_of(8)]
    assert fetches.count == 2
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700


def test_threads_that_need_the_same_content_wait_for_the_first(tmp_path: Path) -> None:
    cache, begun, resume, count = DiskCache(tmp_path), threading.Event(), threading.Event(), []

    def fill(content) -> None:
        count.append(1)
        begun.set()
        assert resume.wait(30)
        content[:] = content_of(1)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [pool.submit(cache.content, fragment_of(1), fill) for _ in range(4)]
        assert begun.wait(30)
        resume.set()
        assert [bytes(each.result()) for each in found] == [content_of(1)] * 4
    assert len(count) == 1


def read_in_process(folder: Path, root: Path, go: object) -> bytes:
    go.wait()  # type: ignore[attr-defined]
    return bytes(DirectReader(root, DiskCache(folder)).content(fragment_of(1), "file:///one"))


def test_processes_share_fetched_fragments(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "kept"
    root.mkdir()
    os.mkfifo(root / "one")  # A FIFO can be read only once: a second reader would block forever.
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, concurrent.futures.ProcessPoolExecutor(3, mp_context=context) as pool:
        go = manager.Event()
        found = [pool.submit(read_in_process, folder, root, go) for _ in range(3)]
        go.set()
        (root / "one").write_bytes(compress(Codec.ZSTANDARD, content_of(1)))
        assert [each.result(timeout=60) for each in found] == [content_of(1)] * 3


def test_a_failed_fetch_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)

    def fail(content) -> None:
        content[:10] = b"x" * 10
        raise CorruptFragment("damaged")

    with pytest.raises(CorruptFragment):
        cache.content(fragment_of(1), fail)
    assert not list(tmp_path.glob("*.content")) + list(tmp_path.glob("*.partial"))
    assert Fetches(cache).get(1) == content_of(1)


def test_a_file_of_a_dead_process_is_written_again(tmp_path: Path) -> None:
    fetches = Fetches(DiskCache(tmp_path))
    fetches.get(1)
    [kept] = tmp_path.glob("*.content")
    kept.rename(kept.with_suffix(".partial"))
    kept.with_suffix(".partial").write_bytes(b"the beginning")
    assert fetches.get(1) == content_of(1)
    kept.write_bytes(b"too short")
    assert fetches.get(1) == content_of(1)
    assert fetches.count == 3


def test_the_least_recently_used_content_is_removed(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 3 * LENGTH)
    fetches = Fetches(cache)
    for number in (1, 2, 3):
        fetches.get(number)
        [path] = tmp_path.glob(f"{LENGTH * number:016x}-*.content")
        os.utime(path, (number, number))
    mapped = cache.content(fragment_of(2), lambda content: None)
    fetches.get(1), fetches.get(4)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.content")) == 3 * LENGTH
    assert fetches.count == 4
    fetches.get(1), fetches.get(2), fetches.get(4)
    assert fetches.count == 4
    fetches.get(3)
    assert fetches.count == 5
    assert mapped is not None
    assert bytes(mapped) == content_of(2)


def test_content_being_written_counts_and_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    cache, inner = DiskCache(tmp_path, 3 * LENGTH), []
    fetches = Fetches(cache)
    fetches.get(1)
    [kept] = tmp_path.glob("*.content")
    kept.rename(left := kept.with_suffix(".partial"))  # Left by a process that was killed while writing.

    def fill(content) -> None:
        assert not left.exists()
        fetches.get(3), fetches.get(4)
        inner.extend(path.name for path in tmp_path.glob("*.content"))
        assert fetches.get(5) == content_of(5)
        assert len(list(tmp_path.glob("*.content"))) == 2, "the third one is being written"
        content[:] = content_of(2)

    assert bytes(cache.content(fragment_of(2), fill) or b"") == content_of(2)
    assert len(inner) == 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 3 * LENGTH


def test_content_without_room_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Fetches(DiskCache(tmp_path, LENGTH - 1)).get(1) is None
    usage = namedtuple("usage", "total used free")
    # Half of the disk is reserved by its file system.
    free = 10 * LENGTH + LENGTH - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(200 * LENGTH, 100 * LENGTH - free, free))
    assert Fetches(DiskCache(tmp_path)).get(1) is None
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert Fetches(DiskCache(tmp_path)).get(1) is None
    assert not list(tmp_path.glob("*.content")) + list(tmp_path.glob("*.partial"))


def test_without_a_usable_folder_content_is_not_cached(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "one").write_bytes(compress(Codec.ZSTANDARD, content_of(1)))
    cache = DiskCache(tmp_path / "file" / "folder")
    assert Fetches(cache).get(1) is None
    assert bytes(DirectReader(tmp_path, cache).content(fragment_of(1), "file:///one")) == content_of(1)


def test_damaged_content_is_neither_delivered_nor_kept(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(compress(Codec.ZSTANDARD, content_of(2)))
    with pytest.raises(CorruptFragment, match="not the one in its name"):
        DirectReader(tmp_path, DiskCache(tmp_path / "kept")).content(fragment_of(1), "file:///one")
    assert not list((tmp_path / "kept").glob("*.content"))
