"""The content of a manifest: the bytes of its fragments, verified, and the lines in them as Arrow batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from coranto.client.direct import DirectReader
from coranto.client.loop import run_blocking
from coranto.errors import CorruptMessage, InvalidInput, StoreError
from coranto.fragments.stores import StoreRegistry
from coranto.lake.manifest import JournalPart, ListedFragment, Manifest
from coranto.messages.batches import line_batch
from coranto.messages.framing import JsonLines

PIECE_BYTES: Final = 8 << 20
"""The maximum bytes of content in one piece, which becomes a batch of lines."""


class ManifestContent:
    """Reads the content of a manifest. `file_root` is the root of `file:///` URLs, if the manifest has no paths."""

    def __init__(self, manifest: Manifest, file_root: Path | None) -> None:
        self._manifest = manifest
        self._direct = DirectReader(file_root)
        self._paths = DirectReader(Path("/"))
        self._stores = StoreRegistry(file_root)

    def lines(self, part: JournalPart, framing: JsonLines, begin: int, end: int) -> Iterator[Any]:
        """Yield the whole lines of [begin, end) of a journal, as batches of `coranto.messages.batches.LINES`.

        Raises CorruptMessage, CorruptFragment and StoreError, and InvalidInput if `end` is within a line.
        """
        rest, at = b"", begin
        for piece in self._pieces(part, begin, end):
            content = rest + piece
            batch, used = line_batch(framing, part.journal, content, at)
            rest, at = content[used:], at + used
            if batch.num_rows:
                yield batch
            if len(rest) > framing.max_line_bytes:
                raise CorruptMessage(part.journal, at, f"has not ended after {len(rest)} bytes")
        if rest:
            raise InvalidInput(
                f"{part.journal}: the content ends at {end}, within the message that begins at {at}; make the "
                f"manifest with the end {at}",
                field="end",
            )

    def _pieces(self, part: JournalPart, begin: int, end: int) -> Iterator[bytes]:
        at = begin
        for each in part.chain():
            if each.end <= at or at >= end:
                continue
            content = self._content(each)
            last = min(each.end, end)
            for start in range(at, last, PIECE_BYTES):
                yield bytes(content[start - each.begin : min(start + PIECE_BYTES, last) - each.begin])
            at = last

    def _content(self, listed: ListedFragment) -> memoryview:
        """Return the verified content of a fragment. Raises StoreError (with advice), CorruptFragment, InvalidInput."""
        fragment, url = listed.fragment, listed.url
        try:
            if url.startswith("/"):
                return self._paths.content(fragment, "file://" + quote(url))
            if url.startswith("file:"):
                if not self._direct.can_read(url):
                    raise InvalidInput(f"{url} is below a root folder that is unknown: give it", field="file_root")
                return self._direct.content(fragment, url)
            if url.startswith(("http:", "https:")):
                self._refuse_expired()
                return self._direct.content(fragment, url)
            return memoryview(run_blocking(self._stores.get(listed.store).read(fragment)))
        except StoreError as error:
            raise StoreError(
                f"{error}. If retention has removed it, make the manifest again; it then begins later"
            ) from error

    def _refuse_expired(self) -> None:
        expire = self._manifest.urls_expire_at
        if expire is not None and time.time() > expire:
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expire))
            raise InvalidInput(f"its signed URLs were good until {when}; make the manifest again", field="manifest")


def require_lines(manifest: Manifest) -> None:
    """Raise InvalidInput for journals whose label has another content type than JSON lines."""
    for part in manifest.journals:
        if part.content_type not in ("", JsonLines.content_type):
            raise InvalidInput(
                f"{part.journal} has messages of {part.content_type}, and scans read {JsonLines.content_type}; leave "
                "it out of the manifest",
                field="manifest",
            )
