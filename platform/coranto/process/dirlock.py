"""Exclusive use of a directory by one process.

The process flock()s a lock file, so the kernel releases the lock however the process ends. The file has the process id,
for the error message of a second process.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from coranto.errors import DirectoryInUse

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def directory_id(directory: Path) -> str:
    """Return a name for a directory that is unique among all machines, until this machine restarts.

    Creates the directory if it is absent. Only one process can lock the directory of this name at a time. A copy of the
    directory has another name.
    """
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    directory.mkdir(parents=True, exist_ok=True)
    found = directory.stat()
    return f"{boot}/{found.st_dev:x}:{found.st_ino:x}"


class DirectoryLock:
    """Locks `directory` (created if absent) from construction to `close`. Raises DirectoryInUse.

    A directory that is created here is accessible to its owner only, because others need a token to read its content.
    """

    def __init__(self, directory: Path, *, name: str = "lock") -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = directory / name
        # The descriptor is not inheritable, so that a child cannot hold the lock after its parent's end.
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            self._fd = -1
            raise DirectoryInUse(directory, int(holder) if holder.isdigit() else None) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
