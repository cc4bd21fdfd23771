"""Storage for the memory of consumers' audits: a fragment store, or a local folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from coranto.audit.memory import FOLDER
from coranto.errors import CorantoError, FragmentNotFound
from coranto.fragments.stores import FragmentStore, StoreRegistry
from coranto_consumers.audit.memory import Memory

T = TypeVar("T")


def file_name(consumer: str) -> str:
    """Return the file name for a consumer. It only has characters that all stores and file systems allow."""
    readable = "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "_" for each in consumer)[:80]
    return f"{readable}-{hashlib.sha256(consumer.encode()).hexdigest()[:12]}.json"


def memory_at(place: str, stores: StoreRegistry) -> Memory:
    """Return the memory at `place`: the URL of a fragment store, or a folder."""
    return FragmentStoreMemory(stores.get(place), place) if "://" in place else FolderMemory(Path(place))


class FragmentStoreMemory:
    """Stores the results of audits in files of a fragment store, next to the audit records of journals."""

    def __init__(self, store: FragmentStore, url: str) -> None:
        self.url = url
        self._store = store

    async def load(self, name: str) -> bytes | None:
        try:
            return await self._store.get_note(self._path(name))
        except FragmentNotFound:
            return None

    async def save(self, name: str, content: bytes) -> None:
        await self._store.put_note(self._path(name), content)

    @staticmethod
    def _path(name: str) -> str:
        return f"{FOLDER}/consumers/{file_name(name)}"


class FolderMemory:
    """Stores the results of audits in files of `folder`. `save` syncs a file to disk and replaces the old one
    atomically.
    """

    url = ""

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
        return self._folder / file_name(name)

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
