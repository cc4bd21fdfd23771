"""Reading persisted fragments directly from their store, by the URLs that brokers sign.

A fragment is fetched and decompressed completely, and its SHA-1 is checked before any byte is delivered. A `DiskCache`
keeps the content on the local disk. Without one, content up to 64 MiB is held in memory, and larger content in an
unlinked temporary file.

The store is not trusted. A download is limited to the largest plausible length of the fragment's file, and ends with an
error if, after a minute, it is slower than MIN_BYTES_PER_SECOND. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import http.client
import mmap
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote, urlsplit

from coranto.client.disk_cache import DiskCache
from coranto.errors import CorruptFragment, StoreError
from coranto.fragments.codecs import check_file_length, check_plausible, decompress_into
from coranto.fragments.fragment import Fragment

_PIECE_BYTES = 4 << 20
"""The size of delivered pieces."""
_FILE_PIECE_BYTES = 1 << 20
_IN_MEMORY_BYTES = 64 << 20
_HTTP_TIMEOUT_SECONDS = 60.0
MIN_BYTES_PER_SECOND: Final = 1 << 15


class DirectReader:
    """Reads fragments by URL: `http(s)://` always, `file:///` when `file_root`, the folder of the stores, is known."""

    def __init__(self, file_root: Path | None, cache: DiskCache | None = None) -> None:
        self._file_root = file_root.resolve() if file_root is not None else None
        self._cache = cache

    def can_read(self, url: str) -> bool:
        """Return True if this process can read URLs of this kind."""
        scheme = url.partition(":")[0]
        return scheme in ("http", "https") or (scheme == "file" and self._file_root is not None)

    async def read(self, fragment: Fragment, url: str, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield the content of `fragment` at journal offsets [begin, end), in pieces of at most 4 MiB.

        Raises StoreError if the URL cannot be read, and CorruptFragment if its content is not the fragment's.
        """
        content = await asyncio.to_thread(self.content, fragment, url)
        for start in range(begin - fragment.begin, end - fragment.begin, _PIECE_BYTES):
            yield bytes(content[start : min(start + _PIECE_BYTES, end - fragment.begin)])

    def content(self, fragment: Fragment, url: str) -> memoryview:
        """Return the fragment's verified content. Blocks. Raises the errors of `read`."""
        try:
            kept = self._cache and self._cache.content(fragment, functools.partial(self._fill, fragment, url))
            return memoryview(kept or self._uncached(fragment, url))
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = f"cannot read fragment {fragment.content_path} from {_shown(url)}"
            raise StoreError(f"{what}: {error}", kind=f"{what}: {_kind(error)}") from error

    def _fill(self, fragment: Fragment, url: str, content: bytearray | mmap.mmap) -> None:
        _unpack(fragment, url, self._file(fragment, url), content)

    def _uncached(self, fragment: Fragment, url: str) -> bytearray | mmap.mmap:
        data = self._file(fragment, url)
        check_plausible(fragment.codec, len(data), fragment.length)
        content = _allocate(fragment.length)
        _unpack(fragment, url, data, content)
        return content

    def _file(self, fragment: Fragment, url: str) -> bytes | mmap.mmap:
        """Return the bytes of the fragment's file, unverified."""
        with self._open(url) as source:
            pieces = _pieces(fragment, source)
            if fragment.length <= _IN_MEMORY_BYTES:
                return b"".join(pieces)
            with tempfile.TemporaryFile() as file:
                file.writelines(pieces)
                length = file.tell()
                file.flush()
                return mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ) if length else b""

    def _open(self, url: str) -> IO[bytes]:
        scheme = url.partition(":")[0]
        if scheme == "file":
            return self._path(url).open("rb")
        if scheme not in ("http", "https"):
            raise StoreError(
                f"{_shown(url)} is neither http, https nor file; read through brokers instead (direct=False)"
            )
        # Stores may undo the content encoding of an offload fragment. `decompress_into` accepts both forms.
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
        response: IO[bytes] = _opener.open(request, timeout=_HTTP_TIMEOUT_SECONDS)
        return response

    def _path(self, url: str) -> Path:
        assert self._file_root is not None
        path = (self._file_root / unquote(urlsplit(url).path).lstrip("/")).resolve()
        if not path.is_relative_to(self._file_root):
            raise StoreError(f"{_shown(url)} points outside of the file root {self._file_root}")
        return path


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because the URL was signed for the store that it names."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _pieces(fragment: Fragment, source: Any) -> Iterator[bytes]:
    """Yield the bytes of a file or response. Raises CorruptFragment if it is too long, and OSError if too slow."""
    taken, due = 0, time.monotonic() + _HTTP_TIMEOUT_SECONDS
    # `read` would wait for a complete piece, however slow the store is.
    while piece := source.read1(_FILE_PIECE_BYTES):
        taken += len(piece)
        check_file_length(fragment.length, taken)
        if time.monotonic() > due + taken / MIN_BYTES_PER_SECOND:
            raise TimeoutError(f"it is too slow: {taken} bytes took more than {_HTTP_TIMEOUT_SECONDS:.0f} s")
        yield piece
    if getattr(source, "length", 0):
        raise ConnectionError(f"the connection ended after {taken} bytes, {source.length} bytes too early")


def _kind(error: Exception) -> str:
    """Return the kind of failure, without text from the store."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    return type(error).__name__


def _allocate(length: int) -> bytearray | mmap.mmap:
    """Return a buffer for content, on disk if it is large."""
    if length <= _IN_MEMORY_BYTES:
        return bytearray(length)
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, length)  # Raises if the disk is full; a later write would be killed.
        return mmap.mmap(file.fileno(), length)


def _unpack(fragment: Fragment, url: str, data: bytes | mmap.mmap, content: bytearray | mmap.mmap) -> None:
    """Decompress a fragment's file, and verify its content. Raises CorruptFragment."""
    decompress_into(fragment.codec, data, content)
    digest = hashlib.sha1(content, usedforsecurity=False)
    if digest.digest() != fragment.sum:
        raise CorruptFragment(f"{_shown(url)} has SHA-1 {digest.hexdigest()}, and not the one in its name")


def _shown(url: str) -> str:
    """Return a URL without its signature, which gives access to the fragment."""
    return url.partition("?")[0]
