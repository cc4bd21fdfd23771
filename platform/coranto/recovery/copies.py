"""Good copies of a fragment: in stores, and at brokers. A copy is good if its SHA-1 is the fragment's."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import Final

from coranto.client import ClientConfig, JournalClient, JournalInfo
from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import StoreRegistry

BROKER_SECONDS: Final = 0.3
"""The retry timeout for one broker, in seconds."""


@dataclass(frozen=True, slots=True)
class GoodCopies:
    """Finds copies. `stores` are opened by this process. `connect` creates clients of single brokers."""

    client: JournalClient
    stores: StoreRegistry
    connect: Callable[[ClientConfig], JournalClient] = JournalClient.of

    async def of(self, info: JournalInfo, fragment: Fragment) -> AsyncGenerator[tuple[str, bytes]]:
        """Yield good copies as (place, content).

        First come all files with this content in the journal's stores and the fragment's former store. Then come all
        brokers of the cluster: their caches, spools, set-aside files, and spools of deleted journals.
        """
        for url in dict.fromkeys([*info.spec.fragment.stores, fragment.backing_store]):
            if url:
                async for content in self._of_store(url, fragment):
                    yield f"store {url}", content
        with contextlib.suppress(CorantoError):
            kept = await self.client.kept_content(fragment)
            if kept is not None:
                yield f"broker {kept.broker}", kept.content
        route = zip(info.route.members, info.route.endpoints, strict=False)
        for member, endpoint in sorted(route, key=lambda each: (each[0].zone, each[0].suffix)):
            served = await self._of_broker(endpoint, fragment)
            if served is not None:
                yield f"broker {member.zone}/{member.suffix}", served

    async def _of_store(self, url: str, fragment: Fragment) -> AsyncGenerator[bytes]:
        """Yield the content of each good file of a store that is named for this content, with any codec."""
        named = [replace(fragment, backing_store=url)]
        with contextlib.suppress(CorantoError):
            store = self.stores.get(url)
            async for each in store.list(fragment.journal):
                same = (each.begin, each.end, each.sum) == (fragment.begin, fragment.end, fragment.sum)
                if same and each.content_path != fragment.content_path:
                    named.append(each)
        for each in named:
            with contextlib.suppress(CorantoError):
                yield await self.stores.get(url).read(each)

    async def _of_broker(self, endpoint: str, fragment: Fragment) -> bytes | None:
        """Return a fragment's content from one broker; None if the broker does not serve it or the SHA-1 differs."""
        pieces: list[bytes] = []
        try:
            # Without a route cache, the request goes to this broker, which serves its own content.
            config = replace(self.client.config, endpoint=endpoint, route_cache=0, retry_timeout=BROKER_SECONDS)
            async with self.connect(config) as broker:
                reading = broker.read(
                    fragment.journal, fragment.begin, end_offset=fragment.end, direct=False, fail_on_jump=True
                )
                async with contextlib.aclosing(reading) as chunks:
                    pieces.extend([chunk.content async for chunk in chunks])
        except CorantoError:
            return None
        content = b"".join(pieces)
        right = hashlib.sha1(content, usedforsecurity=False).digest() == fragment.sum
        return content if right else None
