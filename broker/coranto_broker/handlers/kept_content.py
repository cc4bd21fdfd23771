"""Reads of content by its identity: a journal's offsets and a SHA-1.

The content may come from the fragment cache, from any file of the journal in the data directory, or from another
broker, even if the fragment index no longer has it or the journal was deleted. Peers use such reads to replace damaged
files, and recovery uses them to restore fragments.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import structlog

from coranto.fragments.fragment import Codec, Fragment, sum_from_wire
from coranto.names import strip_metadata
from coranto.security.tokens import Claims
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.cache import CachedContent
from coranto_broker.recovery.set_aside import pieces_with_sum
from coranto_broker.rpc.source import MessageSink

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

_log = structlog.get_logger(__name__)


async def send(broker: Broker, request: pb.ReadRequest, sink: MessageSink, claims: Claims) -> bool:
    """Send the content that a request identifies by its sum, from this or another broker. Return False if none has it.

    The header of the first response names the broker that has it.
    """
    if not _covers(broker, request.journal, claims):
        return False
    async with AsyncExitStack() as stack:
        pieces = await _pieces(broker, request, stack)
        if pieces is not None:
            await sink.write(_first(broker, request))
            offset = request.offset
            async for data in pieces:
                await sink.write(pb.ReadResponse(offset=offset, content=data))
                broker.metrics.read_bytes.inc(len(data))
                offset += len(data)
            return True
    sent = False
    if not request.do_not_proxy:
        async with aclosing(broker.copies.kept(request)) as answers:
            async for answer in answers:
                sent = True
                await sink.write(answer)
    return sent


def _covers(broker: Broker, journal: str, claims: Claims) -> bool:
    """Return True if claims cover a journal. The labels of a deleted journal are unknown."""
    name = strip_metadata(journal)
    item = broker.keyspace.state.item(name)
    if item is None:
        return claims.by_name_alone and claims.covers(name)
    return claims.covers(name, item.spec.labels)


def _first(broker: Broker, request: pb.ReadRequest) -> pb.ReadResponse:
    begin, end = request.offset, request.end_offset
    found = Fragment(strip_metadata(request.journal), begin, end, sum_from_wire(request.content_sum), Codec.NONE)
    header = broker.unrouted_header(broker.keyspace.state)
    return pb.ReadResponse(header=header, offset=begin, write_head=end, fragment=found.to_wire())


async def _pieces(broker: Broker, request: pb.ReadRequest, stack: AsyncExitStack) -> AsyncIterator[bytes] | None:
    """Return the content in pieces if this broker has it, or None. It is valid until `stack` closes."""
    journal, begin, end = strip_metadata(request.journal), request.offset, request.end_offset
    digest = sum_from_wire(request.content_sum)
    cached = await stack.enter_async_context(broker.fragments.open_kept(journal, begin, end, digest))
    if cached is not None:
        return _of_cache(cached, end - begin, broker.settings.chunk_bytes)
    data_dir = broker.settings.data_dir
    try:
        files = await asyncio.to_thread(pieces_with_sum, data_dir, broker.disk, journal, begin, end, digest)
    except OSError as error:  # A file may have been removed.
        _log.warning("fragment.files_not_searched", journal=journal, offset=begin, error=str(error))
        return None
    return _of_files(files) if files is not None else None


async def _of_cache(content: CachedContent, length: int, size: int) -> AsyncIterator[bytes]:
    for position in range(0, length, size):
        yield content.read_at(position, min(size, length - position))


async def _of_files(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(next, pieces, b""):
        yield data
