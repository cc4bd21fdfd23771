"""A machine's disk that remembers what the machine forgets.

Written bytes are there for the next process at once (the kernel has them), but only synced ones outlive the machine for
certain: `SimDisk.crash` undoes what was not synced, back to some moment that is the same for all files (or, with
`any_order`, another one for each), and tears the write of that moment. A process may also be killed in the middle of a
write (`kill_in_write`), which leaves a part of it, and the disk may be full.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from coranto.effects import Bytes
from coranto.testing.sim.timeline import Killed, Process, Timeline

_SETTLED_SECONDS = 5.0
"""Removed and renamed files are so on the disk after this time."""


@dataclass(slots=True, eq=False)
class _Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None  # What a crash of the machine leaves for certain; None: not even the name.
    pending: list[tuple[int, int, bytes]] = field(default_factory=list)  # Unsynced: when, position, content.


class SimDisk:
    """One machine's disk. Processes use it through `for_process`."""

    def __init__(
        self, loop: Timeline, rng: random.Random, *, any_order: bool = False, loses_power: bool = True
    ) -> None:
        """With `any_order`, unsynced writes to different files reach the disk in any order.

        Without `loses_power` there will be no `crash`, and what that would undo is not remembered.
        """
        self.full = False
        self.kill_in_write: Callable[[str], bool] | None = None
        self.faulty: Counter[str] = Counter()
        """How many writes met which fault."""
        self._loop = loop
        self._rng = rng
        self._any_order = any_order
        self._loses_power = loses_power
        self._writes = 0
        self._files: dict[str, _Inode] = {}
        self._removed: list[tuple[float, int, str, _Inode]] = []

    def for_process(self, process: Process) -> ProcessDisk:
        return ProcessDisk(self, process)

    def crash(self) -> None:
        """Lose what a loss of power would take. All processes that use the disk must be dead."""
        now, rng = self._loop.time(), self._rng
        pending = [at for inode in self._files.values() for at, *_ in inode.pending]
        common = rng.randint(min(pending, default=self._writes), self._writes)
        for at, number, path, inode in reversed(self._removed):
            undone = rng.random() < 0.3 if self._any_order else number > common
            if undone and at >= now - _SETTLED_SECONDS and path not in self._files:
                self._files[path] = inode
        self._removed.clear()
        for path, inode in list(self._files.items()):
            last = rng.randint(0, self._writes) if self._any_order else common
            kept = [each for each in inode.pending if each[0] <= last]
            self.faulty["lost with the machine"] += len(inode.pending) - len(kept)
            if inode.synced is None and not kept:
                del self._files[path]
                continue
            data = bytearray(inode.synced or b"")
            for number, position, content in kept:
                torn = number == last and len(content) > 1 and rng.random() < 0.7
                self.faulty["torn with the machine"] += torn
                del data[position:]
                data += content[: rng.randrange(len(content))] if torn else content
            inode.data, inode.synced = data, bytes(data)
            inode.pending.clear()

    def names(self, folder: Path) -> list[str]:
        """Names of files and folders in a folder."""
        prefix = f"{folder}/"
        return sorted({path[len(prefix) :].partition("/")[0] for path in list(self._files) if path.startswith(prefix)})

    def content(self, path: Path, *, durable: bool = False) -> bytes | None:
        """A file's bytes (or those that the machine's crash would certainly leave); None when there is none."""
        inode = self._files.get(str(path))
        if inode is None:
            return None
        return inode.synced if durable else bytes(inode.data)

    def size(self, path: Path) -> int:
        inode = self._files.get(str(path))
        return len(inode.data) if inode is not None else 0

    def paths(self) -> list[str]:
        """Every file's path."""
        return sorted(self._files)

    def corrupt(self, path: Path, offset: int) -> None:
        """Change one byte."""
        self._files[str(path)].data[offset] ^= 0xFF

    # -- For processes -------------------------------------------------------------------------------------------------

    def open_inode(self, path: Path) -> _Inode:
        return self._files.setdefault(str(path), _Inode())

    def write(self, process: Process, path: Path, inode: _Inode, data: bytes) -> None:
        process.check_alive()
        if self.full:
            self.faulty["refused, the disk being full"] += 1
            self._append(inode, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        if self.kill_in_write is not None and self.kill_in_write(path.name):
            self.kill_in_write = None
            written = self._rng.choice((0, len(data), self._rng.randrange(len(data) + 1)))
            self.faulty["cut short by a kill"] += written < len(data)
            self._append(inode, data[:written])
            self._loop.note(f"{process.name} dies having written {written} of {len(data)} bytes to {path.name}")
            process.kill()
            raise Killed
        self._append(inode, data)

    def truncate(self, process: Process, inode: _Inode, length: int) -> None:
        process.check_alive()
        if length < len(inode.data):
            del inode.data[length:]
            self._remember(inode, length, b"")

    def sync(self, process: Process, inode: _Inode) -> None:
        process.check_alive()
        if not self._loses_power:
            return
        inode.synced = bytes(inode.data)
        inode.pending.clear()

    def put(self, process: Process, path: Path, data: bytes) -> None:
        process.check_alive()
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        self._files[str(path)] = _Inode(bytearray(data), bytes(data))

    def rename(self, process: Process, source: Path, target: Path) -> None:
        process.check_alive()
        prefix = f"{source}/"
        moved = [path for path in list(self._files) if path == str(source) or path.startswith(prefix)]
        if not moved:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(source))
        for path in moved:
            self._files[f"{target}{path[len(str(source)) :]}"] = self._files.pop(path)

    def remove(self, process: Process, path: Path) -> None:
        process.check_alive()
        inode = self._files.pop(str(path), None)
        if inode is not None and self._loses_power:
            self._writes += 1
            self._removed.append((self._loop.time(), self._writes, str(path), inode))

    def remove_tree(self, process: Process, folder: Path) -> None:
        process.check_alive()
        prefix = f"{folder}/"
        for path in [path for path in list(self._files) if path.startswith(prefix)]:
            self.remove(process, Path(path))

    def _append(self, inode: _Inode, data: bytes) -> None:
        self._remember(inode, len(inode.data), data)
        inode.data += data

    def _remember(self, inode: _Inode, position: int, data: bytes) -> None:
        if self._loses_power:
            self._writes += 1
            inode.pending.append((self._writes, position, data))


class ProcessDisk:
    """The disk as one process has it: a `coranto.effects.Disk`."""

    def __init__(self, disk: SimDisk, process: Process) -> None:
        self._disk = disk
        self._process = process

    def open(self, path: Path) -> ProcessFile:
        self._process.check_alive()
        return ProcessFile(self._disk, self._process, path)

    def read(self, path: Path) -> bytes:
        self._process.check_alive()
        content = self._disk.content(path)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return content

    def write_atomic(self, path: Path, data: bytes) -> None:
        self._disk.put(self._process, path, data)

    def list(self, folder: Path) -> list[str]:
        self._process.check_alive()
        return self._disk.names(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._disk.rename(self._process, source, target)

    def remove(self, path: Path) -> None:
        self._disk.remove(self._process, path)

    def remove_tree(self, folder: Path) -> None:
        self._disk.remove_tree(self._process, folder)


class ProcessFile:
    """An open file: a `coranto.effects.DiskFile`."""

    def __init__(self, disk: SimDisk, process: Process, path: Path) -> None:
        self._disk = disk
        self._process = process
        self._path = path
        self._inode = disk.open_inode(path)

    def write(self, data: Bytes) -> None:
        self._disk.write(self._process, self._path, self._inode, bytes(data))

    def read_at(self, offset: int, length: int) -> bytes:
        self._process.check_alive()
        return bytes(self._inode.data[offset : offset + length])

    def truncate(self, length: int) -> None:
        self._disk.truncate(self._process, self._inode, length)

    def size(self) -> int:
        self._process.check_alive()
        return len(self._inode.data)

    def sync(self) -> None:
        self._disk.sync(self._process, self._inode)

    def close(self) -> None:
        """Nothing is held."""
