"""A file with one writer and a changing set of readers.

Readers borrow the file. Discarding removes the file's name immediately, but the file stays open until the last reader
has returned it. So freeing disk space never breaks a read. An idle file without a writer holds no descriptor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coranto.effects import Bytes, Disk, DiskFile
from coranto.errors import CorruptSpool


class SharedFile:
    """One file of a spool folder, used from one event loop.

    Two methods may run in another thread: `sync` while the file is borrowed, and `write_at` after `prepare`, as long as
    the owner does nothing else with the file.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self.path = path
        self._disk = disk
        self._file: DiskFile | None = None
        self._borrowers = 0
        self._owned = True
        self._discarded = False
        self._syncing = threading.Lock()
        self._unsynced: OSError | None = None
        self._taken_out = False
        self._replaced: list[DiskFile] = []  # Open files with quarantined content. They may have readers.

    @property
    def discarded(self) -> bool:
        return self._discarded

    @property
    def is_quarantined(self) -> bool:
        """True if the content was found to be damaged and has not been replaced yet."""
        return self._taken_out

    @contextmanager
    def borrow(self) -> Iterator[SharedFile]:
        """Keep the file open during the block, even if it is discarded."""
        self._open()
        self._borrowers += 1
        try:
            yield self
        finally:
            self._borrowers -= 1
            self._close_if_idle()

    def prepare(self) -> None:
        """Open the file. It stays open until its owner calls `seal` or `close_descriptor`."""
        self._open()

    def write_at(self, position: int, data: Bytes) -> None:
        """Write `data` at `position`, replacing everything in the file from there on.

        If writing fails, the file is truncated to `position`.
        """
        file = self._file if self._file is not None else self._open()
        if file.size() != position:
            file.truncate(position)
        try:
            file.write(data)
        except OSError:
            file.truncate(position)
            raise

    def read_at(self, position: int, length: int) -> bytes:
        """Return `length` bytes from `position`; fewer only at the end of the file. Borrow it for a series of reads."""
        return self._open().read_at(position, length)

    def truncate(self, length: int) -> None:
        if self._open().size() > length:
            self._open().truncate(length)

    def size(self) -> int:
        return self._open().size()

    def sync(self) -> None:
        """Return once written bytes survive power loss. Raises OSError if the sync fails, and on every later call.

        The kernel reports a failure once and may have dropped unwritten content. So the next sync proves nothing.
        """
        with self._syncing:
            if self._unsynced is not None:
                raise self._unsynced
            if self._taken_out:
                return
            try:
                self._open().sync()
            except OSError as error:
                self._unsynced = error
                raise

    def seal(self) -> None:
        """Close the file once no reader has it. The owner must not write any more."""
        self._owned = False
        self._close_if_idle()

    def close_descriptor(self) -> None:
        """Close the file until its next use, unless a reader has it. For a file that is not written for some time."""
        if self._file is not None and not self._borrowers:
            self._file.close()
            self._file = None

    def move(self, target: Path) -> None:
        """Move the file to `target`. It is discarded for its owner and for new readers."""
        self._discarded = True
        if not self._taken_out:
            self._disk.rename(self.path, target)
            self._disk.sync_folder(target.parent)
            self.sync_folder()  # Otherwise a power loss could leave a log here whose content has been moved.
        self.seal()

    def sync_folder(self) -> None:
        """Return once the file's name, or the removal of its name, survives power loss."""
        self._disk.sync_folder(self.path.parent)

    def quarantine(self, target: Path) -> None:
        """Move the damaged content of a sealed file to `target`, until `replace_with` replaces it.

        From now on all reads raise CorruptSpool, including reads by borrowers of the file. Raises OSError
        if the content cannot be moved; even then it is not read any more.
        """
        self._taken_out = True
        if self._file is not None:
            self._replaced.append(self._file)
            self._file = None
        self._close_if_idle()
        self._disk.rename(self.path, target)
        self._disk.sync_folder(target.parent)

    def stay_quarantined(self) -> None:
        """Mark the content as quarantined by an earlier process."""
        self._taken_out = True

    def sibling(self, name: str) -> SharedFile:
        """Return an empty file in the same folder, for `replace_with`."""
        file = SharedFile(self._disk, self.path.with_name(name))
        file.truncate(0)
        return file

    def replace_with(self, other: SharedFile) -> None:
        """Replace quarantined content by the content of `other`, a synced file in the same folder."""
        other.move(self.path)
        self._taken_out = False

    def discard(self) -> None:
        """Remove the file. Readers that have borrowed it can continue."""
        self._discarded = True
        self._disk.remove(self.path)
        self.seal()

    def _open(self) -> DiskFile:
        if self._file is None:
            if self._taken_out:
                raise CorruptSpool(
                    f"{self.path} was damaged and was set aside; another broker or the store may have its content"
                )
            if self._discarded:
                raise FileNotFoundError(f"{self.path} was discarded")
            self._file = self._disk.open(self.path)
        return self._file

    def _close_if_idle(self) -> None:
        if self._borrowers:
            return
        while self._replaced:
            self._replaced.pop().close()
        if self._file is not None and not self._owned:
            self._file.close()
            self._file = None
