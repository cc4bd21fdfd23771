"""The effect of a power loss on files and names: any state between the synced and the visible one.

The kernel writes at any time, a sector at a time. So each sector of a file may have the content of a different moment
since the last sync, and the file any length of that time. A sector within the length that was never written is zeros.
Until their folder is synced, each creation, renaming and removal of a name may be lost or not, in any order.
`PowerLoss` draws the extent of the damage.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from coranto.testing.sim.disk import FileContent

SECTOR_BYTES = 512
"""The unit of bytes that a disk writes atomically."""


class FileChange(NamedTuple):
    """A change of a file at moment `number`: it was truncated to `position`, and `content` was appended."""

    number: int
    position: int
    content: bytes


class PowerLoss:
    """One power loss: it chooses the moment in [first, last] whose state each part of the disk keeps."""

    KINDS = ("in order", "in order", "file by file", "sector by sector", "sector by sector", "all", "nothing")

    def __init__(self, rng: random.Random, first: int, last: int, kind: str = "") -> None:
        """Draw a loss. Moments are numbers of changes. `kind` is one of KINDS, drawn by default."""
        self._rng = rng
        self._first, self._last = first, last
        self.kind = kind or rng.choice(self.KINDS)
        self._common = rng.randint(first, last)
        self.torn = 0
        """The number of changes that survive in part."""

    def moment_of_file(self) -> int:
        """Return the last moment whose change of a file survives."""
        if self.kind == "all":
            return self._first
        if self.kind == "nothing":
            return self._last
        return self._common if self.kind == "in order" else self._rng.randint(self._first, self._last)

    @property
    def by_sector(self) -> bool:
        """True if each sector keeps the state of its own moment."""
        return self.kind == "sector by sector"

    def keeps_name(self, number: int) -> bool:
        """Return True if the change of a name at that moment survives."""
        if self.kind in ("file by file", "sector by sector"):
            return self._rng.random() < 0.5
        return number <= self.moment_of_file()

    def torn_length(self, change: FileChange) -> int:
        """Return the number of bytes that survive of the last surviving change."""
        if len(change.content) > 1 and self._rng.random() < 0.7:
            self.torn += 1
            return self._rng.randrange(len(change.content))
        return len(change.content)

    def choice(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)


@dataclass(slots=True, eq=False)
class Inode(FileContent):
    """A file's content: `data` as processes see it, `durable` as it is on the disk."""

    durable: bytes = b""
    changes: list[FileChange] = field(default_factory=list)
    """The changes since the last sync."""
    _base: bytes = b""  # The content that processes saw at the last sync.

    def __post_init__(self) -> None:
        self._base = bytes(self.data)

    def change(self, number: int, position: int, content: bytes) -> None:
        """Truncate the content to `position`, and append `content`."""
        self.changes.append(FileChange(number, position, content))
        del self.data[position:]
        self.data += content

    def sync(self) -> None:
        """Write all changes since the last sync to the disk."""
        durable = _resized(self.durable, len(self.data))
        for sector in self._dirty():
            begin, end = sector * SECTOR_BYTES, (sector + 1) * SECTOR_BYTES
            durable[begin:end] = self.data[begin:end]
        self._set_durable(bytes(durable))

    def fail_sync(self, rng: random.Random) -> None:
        """Write some of the changes to the disk. The rest is never written, though processes see it."""
        last = self.changes[-1].number if self.changes else 0
        loss = PowerLoss(rng, self.changes[0].number - 1 if self.changes else 0, last, "sector by sector")
        self._set_durable(self._left_by(loss))

    def lose(self, loss: PowerLoss) -> int:
        """Apply a power loss to the content. Return the number of unsynced changes; 0 if all survive."""
        before = len(self.changes)
        left = self._left_by(loss)
        lost = before if left != bytes(self.data) else 0
        self.data = bytearray(left)
        self._set_durable(left)
        return lost

    def _set_durable(self, durable: bytes) -> None:
        self.durable, self._base = durable, bytes(self.data)
        self.changes.clear()

    def _dirty(self) -> set[int]:
        """Return the sectors that were changed since the last sync."""
        dirty: set[int] = set()
        for _, position, content in self.changes:
            dirty.update(range(position // SECTOR_BYTES, (position + len(content)) // SECTOR_BYTES + 1))
        return dirty

    def _left_by(self, loss: PowerLoss) -> bytes:
        if not self.changes:
            return self.durable
        states = [self._base]
        for _, position, content in self.changes:
            states.append(states[-1][:position] + content)
        if not loss.by_sector:
            return self._left_in_order(loss, states)
        length = loss.choice(0, len(self.changes))
        left = _resized(self.durable, len(states[length]) if length else len(self.durable))
        for sector in self._dirty():
            moment = loss.choice(0, len(self.changes))
            if moment:
                begin = sector * SECTOR_BYTES
                piece = states[moment][begin : begin + SECTOR_BYTES]
                end = min(begin + len(piece), len(left))
                if begin < end:
                    left[begin:end] = piece[: end - begin]
        return bytes(left)

    def _left_in_order(self, loss: PowerLoss, states: list[bytes]) -> bytes:
        moment = loss.moment_of_file()
        kept = [each for each in self.changes if each.number <= moment]
        if not kept:
            return self.durable
        last = kept[-1]
        state = states[len(kept)]
        if last.number == moment:
            state = state[: last.position + loss.torn_length(last)]
        left = _resized(self.durable, len(state))
        for sector in self._dirty():
            begin, end = sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, len(state))
            if begin < end:
                left[begin:end] = state[begin:end]
        return bytes(left)


def _resized(content: bytes, length: int) -> bytearray:
    return bytearray(content[:length].ljust(length, b"\0"))


@dataclass(frozen=True, slots=True, eq=False)
class NameChange:
    """At moment `number`, `inode` (None: a folder) lost its name `old`, if any, and got the name `new`, if any."""

    number: int
    inode: Inode | None
    old: str = ""
    new: str = ""

    @property
    def folders(self) -> set[str]:
        """The folders whose sync makes the change durable."""
        return {path.rpartition("/")[0] for path in (self.old, self.new) if path}


class Names:
    """Names of files and folders on the disk, and the unsynced changes."""

    def __init__(self) -> None:
        self.files: dict[str, Inode] = {}
        self._folders = {""}
        self._seen = {""}  # Folders that processes see.
        self._changes: list[NameChange] = []

    @property
    def first(self) -> int | None:
        """The moment of the first unsynced change."""
        return self._changes[0].number if self._changes else None

    def make_folders(self, path: str, number: int) -> None:
        """Create the folders above `path`."""
        folder = path.rpartition("/")[0]
        if folder in self._seen:
            return
        self.make_folders(folder, number)
        self._seen.add(folder)
        self._changes.append(NameChange(number, None, new=folder))

    def change(self, change: NameChange) -> None:
        self._changes.append(change)

    def sync(self, folder: str) -> None:
        """Make all changes in this folder durable."""
        for each in [change for change in self._changes if folder in change.folders]:
            self._apply(each)
            self._changes.remove(each)

    def sync_file(self, path: str, inode: Inode) -> None:
        """Make the name of a completely replaced file durable."""
        self._changes = [each for each in self._changes if path not in (each.old, each.new)]
        self.files[path] = inode

    def holds(self, path: str, inode: Inode) -> bool:
        """Return True if a file certainly keeps its name."""
        return self.files.get(path) is inode and self._reachable(path)

    def lose(self, loss: PowerLoss) -> dict[str, Inode]:
        """Apply a power loss to the names. Return the files that still have names."""
        for each in self._changes:
            if loss.keeps_name(each.number):
                self._apply(each)
        self._changes.clear()
        self.files = {path: inode for path, inode in self.files.items() if self._reachable(path)}
        self._folders = {folder for folder in self._folders if self._reachable(folder)}
        self._seen = set(self._folders)
        return dict(self.files)

    def _apply(self, change: NameChange) -> None:
        if change.inode is None:
            self._folders.add(change.new)
            return
        if change.old and self.files.get(change.old) is change.inode:
            del self.files[change.old]
        if change.new:
            self.files[change.new] = change.inode

    def _reachable(self, path: str) -> bool:
        return all(folder in self._folders for folder in _above(path))


def _above(path: str) -> Iterable[str]:
    while path:
        path = path.rpartition("/")[0]
        yield path
