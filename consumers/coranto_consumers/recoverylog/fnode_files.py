"""Files under playback: one per fnode, linked to their paths when the history is complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, Protocol

from coranto.errors import CorruptData
from coranto_consumers.recoverylog.fsm import Fsm
from coranto_consumers.recoverylog.operations import Fnode

STAGING: Final = ".fnodes"
"""Where files are while they have no path yet."""


class FnodeFiles(Protocol):
    """What a player does to files."""

    def prepare(self) -> None:
        """Begin with nothing."""
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
        """Leave nothing behind."""
        ...


class LocalFnodeFiles:
    """`FnodeFiles` below a folder, which belongs to the player alone: what it held before is removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Fnode, int] = {}

    def _staged(self, fnode: Fnode) -> Path:
        return self._folder / STAGING / str(fnode)

    def prepare(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / STAGING).mkdir(parents=True)

    def create(self, fnode: Fnode) -> None:
        self._open[fnode] = os.open(self._staged(fnode), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, fnode: Fnode, offset: int, content: bytes) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self._open[fnode], view, offset)
            view, offset = view[written:], offset + written

    def remove(self, fnode: Fnode) -> None:
        os.close(self._open.pop(fnode))
        self._staged(fnode).unlink()

    def make_live(self, fsm: Fsm) -> None:
        if set(self._open) != set(fsm.live_fnodes):
            raise CorruptData(f"files {sorted(self._open)} were played, but {fsm.live_fnodes} are alive")
        for fnode in fsm.live_fnodes:
            for path in sorted(fsm.paths_of(fnode)):
                os.link(self._staged(fnode), self._target(path))
            self.remove(fnode)
        (self._folder / STAGING).rmdir()
        for path, content in fsm.properties.items():
            with self._target(path).open("x") as file:
                file.write(content)

    def _target(self, path: str) -> Path:
        target = Path(os.path.normpath(self._folder / path.lstrip("/")))
        if not target.is_relative_to(self._folder) or target == self._folder:
            raise CorruptData(f"the recorded path {path!r} is not below the folder it is played into")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def abandon(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
