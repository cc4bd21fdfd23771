"""Probing a fragment store: a small fragment is put, read back, listed and signed, as real ones will be."""

from __future__ import annotations

import asyncio

from coranto.errors import StoreError
from coranto.fragments import Codec, Fragment, sum_of
from coranto.stores import FragmentStore

PROBE_SECONDS = 60.0
_CONTENT = b"A broker wrote this to see whether it can.\n"
_FOLDER = ".test/health-check"


def _fragment(folder: str) -> Fragment:
    return Fragment(folder, 0, len(_CONTENT), sum_of(_CONTENT), Codec.NONE)


async def probe(store: FragmentStore) -> None:
    """Raises StoreError that says what the store does not do."""
    fragment = _fragment(_FOLDER)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await store.put(fragment, _CONTENT)
            if await store.get(fragment) != _CONTENT:
                raise StoreError(f"{store.url} returned other content for {fragment.content_path} than was put")
            if not any([listed.content_name == fragment.content_name async for listed in store.list(_FOLDER)]):
                raise StoreError(f"{store.url} does not list {fragment.content_path}, which was just put")
            await store.sign_async(fragment, 60.0)
    except TimeoutError:
        raise StoreError(f"{store.url} took more than {PROBE_SECONDS:.0f} seconds to answer") from None


async def probe_delete(store: FragmentStore, prefix: str) -> None:
    """Write and remove a file below `prefix` (empty, or a path that ends in a slash). Raises StoreError."""
    fragment = _fragment(f"{prefix}.gazette-delete-probe")
    await store.put(fragment, _CONTENT)
    await store.remove(fragment)
    if await store.exists(fragment):
        raise StoreError(f"{store.url} still has {fragment.content_path}, which was just removed")
