"""A memory of audits in a folder, one file for each consumer."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from coranto.errors import CorantoError

T = TypeVar("T")


class FolderMemory:
    """Keeps what audits know in files of `folder`. A file changes as a whole. `save` returns once it is on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def load(self, name: str) -> bytes | None:
        def read() -> bytes | None:
            try:
                return self._path(name).read_bytes()
            except FileNotFoundError:
                return None

        return await self._do(read)

    async def save(self, name: str, content: bytes) -> None:
        await self._do(lambda: self._write(self._path(name), content))

    def _path(self, name: str) -> Path:
        readable = "".join(each if each.isalnum() or each in "-_." else "_" for each in name)[:80]
        return self._folder / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.json"

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".audit-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    async def _do(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise CorantoError(f"the folder {self._folder} of earlier audits cannot be used: {error}") from error
