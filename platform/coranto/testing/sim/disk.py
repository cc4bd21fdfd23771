"""A machine's disk in memory. It outlives processes: the next process finds all written bytes, synced or not."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path

from coranto.effects import Bytes
from coranto.testing.sim.timeline import Process


@dataclass(slots=True, eq=False)
class FileContent:
    """A file's content, as processes see it."""

    data: bytearray = field(default_factory=bytearray)


class MemoryDisk:
    """One machine's disk. Its only fault is to be `full`. Processes use it through `for_process`."""

    def __init__(self) -> None:
        self.full = False
        self._files: dict[str, FileContent] = {}

    def for_process(self, process: Process) -> ProcessDisk:
        return ProcessDisk(self, process)

    def names(self, folder: Path) -> list[str]:
        """Return the names of files and folders in a folder."""
        prefix = f"{folder}/"
        return sorted({path[len(prefix) :].partition("/")[0] for path in list(self._files) if path.startswith(prefix)})

    def content(self, path: Path) -> bytes | None:
        """Return a file's bytes; None if there is no file."""
        file = self._files.get(str(path))
        return bytes(file.data) if file is not None else None

    def size(self, path: Path) -> int:
        file = self._files.get(str(path))
        return len(file.data) if file is not None else 0

    def paths(self) -> list[str]:
        """Return the paths of all files."""
        return sorted(self._files)

    # -- For processes -------------------------------------------------------------------------------------------------

    def open_file(self, path: Path) -> FileContent:
        file = self._files.get(str(path))
        if file is None:
            file = self._files[str(path)] = self._new_file(b"")
            self._renamed(file, new=str(path))
        return file

    def write(self, process: Process, path: Path, file: FileContent, data: bytes) -> None:
        process.check_alive()
        if self.full:
            self._change(file, len(file.data), data[: len(data) // 2])
            raise _no_space(path)
        self._change(file, len(file.data), data)

    def truncate(self, process: Process, file: FileContent, length: int) -> None:
        process.check_alive()
        if length < len(file.data):
            self._change(file, length, b"")

    def sync(self, process: Process, path: Path, file: FileContent) -> None:
        process.check_alive()

    def sync_folder(self, process: Process, folder: Path) -> None:
        process.check_alive()

    def put(self, process: Process, path: Path, data: bytes) -> None:
        process.check_alive()
        if self.full:
            raise _no_space(path)
        self._files[str(path)] = self._new_file(data)

    def rename(self, process: Process, source: Path, target: Path) -> None:
        process.check_alive()
        prefix = f"{source}/"
        moved = [path for path in list(self._files) if path == str(source) or path.startswith(prefix)]
        if not moved:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder", str(source))
        for path in moved:
            new = f"{target}{path[len(str(source)) :]}"
            self._files[new] = file = self._files.pop(path)
            self._renamed(file, old=path, new=new)

    def remove(self, process: Process, path: Path) -> None:
        process.check_alive()
        file = self._files.pop(str(path), None)
        if file is not None:
            self._renamed(file, old=str(path))

    def remove_tree(self, process: Process, folder: Path) -> None:
        process.check_alive()
        prefix = f"{folder}/"
        for path in [path for path in list(self._files) if path.startswith(prefix)]:
            self.remove(process, Path(path))

    # -- For disks with faults -----------------------------------------------------------------------------------------

    def _new_file(self, content: bytes) -> FileContent:
        return FileContent(bytearray(content))

    def _change(self, file: FileContent, position: int, content: bytes) -> None:
        """Cut a file to `position`, and append `content`."""
        del file.data[position:]
        file.data += content

    def _renamed(self, file: FileContent, old: str = "", new: str = "") -> None:
        """Handle that a file lost the name `old`, if any, and got the name `new`, if any. Does nothing here."""


def _no_space(path: Path) -> OSError:
    return OSError(errno.ENOSPC, "no space left on device", str(path))


class ProcessDisk:
    """The disk as seen by one process: a `coranto.effects.Disk`."""

    def __init__(self, disk: MemoryDisk, process: Process) -> None:
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
        """Return a large number, even for a full disk: disks fill up suddenly, without being nearly full before."""
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

    def __init__(self, disk: MemoryDisk, process: Process, path: Path) -> None:
        self._disk = disk
        self._process = process
        self._path = path
        self._file = disk.open_file(path)

    def write(self, data: Bytes) -> None:
        self._disk.write(self._process, self._path, self._file, bytes(data))

    def read_at(self, offset: int, length: int) -> bytes:
        self._process.check_alive()
        return bytes(self._file.data[offset : offset + length])

    def truncate(self, length: int) -> None:
        self._disk.truncate(self._process, self._file, length)

    def size(self) -> int:
        self._process.check_alive()
        return len(self._file.data)

    def sync(self) -> None:
        self._disk.sync(self._process, self._path, self._file)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
