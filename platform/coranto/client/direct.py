"""Reading persisted fragments directly from their store, by the URLs that brokers sign.

A fragment is fetched and decompressed as a whole, and its SHA-1 is checked before any byte of it is delivered.
Fragments up to 64 MiB are held in memory meanwhile, larger ones in an unlinked temporary file.

The store is not trusted. A download is limited to the bytes that the fragment's file may have, and to the time that
these take at MIN_BYTES_PER_SECOND. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import io
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import unquote, urlsplit

from coranto.errors import CorruptFragment, StoreError
from coranto.fragments.codecs import check_file_length, decompress, iter_decompress
from coranto.fragments.fragment import Fragment

_PIECE_BYTES = 1 << 20
_IN_MEMORY_BYTES = 64 << 20
_HTTP_TIMEOUT_SECONDS = 60.0
MIN_BYTES_PER_SECOND: Final = 1 << 15


class DirectReader:
    """Reads fragments by URL: `http(s)://` always, `file:///` when `file_root`, the folder of the stores, is known."""

    def __init__(self, file_root: Path | None) -> None:
        self._file_root = file_root.resolve() if file_root is not None else None

    def can_read(self, url: str) -> bool:
        """Return True if this process can read URLs of this kind."""
        scheme = url.partition(":")[0]
        return scheme in ("http", "https") or (scheme == "file" and self._file_root is not None)

    async def read(self, fragment: Fragment, url: str, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield the content of `fragment` at journal offsets [begin, end), in pieces of at most 1 MiB.

        Raises StoreError when the URL cannot be read, and CorruptFragment when its content is not the fragment's.
        """
        file = await asyncio.to_thread(self._fetch, fragment, url)
        with file:
            file.seek(begin - fragment.begin)
            remaining = end - begin
            while remaining:
                piece = file.read(min(remaining, _PIECE_BYTES))
                remaining -= len(piece)
                yield piece

    def _fetch(self, fragment: Fragment, url: str) -> IO[bytes]:
        """Return a file with the fragment's verified content."""
        try:
            with self._open(url) as source:
                pieces = _pieces(fragment, source)
                if fragment.length <= _IN_MEMORY_BYTES:
                    content = decompress(fragment.codec, b"".join(pieces), fragment.length)
                    _check_sum(fragment, url, hashlib.sha1(content, usedforsecurity=False))
                    return io.BytesIO(content)
                return _unpack(fragment, url, pieces)
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = f"cannot read fragment {fragment.content_path} from {_shown(url)}"
            raise StoreError(f"{what}: {error}", kind=f"{what}: {_kind(error)}") from error

    def _open(self, url: str) -> IO[bytes]:
        scheme = url.partition(":")[0]
        if scheme == "file":
            return self._path(url).open("rb")
        if scheme not in ("http", "https"):
            raise StoreError(f"{_shown(url)} is neither http, https nor file")
        # On request stores undo the content encoding of an offload fragment. `decompress` accepts both forms.
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
    """Refuses redirects: the URL was signed for the store that it names, and no other place may answer for it."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _pieces(fragment: Fragment, source: Any) -> Iterator[bytes]:
    """Yield the bytes of a file or response. Raises CorruptFragment if it is too long, and OSError if too slow."""
    taken, due = 0, time.monotonic() + _HTTP_TIMEOUT_SECONDS
    # `read` would wait for a whole piece, even if it comes very slowly.
    while piece := source.read1(_PIECE_BYTES):
        taken += len(piece)
        check_file_length(fragment.length, taken)
        if time.monotonic() > due + taken / MIN_BYTES_PER_SECOND:
            raise TimeoutError(f"it is too slow: {taken} bytes took more than {_HTTP_TIMEOUT_SECONDS:.0f} s")
        yield piece
    if getattr(source, "length", 0):
        raise ConnectionError(f"the connection ended after {taken} bytes, and {source.length} were to follow")


def _kind(error: Exception) -> str:
    """Return the kind of failure, without the store's words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    return type(error).__name__


def _unpack(fragment: Fragment, url: str, pieces: Iterator[bytes]) -> IO[bytes]:
    digest = hashlib.sha1(usedforsecurity=False)
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile())
        for piece in iter_decompress(fragment.codec, pieces, fragment.length):
            digest.update(piece)
            file.write(piece)
        _check_sum(fragment, url, digest)
        undo.pop_all()
    return file


def _check_sum(fragment: Fragment, url: str, digest: hashlib._Hash) -> None:
    if digest.digest() != fragment.sum:
        raise CorruptFragment(f"{_shown(url)} has SHA-1 {digest.hexdigest()}, which is not that of its name")


def _shown(url: str) -> str:
    """Return a URL for people, without its signature, which would let anybody read the fragment."""
    return url.partition("?")[0]
