"""Fragments for tests of stores."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from coranto.client.direct import DirectReader
from coranto.fragments.codecs import compress
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.stores import FragmentStore

CONTENT: Final = b'{"carrier": "UA", "delay": 11}\n' * 1000


def fragment_of(
    content: bytes, codec: Codec = Codec.GZIP, *, journal: str = "flights/events", begin: int = 0, postfix: str = ""
) -> Fragment:
    """Return the fragment for this content."""
    return Fragment(journal, begin, begin + len(content), sum_of(content), codec, path_postfix=postfix)


async def put(store: FragmentStore, fragment: Fragment, content: bytes = CONTENT) -> None:
    """Store content under a fragment's name, compressed with the fragment's codec."""
    await store.put(fragment, compress(fragment.codec, content))


async def listed(store: FragmentStore, journal: str) -> list[Fragment]:
    """Return all fragments of a journal, ordered by their paths."""
    return sorted([fragment async for fragment in store.list(journal)], key=lambda each: each.content_path)


async def read_directly(fragment: Fragment, url: str, begin: int, end: int, file_root: Path | None = None) -> bytes:
    """Read journal offsets [begin, end) of a fragment by its URL, as clients do."""
    return b"".join([piece async for piece in DirectReader(file_root).read(fragment, url, begin, end)])
