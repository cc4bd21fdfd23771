"""A machine's disk, which survives processes, and power losses of the machine.

Written bytes and new names are visible to the next process at once (the kernel has them). But only synced changes are
certain to survive a loss of power: `SimDisk.crash` undoes any part of the rest (`coranto.testing.sim.power`). Also, a
process may be killed in the middle of a write (`kill_in_write`), which leaves a part of it; the disk may be full; and
syncs may fail, after which processes see content that the disk will never have.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from coranto.effects import Bytes
from coranto.testing.sim.power import Inode, NameChange, Names, PowerLoss
from coranto.testing.sim.timeline import Killed, Process, Timeline


class SimDisk:
    """One machine's disk. Processes use it through `for_process`."""

    def __init__(self, loop: Timeline, rng: random.Random, *, loses_power: bool = True) -> None:
        """Create a disk. Without `loses_power`, `crash` is never called, and unsynced changes are not recorded."""
        self.full = False
        self.kill_in_write: Callable[[str], bool] | None = None
        self.fail_sync: Callable[[str], bool] | None = None
        """A function that returns True if the sync of a file or folder, given by name, is to fail."""
        self.before_sync: Callable[[str], object] = lambda name: None
        """Called with the name of a file or folder before each sync takes effect."""
        self.faulty: Counter[str] = Counter()
        """The number of writes that met each fault."""
        self._loop = loop
        self._rng = rng
        self._loses_power = loses_power
        self._moment = 0
        self._files: dict[str, Inode] = {}
        self._names = Names()

    def for_process(self, process: Process) -> ProcessDisk:
        return ProcessDisk(self, process)

    def crash(self, kind: str = "") -> None:
        """Simulate a `PowerLoss` of that kind. All processes that use the disk must be dead."""
        firsts = [inode.changes[0].number for inode in self._files.values() if inode.changes]
        if self._names.first is not None:
            firsts.append(self._names.first)
        loss = PowerLoss(self._rng, min(firsts, default=self._moment + 1) - 1, self._moment, kind)
        self._files = self._names.lose(loss)
        for inode in dict.fromkeys(self._files.values()):
            self.faulty["lost with the machine"] += inode.lose(loss)
        self.faulty["torn with the machine"] += loss.torn

    def names(self, folder: Path) -> list[str]:
        """Return the names of files and folders in a folder."""
        prefix = f"{folder}/"
        return sorted({path[len(prefix) :].partition("/")[0] for path in list(self._files) if path.startswith(prefix)})

    def content(self, path: Path, *, durable: bool = False) -> bytes | None:
        """Return a file's bytes; None if there is no file. With `durable`, return what certainly survives a crash."""
        inode = self._files.get(str(path))
        if inode is None:
            return None
        if not durable:
            return bytes(inode.data)
        return inode.durable if self._names.holds(str(path), inode) else None

    def size(self, path: Path) -> int:
        inode = self._files.get(str(path))
        return len(inode.data) if inode is not None else 0

    def paths(self) -> list[str]:
        """Return the paths of all files."""
        return sorted(self._files)

    def corrupt(self, path: Path, offset: int) -> None:
        """Change one byte."""
        self._files[str(path)].data[offset] ^= 0xFF

    # -- For processes -------------------------------------------------------------------------------------------------

    def open_inode(self, path: Path) -> Inode:
        inode = self._files.get(str(path))
        if inode is None:
            inode = self._files[str(path)] = Inode()
            self._rename(inode, new=str(path))
        return inode

    def write(self, process: Process, path: Path, inode: Inode, data: bytes) -> None:
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

    def truncate(self, process: Process, inode: Inode, length: int) -> None:
        process.check_alive()
        if length < len(inode.data):
            inode.change(self._next(), length, b"", remember=self._loses_power)

    def sync(self, process: Process, path: Path, inode: Inode) -> None:
        process.check_alive()
        self.before_sync(path.name)
        process.check_alive()
        failing = self.fail_sync is not None and self.fail_sync(path.name)
        if failing:
            self.faulty["dropped by a sync that failed"] += bool(inode.changes)
            inode.fail_sync(self._rng)
            raise OSError(errno.EIO, "the disk cannot write", str(path))
        if self._loses_power:
            inode.sync()

    def sync_folder(self, process: Process, folder: Path) -> None:
        process.check_alive()
        self.before_sync(folder.name)
        process.check_alive()
        if self.fail_sync is not None and self.fail_sync(folder.name):
            raise OSError(errno.EIO, "the disk cannot write", str(folder))
        self._names.sync(str(folder).rstrip("/"))

    def put(self, process: Process, path: Path, data: bytes) -> None:
        process.check_alive()
        if self.full:
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        self._files[str(path)] = inode = Inode(bytearray(data), bytes(data))
        if self._loses_power:
            self._names.make_folders(str(path), self._next())
            self._names.sync_file(str(path), inode)

    def rename(self, process: Process, source: Path, target: Path) -> None:
        process.check_alive()
        prefix = f"{source}/"
        moved = [path for path in list(self._files) if path == str(source) or path.startswith(prefix)]
        if not moved:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(source))
        for path in moved:
            new = f"{target}{path[len(str(source)) :]}"
            self._files[new] = inode = self._files.pop(path)
            self._rename(inode, old=path, new=new)

    def remove(self, process: Process, path: Path) -> None:
        process.check_alive()
        inode = self._files.pop(str(path), None)
        if inode is not None:
            self._rename(inode, old=str(path))

    def remove_tree(self, process: Process, folder: Path) -> None:
        process.check_alive()
        prefix = f"{folder}/"
        for path in [path for path in list(self._files) if path.startswith(prefix)]:
            self.remove(process, Path(path))

    def _append(self, inode: Inode, data: bytes) -> None:
        inode.change(self._next(), len(inode.data), data, remember=self._loses_power)

    def _rename(self, inode: Inode, old: str = "", new: str = "") -> None:
        if self._loses_power:
            number = self._next()
            if new:
                self._names.make_folders(new, number)
            self._names.change(NameChange(number, inode, old, new))

    def _next(self) -> int:
        self._moment += 1
        return self._moment


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

    def free_bytes(self, folder: Path) -> int:
        """Return much room, also of a full disk: it fills up at once, without a time when it is nearly full."""
        self._process.check_alive()
        return 1 << 60

    def list(self, folder: Path) -> list[str]:
        self._process.check_alive()
        return self._disk.names(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._disk.rename(self._process, source, target)

    def remove(self, path: Path) -> None:
        self._disk.remove(self._process, path)

    def remove_tree(self, folder: Path) -> None:
        self._disk.remove_tree(self._process, folder)

    def sync_folder(self, folder: Path) -> None:
        self._disk.sync_folder(self._process, folder)


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
        self._disk.sync(self._process, self._path, self._inode)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
