"""Files during playback: one per fnode. They are linked to their paths when the history is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from coranto.errors import CorruptData
from coranto_consumers.recoverylog.fsm import Fsm
from coranto_consumers.recoverylog.operations import Fnode

STAGING: Final = ".fnodes"
"""The folder of files that have no path yet."""

MAX_OPEN: Final = 64
"""The maximum number of open files. A log may have any number of files, and file descriptors are limited."""

_NAME_BYTES: Final = 255
_PATH_BYTES: Final = 4096


class FnodeFiles(Protocol):
    """The file operations of a player."""

    def prepare(self) -> None:
        """Begin without any files."""
        ...

    def create(self, fnode: Fnode) -> None: ...

    def write(self, fnode: Fnode, offset: int, content: bytes) -> None:
        """Write all of `content` at byte `offset`, which may be beyond the file's end."""
        ...

    def remove(self, fnode: Fnode) -> None: ...

    def make_live(self, fsm: Fsm) -> None:
        """Give each file its paths, and write the properties."""
        ...

    def abandon(self) -> None:
        """Remove all files."""
        ...


class LocalFnodeFiles:
    """`FnodeFiles` below a folder. The folder belongs to the player alone; its earlier content is removed."""

    def __init__(self, folder: Path) -> None:
        # An absolute path, so that paths below it can be recognized.
        self._folder = Path(os.path.abspath(folder))
        self._played: set[Fnode] = set()
        self._open: OrderedDict[Fnode, int] = OrderedDict()
        """Descriptors in LRU order: the last used one is at the end."""

    def _staged(self, fnode: Fnode) -> Path:
        return self._folder / STAGING / str(fnode)

    def prepare(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        # Other users may not read a shard's state. A folder that could not be removed, such as a mount, still exists.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / STAGING).mkdir()

    def create(self, fnode: Fnode) -> None:
        self._keep_open(fnode, os.O_CREAT | os.O_EXCL)
        self._played.add(fnode)

    def write(self, fnode: Fnode, offset: int, content: bytes) -> None:
        descriptor = self._open.get(fnode)
        if descriptor is None:
            descriptor = self._keep_open(fnode)
        else:
            self._open.move_to_end(fnode)
        view = memoryview(content)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def _keep_open(self, fnode: Fnode, flags: int = 0) -> int:
        while len(self._open) >= MAX_OPEN:
            _, oldest = self._open.popitem(last=False)
            os.close(oldest)
        descriptor = self._open[fnode] = os.open(self._staged(fnode), os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
        return descriptor

    def remove(self, fnode: Fnode) -> None:
        descriptor = self._open.pop(fnode, None)
        if descriptor is not None:
            os.close(descriptor)
        self._played.remove(fnode)
        self._staged(fnode).unlink()

    def make_live(self, fsm: Fsm) -> None:
        if self._played != set(fsm.live_fnodes):
            raise CorruptData(
                f"files {sorted(self._played)} were played, but {fsm.live_fnodes} are alive; recover from other hints"
            )
        for fnode in fsm.live_fnodes:
            for path in sorted(fsm.paths_of(fnode)):
                with _file_errors(path):
                    os.link(self._staged(fnode), self._target(path))
            self.remove(fnode)
        (self._folder / STAGING).rmdir()
        for path, content in fsm.properties.items():
            with _file_errors(path), self._target(path).open("x") as file:
                file.write(content)

    def _target(self, path: str) -> Path:
        """Return the local path of a recorded path. Raises CorruptData for a path that no recorder can have recorded.

        Recorded paths are not trusted: every program that can append to the log chooses them.
        """
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if not parts or ".." in parts or parts[0] == STAGING or "\0" in path:
            raise CorruptData(f"the recorded path {_shown(path)} is not below the folder it is played into")
        target = self._folder.joinpath(*parts)
        if max(len(os.fsencode(part)) for part in parts) > _NAME_BYTES or len(os.fsencode(target)) >= _PATH_BYTES:
            raise CorruptData(f"the recorded path {_shown(path)} is longer than paths can be")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def abandon(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._played.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _file_errors(path: str) -> Iterator[None]:
    """Raise CorruptData, which names the path, when a path would have to be both a file and a folder."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise CorruptData(f"the recorded path {_shown(path)} and another cannot both be files: {error}") from error


def _shown(path: str) -> str:
    return repr(path) if len(path) <= 200 else repr(path[:200]) + "…"
