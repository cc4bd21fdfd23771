"""A cache of fragments from stores, in a folder that the processes of a machine share.

The first process that needs a fragment fetches and verifies it, and others wait for that process. The cache never
deletes its folder. Every process that may write to the folder is trusted, so keep the folder private.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from coranto.fragments.fragment import Fragment

DEFAULT_CACHE_BYTES: Final = 8 << 30
_CONTENT: Final = ".content"
_PARTIAL: Final = ".partial"
_LOCK: Final = ".lock"
_IN_MEMORY_BYTES: Final = 64 << 20
"""Content up to this length is decompressed in memory."""
_SPACE_LOCK: Final = "room"
"""The file whose lock is held while making room."""
_MIN_FREE: Final = 0.1
"""The part of the disk that stays free, up to `_MAX_FREE`."""
_MAX_FREE: Final = 4 << 30

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DiskCache:
    """A cache of at most `max_bytes` in `folder`, including files that are being written.

    Evicts the least recently used content first, and removes unfinished files of processes that died.
    """

    folder: Path
    max_bytes: int = DEFAULT_CACHE_BYTES

    def content(self, fragment: Fragment, fill: Callable[[bytearray | mmap.mmap], None]) -> mmap.mmap | None:
        """Return the fragment's content as a read-only memory map; None if there is no room for it.

        If the content is not cached, `fill` writes it to a buffer and verifies it. If `fill` raises, nothing is cached.
        """
        if not fragment.length:
            return None
        name = f"{fragment.begin:016x}-{fragment.end:016x}-{fragment.sum.hex()}"
        kept = self.folder / (name + _CONTENT)
        if (found := _mapped(kept, fragment.length)) is not None:
            return found
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (self.folder / (name + _LOCK)).open("ab")
        except OSError as error:
            _log.warning("disk_cache.unusable", folder=str(self.folder), error=str(error))
            return None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Released when its process dies.
            if (found := _mapped(kept, fragment.length)) is not None:
                return found
            partial = self.folder / (name + _PARTIAL)
            try:
                if not self._reserve(partial, fragment.length):
                    return None
                _fill(partial, fragment.length, fill)
                partial.replace(kept)
            finally:
                partial.unlink(missing_ok=True)
            return _mapped(kept, fragment.length)

    def _reserve(self, partial: Path, length: int) -> bool:
        """Make a file of `length` bytes. Return False if there is no room for it."""
        with (self.folder / _SPACE_LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Later holders count this file.
            partial.unlink(missing_ok=True)
            return self._evict(length) and _allocated(partial, length)

    def _evict(self, length: int) -> bool:
        """Remove content until `length` more bytes fit. Return False if they cannot fit."""
        if length > self.max_bytes:
            return False
        written = sum(self._being_written())  # First: a file that is then completed counts twice, but is never missed.
        kept = sorted(self._kept())
        total = written + sum(size for _, size, _ in kept)
        usage = shutil.disk_usage(self.folder)
        # Not of the total size, because file systems reserve a part of it.
        left = min(int((usage.used + usage.free) * _MIN_FREE), _MAX_FREE)
        spare = min(self.max_bytes - total, usage.free - left)
        for _, size, path in kept:
            if spare >= length:
                break
            path.unlink(missing_ok=True)
            spare += size
        if spare < length:
            _log.warning("disk_cache.no_room", folder=str(self.folder), bytes=length, free=usage.free, left_free=left)
        return spare >= length

    def _kept(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of last use, size and path of all content."""
        for path in self.folder.glob("*" + _CONTENT):
            with contextlib.suppress(FileNotFoundError):  # Another process evicted it.
                status = path.stat()
                yield status.st_mtime_ns, status.st_size, path

    def _being_written(self) -> Iterator[int]:
        """Yield the size of each file that a process writes. Removes files of processes that died."""
        for path in self.folder.glob("*" + _PARTIAL):
            with contextlib.suppress(FileNotFoundError), path.with_suffix(_LOCK).open("ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield path.stat().st_size
                else:
                    path.unlink()


def _mapped(path: Path, length: int) -> mmap.mmap | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != length:
            return None
        with contextlib.suppress(OSError):
            os.utime(descriptor)  # For the eviction order.
        return mmap.mmap(descriptor, length, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _allocated(path: Path, length: int) -> bool:
    """Make a file of `length` bytes. Return False if the disk has no room for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Without an allocation, writing to a mapped file of a full disk would kill the process.
        os.posix_fallocate(descriptor, 0, length)
    except OSError as error:
        _log.warning("disk_cache.write_failed", bytes=length, error=str(error))
        return False
    finally:
        os.close(descriptor)
    return True


def _fill(path: Path, length: int, fill: Callable[[bytearray | mmap.mmap], None]) -> None:
    with path.open("r+b", buffering=0) as file:
        if length > _IN_MEMORY_BYTES:
            with mmap.mmap(file.fileno(), length) as content:
                fill(content)
            return
        # Writing a file with one call takes half the time of writing it page by page.
        made = bytearray(length)
        fill(made)
        written = file.write(made)
        if written != length:
            raise OSError(f"{written} of {length} bytes were written to {path}")
