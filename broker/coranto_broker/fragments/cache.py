"""The cache of stored fragments' content, for readers that read through the broker.

Many readers tail the same journals, so content that was just fetched is likely to be read again. Concurrent reads of
one fragment share a fetch. The length and SHA-1 of every fragment are verified before any of it is served.

Small fragments are kept in memory. Larger ones are in unnamed files of a local folder, which disappear when the process
ends, even if it is killed. A fragment is decompressed from one mapped file into another, so a large one is never held
in memory.
All files together take up to `max_bytes`. The least recently used ones are evicted. When readers hold too many files,
further readers wait and are then refused. A fragment larger than the whole bound is served when it is the only one.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from coranto.errors import CorruptFragment, Unavailable
from coranto.fragments.codecs import check_file_length, check_plausible, decompress_into
from coranto.fragments.fragment import Codec, Fragment
from coranto.fragments.stores import StoreRegistry

LITTLE_BYTES = 1 << 20
LITTLE_TOTAL_BYTES = 64 << 20
"""The memory for fragments of up to LITTLE_BYTES."""
ENTRY_BYTES = 2048
"""The approximate overhead of a fragment in memory. Uncounted, small ones could take ten times LITTLE_TOTAL_BYTES."""

FETCHES = 4
"""The maximum number of concurrent fetches into files."""

TIMEOUT_SECONDS = 30.0
"""The time that a fetch waits for room in the cache."""

_PIECE_BYTES = 1 << 20


class CachedContent(Protocol):
    """The verified content of a fragment."""

    def read_at(self, position: int, length: int) -> bytes: ...


class FragmentSource(Protocol):
    """A source of fragments' files, such as a `FragmentStore`. `url` identifies it."""

    @property
    def url(self) -> str: ...

    async def read(self, fragment: Fragment) -> bytes:
        """Return the verified content. Raises StoreError, CorruptFragment or Unavailable."""
        ...

    def stream(self, fragment: Fragment) -> AsyncIterator[bytes]:
        """Yield the file in pieces, unverified."""
        ...


class FragmentCache:
    """A cache of stored fragments' content. Each fragment is fetched once while it stays in the cache."""

    def __init__(
        self, stores: StoreRegistry, folder: Path, max_bytes: int, *, little_bytes: int = LITTLE_BYTES
    ) -> None:
        """`folder` is created when it is first needed, for a fragment of more than `little_bytes`."""
        self._stores = stores
        self._folder = folder
        self._little_bytes = little_bytes
        self._little = _Tier(LITTLE_TOTAL_BYTES)
        self._large = _Tier(max_bytes)
        self._fetches = asyncio.Semaphore(FETCHES)

    @asynccontextmanager
    async def open(self, fragment: Fragment, source: FragmentSource | None = None) -> AsyncIterator[CachedContent]:
        """Provide the whole content during the block, from the cache or from `source` (None: the fragment's store).

        Cancelling a reader does not stop a started fetch. Raises StoreError, CorruptFragment or Unavailable.
        """
        store = source if source is not None else self._stores.get(fragment.backing_store)
        key = f"{store.url} {fragment.content_path}"
        little = fragment.length <= self._little_bytes
        tier, fetch = (self._little, self._read) if little else (self._large, self._fetch)
        size = fragment.length + (ENTRY_BYTES if little else 0)
        entry = tier.borrow(key, size, _identity(fragment), lambda: fetch(store, fragment))
        try:
            # A reader that is cancelled does not cancel the fetch for others.
            yield await asyncio.shield(entry.fetching)
        finally:
            tier.give_back(entry)

    @asynccontextmanager
    async def open_kept(self, journal: str, begin: int, end: int, digest: bytes) -> AsyncIterator[CachedContent | None]:
        """Provide cached content with these offsets and SHA-1 during the block; None if the cache does not have it.

        It may belong to a fragment that no store has any more.
        """
        identity = (journal, begin, end, digest)
        for tier in (self._little, self._large):
            if (entry := tier.borrow_present(identity)) is not None:
                try:
                    yield entry.fetching.result()
                finally:
                    tier.give_back(entry)
                return
        yield None

    async def close(self) -> None:
        """Cancel all fetches and drop all content."""
        await self._little.close()
        await self._large.close()

    async def _read(self, store: FragmentSource, fragment: Fragment) -> _Memory:
        return _Memory(await store.read(fragment))

    async def _fetch(self, store: FragmentSource, fragment: Fragment) -> _File:
        async with self._fetches:
            file = await asyncio.to_thread(self._new_file)
            try:
                taken = 0
                async for piece in store.stream(fragment):
                    taken += len(piece)
                    try:
                        check_file_length(fragment.length, taken)
                    except CorruptFragment as error:
                        raise CorruptFragment(f"{fragment.content_path} in {store.url}: {error}") from error
                    await asyncio.to_thread(file.write, piece)
                return _File(await asyncio.to_thread(self._unpack, fragment, file, store.url))
            except BaseException:
                file.close()
                raise

    def _new_file(self) -> IO[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self._folder)

    def _unpack(self, fragment: Fragment, stored: IO[bytes], source: str) -> IO[bytes]:
        """Return a file of the verified content, which may be `stored` itself. Raises CorruptFragment."""
        stored.flush()
        size = os.fstat(stored.fileno()).st_size
        content = stored
        try:
            if fragment.codec is not Codec.NONE:
                if fragment.codec is not Codec.GZIP_OFFLOAD_DECOMPRESSION:
                    check_plausible(fragment.codec, size, fragment.length)
                if not size:
                    raise CorruptFragment("the file is empty")
                content = self._new_file()
                content.truncate(fragment.length)
                with _mapped(stored, size) as data, _mapped(content, fragment.length) as output:
                    decompress_into(fragment.codec, data, output)
                stored.close()
            elif size != fragment.length:
                raise CorruptFragment(f"the file has {size} bytes, and its name says {fragment.length}")
            if (actual := _sum(content, fragment.length)) != fragment.sum:
                raise CorruptFragment(
                    f"its content has the SHA-1 {actual.hex()}. The file was changed or damaged: restore it from a "
                    "copy, or remove it."
                )
        except CorruptFragment as error:
            content.close()
            raise CorruptFragment(f"{fragment.content_path} in {source}: {error}") from error
        except BaseException:
            content.close()
            raise
        return content


def _mapped(file: IO[bytes], size: int) -> mmap.mmap:
    return mmap.mmap(file.fileno(), size)


def _sum(file: IO[bytes], length: int) -> bytes:
    digest = hashlib.sha1(usedforsecurity=False)
    for position in range(0, length, _PIECE_BYTES):
        digest.update(os.pread(file.fileno(), _PIECE_BYTES, position))
    return digest.digest()


class _Memory:
    """Content in memory."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_at(self, position: int, length: int) -> bytes:
        return self._content[position : position + length]

    def close(self) -> None:
        return


class _File:
    """Content in a temporary file without a name."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read_at(self, position: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, position)

    def close(self) -> None:
        self._file.close()


_Identity = tuple[str, int, int, bytes]
"""A fragment's journal, offsets and SHA-1."""


def _identity(fragment: Fragment) -> _Identity:
    return fragment.journal, fragment.begin, fragment.end, fragment.sum


class _Entry:
    """One fragment in a tier."""

    def __init__(self, key: str, size: int, identity: _Identity) -> None:
        self.key = key
        self.size = size
        self.identity = identity
        self.borrowers = 0
        self.is_admitted = False
        self.fetching: asyncio.Task[_Memory | _File]

    @property
    def idle(self) -> bool:
        return self.fetching.done() and not self.borrowers


class _Tier:
    """Cached content of limited size. The least recently used is evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._used = 0
        self._freed = asyncio.Event()

    def borrow(
        self, key: str, size: int, identity: _Identity, fetch: Callable[[], Coroutine[Any, Any, _Memory | _File]]
    ) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, size, identity)
            entry.fetching = asyncio.create_task(self._fetch(entry, fetch))
            entry.fetching.add_done_callback(lambda _: self._fetched(entry))
        self._entries.move_to_end(key)
        entry.borrowers += 1
        return entry

    def borrow_present(self, identity: _Identity) -> _Entry | None:
        """Borrow cached content, whatever its source; None if it is not cached."""
        for entry in self._entries.values():
            if entry.identity == identity and entry.fetching.done():  # A failed fetch is dropped immediately.
                entry.borrowers += 1
                return entry
        return None

    def give_back(self, entry: _Entry) -> None:
        entry.borrowers -= 1
        if entry.idle:
            self._freed.set()
            if self._used > self._max_bytes:
                self._drop(entry)

    async def close(self) -> None:
        entries = list(self._entries.values())
        for entry in entries:
            entry.fetching.cancel()
        await asyncio.gather(*(entry.fetching for entry in entries), return_exceptions=True)
        for entry in list(self._entries.values()):
            self._drop(entry)

    async def _fetch(self, entry: _Entry, fetch: Callable[[], Coroutine[Any, Any, _Memory | _File]]) -> _Memory | _File:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while not self._evict(entry):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise Unavailable(
                "too many different fragments are being read through this broker; try again, or read them from "
                "their store"
            ) from None
        return await fetch()

    def _evict(self, entry: _Entry) -> bool:
        for other in list(self._entries.values()):
            if self._used + entry.size <= self._max_bytes:
                break
            if other.is_admitted and other.idle:
                self._drop(other)
        entry.is_admitted = self._used + entry.size <= self._max_bytes or not self._used
        if entry.is_admitted:
            self._used += entry.size
        return entry.is_admitted

    def _fetched(self, entry: _Entry) -> None:
        task = entry.fetching
        if task.cancelled() or task.exception() is not None:  # Waiting readers get the error; the next one retries.
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        if self._entries.pop(entry.key, None) is None:
            return
        if entry.is_admitted:
            self._used -= entry.size
            self._freed.set()
        if not entry.fetching.cancelled() and entry.fetching.exception() is None:
            entry.fetching.result().close()
