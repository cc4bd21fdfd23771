"""`RecordedDirectory` changes files below a folder and records each change, so that folder and log always agree."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from coranto.errors import InvalidInput
from coranto_consumers.recoverylog.operations import Fnode
from coranto_consumers.recoverylog.recorder import Recorder


class RecordedFile:
    """A file that is open for writing. Close it when done. Each write is recorded before it is made."""

    def __init__(self, recorder: Recorder, path: Path, fnode: Fnode) -> None:
        self._recorder = recorder
        self._fnode = fnode
        self._descriptor = os.open(path, os.O_WRONLY)
        self._offset = 0

    def __enter__(self) -> RecordedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, content: bytes) -> None:
        """Write all of `content` after the last `write` of this object. The first one begins at offset 0."""
        self.write_at(self._offset, content)
        self._offset += len(content)

    def write_at(self, offset: int, content: bytes) -> None:
        """Write all of `content` at a byte offset, which may be beyond the file's end."""
        if not content:
            return
        self._recorder.write(self._fnode, offset, content)
        view = memoryview(content)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def close(self) -> None:
        """Close the file descriptor. Closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RecordedDirectory:
    """The files below a recorder's directory. Nothing else may change them. Paths are relative to the directory.

    Each operation is recorded first. The recorder refuses operations that are not possible, and all operations once it
    has failed. If the local operation then fails (a full disk), OSError is raised, and the directory must not be used
    any more.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def path(self, name: str) -> Path:
        """Return the local path of a file. Raises InvalidInput for a path that is not below the directory."""
        path = Path(os.path.normpath(self.recorder.directory / name.lstrip("/")))
        if not path.is_relative_to(self.recorder.directory):
            raise InvalidInput(f"{name!r} is not below the recorded directory; use a path within it", field="name")
        return path

    def exists(self, name: str) -> bool:
        return self.recorder.exists(name)

    def read(self, name: str) -> bytes:
        """Return the whole content of a file. Raises FileNotFoundError."""
        return self.path(name).read_bytes()

    def create(self, name: str) -> RecordedFile:
        """Open a new, empty file at `name`. An existing file is replaced."""
        fnode = self.recorder.create(name)
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(exist_ok=False)
        return RecordedFile(self.recorder, path, fnode)

    def open(self, name: str) -> RecordedFile:
        """Open an existing file to change it. Raises InvalidInput when it does not exist."""
        return RecordedFile(self.recorder, self.path(name), self.recorder.fnode_of(name))

    def remove(self, name: str) -> None:
        self.recorder.remove(name)
        self.path(name).unlink()

    def link(self, source: str, target: str) -> None:
        self.recorder.link(source, target)
        path = self.path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(self.path(source), path)

    def rename(self, source: str, target: str) -> None:
        self.recorder.rename(source, target)
        path = self.path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path(source).rename(path)
