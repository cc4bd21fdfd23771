"""Reads at a gap: a span below the journal's head that this broker's fragment index does not cover.

A gap arises when a disk loses content, or when a broker has just become a replica. The other brokers of the Route may
have the content in local files, which they store later, or never if the journal has no store. So a read at a gap asks
these peers. It continues with content that a peer serves to readers, at the read's offset or within the span that the
read would skip:

* a stored fragment that this broker has not listed yet; or
* the peer's local file. It is fetched completely and verified by its SHA-1 before it is served, and readers of the gap
  share it in the cache.

Only the gap is served from a peer, so a peer cannot extend the journal. The index, the head and the spool do not
change. If no peer has the content, the read retries with backoff, responds OFFSET_NOT_YET_AVAILABLE, or skips the gap.
A peer that is asked does not ask its own peers.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import structlog

from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.cache import CachedContent
from coranto_broker.fragments.index import IndexEntry, QueryResult, is_plausible
from coranto_broker.replication.peer_copies import PeerCopy

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.replication.resolver import Resolution

PAUSE_SECONDS = 1.0
"""The first pause of a blocking read before it asks peers again. Each further pause is twice as long."""
LONGEST_PAUSE_SECONDS = 30.0
_log = structlog.get_logger(__name__)


class Found(NamedTuple):
    """An entry with content up to `end` (exclusive), or None if `offset` is not available yet.

    `copy` is the entry's content if it comes from a peer.
    """

    offset: int
    write_head: int
    entry: IndexEntry | None
    end: int
    copy: CachedContent | None = None


class GapReader:
    """Finds the next content of a read, locally or at peers."""

    def __init__(self, broker: Broker, resolution: Resolution, request: pb.ReadRequest) -> None:
        self._broker = broker
        self._journal = resolution.spec.name
        self._index = resolution.require_replica.index
        self._request = request
        self._asks = not (request.do_not_proxy and request.HasField("header"))

    async def find(self, offset: int, loans: AsyncExitStack) -> Found:
        """Find the entry with `offset` (-1: the write head). A peer's copy is valid until `loans` closes."""
        request, pause = self._request, PAUSE_SECONDS
        while True:
            found = await self._index.query(
                offset, block=request.block, begin_mod_time=request.begin_mod_time, until_gap=self._asks
            )
            if not found.gap or not self._asks or (_jumps(found) and self._index.jump_is_sound(found.offset)):
                break
            if (elsewhere := await self._elsewhere(found, loans)) is not None:
                return elsewhere
            if found.entry is not None:  # The index may have changed.
                found = await self._index.query(offset, block=False, begin_mod_time=request.begin_mod_time)
                if found.entry is not None or not request.block:
                    break
                continue
            if not request.block:
                break
            offset = found.offset
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._index.query(offset, block=True, begin_mod_time=request.begin_mod_time)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        return Found(found.offset, found.write_head, found.entry, found.entry.end if found.entry is not None else 0)

    async def _elsewhere(self, found: QueryResult, loans: AsyncExitStack) -> Found | None:
        """Find content of a gap at a peer, or in a store that a peer names."""
        request, jumps = self._request, _jumps(found)
        copies, all_answered = await self._broker.copies.find(self._journal, found.gap.start, request.begin_mod_time)
        for copy in sorted(copies, key=lambda copy: copy.offset):
            offset = copy.offset
            if offset != found.gap.start and not (jumps and offset in found.gap):
                continue
            if await self._is_stored(copy.fragment):
                entry, content = IndexEntry(copy.fragment), None
            else:
                entry = IndexEntry(copy.uncompressed)
                if request.metadata_only or (request.end_offset and offset >= request.end_offset):
                    content = None
                elif (content := await self._open(copy, loans)) is None:
                    continue
            # The peer may have a later head. Its fragments are never beyond the head.
            head = max(found.write_head, entry.end)
            return Found(offset, head, entry, min(entry.end, found.gap.stop), content)
        if jumps and all_answered:
            self._index.note_sound_jump(found.offset)
        return None

    async def _is_stored(self, fragment: Fragment) -> bool:
        """Return True if a store of the journal certainly has the fragment's file."""
        item = self._broker.keyspace.state.item(self._journal)
        if item is None or fragment.backing_store not in item.spec.fragment.stores:
            return False
        try:
            size = await self._broker.stores.get(fragment.backing_store).size(fragment)
        except CorantoError as error:
            _log.info("fragment.not_found_in_store", fragment=fragment.content_path, reason=str(error))
            return False
        return size is not None and is_plausible(replace(fragment, file_bytes=size))

    async def _open(self, copy: PeerCopy, loans: AsyncExitStack) -> CachedContent | None:
        """Borrow a peer's copy from the cache. Return None if the peer lacks the content or has damaged content."""
        try:
            return await loans.enter_async_context(self._broker.fragments.open(copy.uncompressed, copy))
        except CorantoError as error:
            _log.info(
                "fragment.no_copy_at_peer",
                fragment=copy.fragment.content_path,
                broker=copy.broker,
                reason=str(error),
            )
            return None


def _jumps(found: QueryResult) -> bool:
    """Return True if a read with this result would skip a gap."""
    return found.entry is not None and found.offset > found.gap.start
