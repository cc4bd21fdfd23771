"""Files in a folder or bucket as a source. Each file is a split; files are read one by one, in the order of names.

A position is `[identity, position within the file, done]`. The identity is the object's ETag, or in a folder the file's
size and modification time. A file must be complete when it appears: write it elsewhere, then rename it. A later change
is an error, because rows may have been read before they changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import obstore
from obstore.exceptions import BaseError

from coranto.errors import SourceChanged, Unavailable
from coranto.fragments.store_errors import store_error
from coranto.fragments.stores import open_objects
from coranto.ingest.files.options import FileOptions
from coranto.ingest.files.rows import FileRows, rows_of
from coranto.ingest.seen_fields import SeenFields
from coranto.ingest.source import Positions, Read
from coranto.types.kinds import TypeField

if TYPE_CHECKING:
    from obstore.store import ObjectStore

POLL_SECONDS: Final = 0.1
_READ_BYTES: Final = 1 << 20


class _File(NamedTuple):
    path: str
    identity: str
    size: int


class FileSource:
    """The files of a folder. `file:///` URLs are below `file_root`."""

    def __init__(self, options: FileOptions, file_root: Path) -> None:
        self._options = options
        self._root = file_root
        self._opened: tuple[ObjectStore, str] | None = None
        self._positions: dict[str, Any] = {}
        self._waiting: deque[str] = deque()
        self._current: tuple[_File, FileRows] | None = None
        self._last: tuple[_File, FileRows] | None = None
        self._fields = SeenFields()
        self._touched: dict[str, str] = {}  # The identities of files that were read since the last `confirm`.
        self._follow = False
        self._listed = 0.0
        self._files: dict[str, _File] = {}

    async def open(self, after: Positions, *, follow: bool) -> str:
        self._positions, self._follow = dict(after), follow
        self._waiting.clear()
        self._touched.clear()
        self._current = None
        await self._list_files()
        return self._options.url

    async def read(self, max_bytes: int) -> Sequence[Read] | None:
        if self._current is None and not self._waiting:
            if not self._follow:
                return None
            if time.monotonic() - self._listed < self._options.poll_seconds:
                await asyncio.sleep(min(POLL_SECONDS, self._options.poll_seconds))
                return []
            await self._list_files()
            return []
        found = await asyncio.to_thread(self._read, max_bytes)
        if found is None:
            return []
        self._touched[found.split] = found.position[0]
        return [found]

    async def fields(self) -> tuple[TypeField, ...] | None:
        if self._last is None or self._options.without_schema:
            return None
        file, rows = self._last
        return await asyncio.to_thread(self._fields.of, [file], lambda _: rows.fields(), lambda each: each.path)

    async def confirm(self) -> None:
        """Check that the files that were read have not changed."""
        touched, self._touched = self._touched, {}
        for path, identity in touched.items():
            found = await asyncio.to_thread(self._head, path)
            if found.identity != identity:
                raise SourceChanged(f"{self._options.url}{path} changed while it was read: {_ADVICE}")

    async def committed(self, positions: Positions) -> None:
        """Do nothing."""

    async def lag(self, positions: Positions) -> Mapping[str, int]:
        """Return the sizes of files that are not read to their end."""
        files = self._files or await asyncio.to_thread(self._list)
        return {path: file.size for path, file in files.items() if not (path in positions and positions[path][2])}

    async def retained(self) -> int | None:
        return None

    async def close(self) -> None:
        self._current = None

    # -- Blocking parts ------------------------------------------------------------------------------------------------

    async def _list_files(self) -> None:
        """List the files, and queue the unread ones. Raises SourceChanged."""
        files = self._files = await asyncio.to_thread(self._list)
        self._listed = time.monotonic()
        for path, (identity, at, done) in self._positions.items():
            found = files.get(path)
            if found is None and not done:
                raise SourceChanged(f"{self._options.url}{path} is gone, and was read only to {at}: put it back")
            if found is not None and found.identity != identity and not (done and self._options.ignores_changes):
                raise SourceChanged(
                    f"{self._options.url}{path} changed after it was read to {'its end' if done else at}: {_ADVICE}"
                )
        unread = [path for path in files if not self._positions.get(path, (0, 0, False))[2]]
        self._waiting = deque(sorted(path for path in unread if self._current is None or path != self._current[0].path))

    def _read(self, max_bytes: int) -> Read | None:
        """Return the next rows, or None if a file was removed before it was read."""
        if self._current is None and not self._begin(self._waiting.popleft()):
            return None
        assert self._current is not None
        file, rows = self._current
        with _errors("read", file.path, self._options.url):
            found, at, done = rows.read(min(max_bytes, _READ_BYTES))
        position = self._positions[file.path] = [file.identity, at, done]
        if done:
            self._current = None
        return Read(file.path, found, position)

    def _begin(self, path: str) -> bool:
        """Start reading a file after its position. Returns False if the file was removed before it was read."""
        known = self._positions.get(path)
        try:
            file = self._head(path)
        except SourceChanged:
            if known is not None:
                raise
            return False
        if known is not None and known[0] != file.identity:
            raise SourceChanged(f"{self._options.url}{path} changed after it was read to {known[1]}: {_ADVICE}")
        with _errors("read", path, self._options.url):
            opened = obstore.open_reader(self._store, self._prefix + path)
            self._current = self._last = file, rows_of(self._options, path, opened, 0 if known is None else known[1])
        return True

    def _list(self) -> dict[str, _File]:
        """Return the files by their paths below the folder."""
        found = dict[str, _File]()
        with _errors("list", "files", self._options.url):
            for page in obstore.list(self._store, self._prefix or None):
                for meta in page:
                    path = str(meta["path"]).removeprefix(self._prefix)
                    if path and fnmatch.fnmatchcase(path, self._options.pattern):
                        found[path] = self._file(path, meta)
        return found

    def _head(self, path: str) -> _File:
        with _errors("look at", path, self._options.url):
            return self._file(path, obstore.head(self._store, self._prefix + path))

    def _file(self, path: str, meta: Any) -> _File:
        size, changed = int(meta["size"]), int(meta["last_modified"].timestamp() * 1_000_000)
        # The ETag of a local file has its inode number, which differs for a copy.
        tag = "" if self._options.url.startswith("file:") else str(meta["e_tag"] or "")
        return _File(path, tag or f"{size}-{changed}", size)

    @property
    def _store(self) -> ObjectStore:
        return self._objects[0]

    @property
    def _prefix(self) -> str:
        return self._objects[1]

    @property
    def _objects(self) -> tuple[ObjectStore, str]:
        if self._opened is None:
            self._opened = open_objects(self._options.url, file_root=self._root)
        return self._opened


_ADVICE: Final = (
    "put a file in place by renaming it, and never change it; give changed rows in a file of another name. "
    "`changed: ignore` ignores changes of files that were read to their end"
)


@contextlib.contextmanager
def _errors(action: str, subject: str, url: str) -> Iterator[None]:
    """Turn errors of the object store into Unavailable, and the error for a missing file into SourceChanged."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceChanged(f"{url} has no {subject} any more: put it back") from error
    except (BaseError, OSError) as error:
        raise Unavailable(str(store_error(action, subject, url, error))) from error
