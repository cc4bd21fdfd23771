"""Probes of fragment stores: put a small fragment, read it, list it, and read it by a signed URL."""

from __future__ import annotations

import asyncio
from typing import Final

from coranto.client.direct import DirectReader
from coranto.errors import StoreError
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.fragments.stores import FragmentStore

PROBE_SECONDS: Final = 60.0
_CONTENT: Final = b"A broker wrote this to see whether it can.\n"
_FOLDER: Final = ".test/coranto"
"""Not `.test/health-check`: Gazette's brokers, which may share the store, have a file there."""


def _fragment(folder: str) -> Fragment:
    return Fragment(folder, 0, len(_CONTENT), sum_of(_CONTENT), Codec.NONE)


async def probe(store: FragmentStore) -> None:
    """Probe a store. Raises StoreError, which names the failed operation."""
    fragment = _fragment(_FOLDER)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await store.put(fragment, _CONTENT)
            if await store.get(fragment) != _CONTENT:
                raise StoreError(f"{store.url} returned other content for {fragment.content_path} than was put")
            if not any([listed.content_name == fragment.content_name async for listed in store.list(_FOLDER)]):
                raise StoreError(f"{store.url} does not list {fragment.content_path}, which was just put")
            await _fetch(fragment, await store.sign_async(fragment, 60.0))
    except TimeoutError:
        raise StoreError(f"{store.url} took more than {PROBE_SECONDS:.0f} seconds to answer") from None


async def probe_delete(store: FragmentStore, prefix: str) -> None:
    """Write and remove a file below `prefix` (empty, or a path that ends in a slash). Raises StoreError."""
    fragment = _fragment(f"{prefix}.coranto-delete-probe")
    await store.put(fragment, _CONTENT)
    await store.remove(fragment)
    if await store.exists(fragment):
        raise StoreError(f"{store.url} still has {fragment.content_path}, which was just removed")


async def _fetch(fragment: Fragment, url: str) -> None:
    """Read the fragment by its URL, as clients do. A `file://` URL is not read, since only some clients can."""
    reader = DirectReader(None)
    if reader.can_read(url):
        async for _ in reader.read(fragment, url, fragment.begin, fragment.end):
            pass  # The reader verifies the content.
