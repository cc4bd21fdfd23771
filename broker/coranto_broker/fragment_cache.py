"""Content of stored fragments, for readers that read through the broker.

Many readers tail the same journals, so what was just fetched is likely wanted again. Concurrent wishes for one fragment
are one fetch. Every fragment's length and SHA-1 is verified before any of it is served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from coranto.fragments import Fragment
from coranto.stores import StoreRegistry


class FragmentCache:
    """Least-recently-used content, up to `max_bytes` of it (beyond that, only what is being read)."""

    def __init__(self, stores: StoreRegistry, max_bytes: int) -> None:
        self._stores = stores
        self._max_bytes = max_bytes
        self._content: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._fetching: dict[str, asyncio.Task[bytes]] = {}

    async def content(self, fragment: Fragment) -> bytes:
        """The whole, verified content. Raises StoreError or CorruptFragment."""
        key = f"{fragment.backing_store} {fragment.content_path}"
        found = self._content.get(key)
        if found is not None:
            self._content.move_to_end(key)
            return found
        task = self._fetching.get(key)
        if task is None:
            task = self._fetching[key] = asyncio.create_task(self._fetch(key, fragment))
            task.add_done_callback(lambda done: self._fetched(key, done))
        # A reader that goes away does not take the fetch from the others.
        return await asyncio.shield(task)

    async def _fetch(self, key: str, fragment: Fragment) -> bytes:
        content = await self._stores.get(fragment.backing_store).read(fragment)
        if len(content) <= self._max_bytes:
            self._content[key] = content
            self._size += len(content)
            while self._size > self._max_bytes:
                _, oldest = self._content.popitem(last=False)
                self._size -= len(oldest)
        return content

    def _fetched(self, key: str, task: asyncio.Task[bytes]) -> None:
        self._fetching.pop(key, None)
        if not task.cancelled():
            task.exception()  # Those who still wait get it.
