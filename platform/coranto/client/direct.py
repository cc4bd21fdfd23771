"""Reading persisted fragments straight from their store, by the URLs that brokers sign.

A fragment is fetched and decompressed whole and its SHA-1 compared before any byte of it is delivered. Fragments up
to 64 MiB are held in memory meanwhile, larger ones in an unlinked temporary file.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import tempfile
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from coranto.codecs import decompress, iter_decompress
from coranto.errors import CorruptFragment, StoreError
from coranto.fragments import Fragment

_PIECE_BYTES = 1 << 20
_IN_MEMORY_BYTES = 64 << 20
_HTTP_TIMEOUT_SECONDS = 60.0


class DirectReader:
    """Reads fragments by URL: `http(s)://` always, `file:///` when `file_root`, the folder of the stores, is known."""

    def __init__(self, file_root: Path | None) -> None:
        self._file_root = file_root.resolve() if file_root is not None else None

    def can_read(self, url: str) -> bool:
        """Whether a URL is of a kind that this process can read."""
        scheme = url.partition(":")[0]
        return scheme in ("http", "https") or (scheme == "file" and self._file_root is not None)

    async def read(self, fragment: Fragment, url: str, begin: int, end: int) -> AsyncGenerator[bytes]:
        """The content of `fragment` within journal offsets [begin, end), in pieces of at most 1 MiB.

        Raises StoreError when the URL cannot be read, and CorruptFragment when what it holds is not the fragment.
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
        """A file with the fragment's verified content."""
        try:
            with self._open(url) as source:
                if fragment.length <= _IN_MEMORY_BYTES:
                    content = decompress(fragment.codec, source.read(), fragment.length)
                    _check_sum(fragment, url, hashlib.sha1(content, usedforsecurity=False))
                    return io.BytesIO(content)
                return _unpack(fragment, url, source)
        except OSError as error:
            raise StoreError(f"cannot read fragment {fragment.content_path} from {_shown(url)}: {error}") from error

    def _open(self, url: str) -> IO[bytes]:
        if url.startswith("file:"):
            return self._path(url).open("rb")
        # Stores undo the content encoding of an offloaded fragment when asked to; `decompress` takes it either way.
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity"})
        response: IO[bytes] = urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_SECONDS)
        return response

    def _path(self, url: str) -> Path:
        assert self._file_root is not None
        path = (self._file_root / unquote(urlsplit(url).path).lstrip("/")).resolve()
        if not path.is_relative_to(self._file_root):
            raise StoreError(f"{_shown(url)} points outside of the file root {self._file_root}")
        return path


def _unpack(fragment: Fragment, url: str, source: IO[bytes]) -> IO[bytes]:
    digest = hashlib.sha1(usedforsecurity=False)
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile())
        raw = iter(lambda: source.read(_PIECE_BYTES), b"")
        for piece in iter_decompress(fragment.codec, raw, fragment.length):
            digest.update(piece)
            file.write(piece)
        _check_sum(fragment, url, digest)
        undo.pop_all()
    return file


def _check_sum(fragment: Fragment, url: str, digest: hashlib._Hash) -> None:
    if digest.digest() != fragment.sum:
        raise CorruptFragment(f"{_shown(url)} has SHA-1 {digest.hexdigest()}, which is not that of its name")


def _shown(url: str) -> str:
    """A URL for people. Without its signature: whoever has that may read, too."""
    return url.partition("?")[0]
