"""Small interfaces to the outside world (clock, disk, randomness), which a simulation can replace.

Protocol code receives these at construction. It never reads a clock or accesses a disk directly.
The coordination service, transports and object stores have interfaces of their own
(`coranto.coordination`, `coranto.client`, `coranto.fragments.stores`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

Bytes: TypeAlias = bytes | memoryview
"""Content that is never modified. A memoryview keeps its whole underlying buffer alive."""

Entropy: TypeAlias = Callable[[int], bytes]
"""Returns the given number of unpredictable random bytes, as `os.urandom` does."""


class Clock(Protocol):
    """Reads time and waits."""

    def now(self) -> float:
        """Return the wall time, in seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary origin. They never decrease, and continue while the machine sleeps."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`; cancellable."""
        ...


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
"""The clock that continues while the machine sleeps. On Linux CLOCK_MONOTONIC stops then."""


class SystemClock:
    """The machine's clock.

    `monotonic` continues while the machine sleeps, as leases do. `sleep` may not.
    """

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class DiskFile(Protocol):
    """An open file. Written bytes survive the end of the process immediately, and power loss only after `sync`."""

    def write(self, data: Bytes) -> None:
        """Append all of `data` at the end of the file."""
        ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes from byte `offset`; fewer only at the end of the file."""
        ...

    def truncate(self, length: int) -> None:
        """Cut the file to `length` bytes. The next write appends there."""
        ...

    def size(self) -> int: ...

    def sync(self) -> None:
        """Return once written bytes survive power loss."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A tree of files."""

    def open(self, path: Path) -> DiskFile:
        """Open a file for reading and appending. Create it, with its parent folders, when it is absent."""
        ...

    def read(self, path: Path) -> bytes:
        """Return the whole content of a file. Raises FileNotFoundError."""
        ...

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Replace a file. A reader, or a later process, finds the old content or the new, never a mixture.

        When it returns, the new content survives power loss.
        """
        ...

    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; empty when the folder is absent."""
        ...

    def free_bytes(self, folder: Path) -> int:
        """Return the free space on the disk that holds a folder, or that will hold it."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Move a file or folder, and create the target's parent folder. A file at the target is replaced."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; no error when it is absent."""
        ...

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder and everything below it; no error when it is absent."""
        ...

    def sync_folder(self, folder: Path) -> None:
        """Return once creations, renames and removals of entries in `folder` survive power loss.

        To make the folder's own entry survive, sync its parent. No error when the folder is absent.
        """
        ...


class LocalFile:
    """A file of this machine. Unbuffered: written bytes are in the kernel, and survive `kill -9`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end = os.fstat(self._fd).st_size

    def write(self, data: Bytes) -> None:
        written = os.pwrite(self._fd, data, self._end)
        self._end += written
        if written < len(data):  # A short write, which is rare.
            self.write(memoryview(data)[written:])

    def read_at(self, offset: int, length: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)
        self._end = length

    def size(self) -> int:
        return self._end

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalDisk:
    """This machine's file system."""

    def open(self, path: Path) -> LocalFile:
        return LocalFile(path)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_atomic(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        self.sync_folder(path.parent)

    def free_bytes(self, folder: Path) -> int:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def list(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def rename(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, folder: Path) -> None:
        for name in self.list(folder):
            child = folder / name
            if child.is_dir() and not child.is_symlink():
                self.remove_tree(child)
            else:
                child.unlink(missing_ok=True)
        if folder.exists():
            folder.rmdir()

    def sync_folder(self, folder: Path) -> None:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):  # Another user created this folder.
            return
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # The file system does not support or need fsync of folders.
                raise
        finally:
            os.close(fd)
