"""A machine's disk with faults: power losses, partial writes, failing syncs.

Written bytes and new names are immediately visible to the next process (they are in the kernel). But only synced
changes certainly survive a power loss: `SimDisk.crash` undoes any part of the rest (`power.py`). Also, a process may be
killed during a write (`kill_in_write`), which leaves a part of it. The disk may be full. And syncs may fail, after
which processes see content that is never on the disk.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from coranto.testing.sim.disk import FileContent, MemoryDisk
from coranto.testing.sim.timeline import Killed, Process, Timeline
from tests.simulation.kit.power import Inode, NameChange, Names, PowerLoss


class SimDisk(MemoryDisk):
    def __init__(self, loop: Timeline, rng: random.Random) -> None:
        super().__init__()
        self.kill_in_write: Callable[[str], bool] | None = None
        self.fail_sync: Callable[[str], bool] | None = None
        """Return True if the sync of a file or folder, given by name, must fail."""
        self.before_sync: Callable[[str], object] = lambda name: None
        """Called with the name of a file or folder before each sync takes effect."""
        self.faulty: Counter[str] = Counter()
        """The number of writes that hit each fault."""
        self._loop = loop
        self._rng = rng
        self._moment = 0
        self._names = Names()

    def crash(self, kind: str = "") -> None:
        """Simulate a `PowerLoss` of that kind. All processes that use the disk must be dead."""
        inodes = [_inode(file) for file in self._files.values()]
        firsts = [inode.changes[0].number for inode in inodes if inode.changes]
        if self._names.first is not None:
            firsts.append(self._names.first)
        loss = PowerLoss(self._rng, min(firsts, default=self._moment + 1) - 1, self._moment, kind)
        left = self._names.lose(loss)
        self._files = {**left}
        for inode in dict.fromkeys(left.values()):
            self.faulty["lost with the machine"] += inode.lose(loss)
        self.faulty["torn with the machine"] += loss.torn

    def durable(self, path: Path) -> bytes | None:
        """Return a file's bytes that certainly survive a crash; None if the file may not survive."""
        file = self._files.get(str(path))
        if file is None or not self._names.holds(str(path), _inode(file)):
            return None
        return _inode(file).durable

    def corrupt(self, path: Path, offset: int) -> None:
        self._files[str(path)].data[offset] ^= 0xFF

    def write(self, process: Process, path: Path, file: FileContent, data: bytes) -> None:
        process.check_alive()
        if self.full:
            self.faulty["refused, the disk being full"] += 1
        elif self.kill_in_write is not None and self.kill_in_write(path.name):
            self.kill_in_write = None
            written = self._rng.choice((0, len(data), self._rng.randrange(len(data) + 1)))
            self.faulty["cut short by a kill"] += written < len(data)
            self._change(file, len(file.data), data[:written])
            self._loop.note(f"{process.name} dies having written {written} of {len(data)} bytes to {path.name}")
            process.kill()
            raise Killed
        super().write(process, path, file, data)

    def sync(self, process: Process, path: Path, file: FileContent) -> None:
        inode = _inode(file)
        if self._fails(process, path):
            self.faulty["dropped by a sync that failed"] += bool(inode.changes)
            inode.fail_sync(self._rng)
            raise OSError(errno.EIO, "the disk cannot write", str(path))
        inode.sync()

    def sync_folder(self, process: Process, folder: Path) -> None:
        if self._fails(process, folder):
            raise OSError(errno.EIO, "the disk cannot write", str(folder))
        self._names.sync(str(folder).rstrip("/"))

    def put(self, process: Process, path: Path, data: bytes) -> None:
        super().put(process, path, data)
        self._names.make_folders(str(path), self._next())
        self._names.sync_file(str(path), _inode(self._files[str(path)]))

    def _fails(self, process: Process, path: Path) -> bool:
        """Return True if the sync of a file or folder fails. Its process may die first."""
        process.check_alive()
        self.before_sync(path.name)
        process.check_alive()
        return self.fail_sync is not None and self.fail_sync(path.name)

    def _new_file(self, content: bytes) -> Inode:
        return Inode(bytearray(content), content)

    def _change(self, file: FileContent, position: int, content: bytes) -> None:
        _inode(file).change(self._next(), position, content)

    def _renamed(self, file: FileContent, old: str = "", new: str = "") -> None:
        number = self._next()
        if new:
            self._names.make_folders(new, number)
        self._names.change(NameChange(number, _inode(file), old, new))

    def _next(self) -> int:
        self._moment += 1
        return self._moment


def _inode(file: FileContent) -> Inode:
    assert isinstance(file, Inode)
    return file
