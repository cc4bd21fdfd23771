"""The RPC Read: serves content from local spools and, for clients without access to stores, from the stores.

The response stream has a metadata message for each fragment (the first with the header), followed by the fragment's
content in chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import structlog

from coranto.errors import CorruptData, FragmentNotFound, StoreError
from coranto.fragments.fragment import Fragment
from coranto.journal_ids import is_same
from coranto.security.tokens import Capability, Claims
from coranto.specs.validation import may_read
from coranto.tracing import TraceSpan, carried, carried_by
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.cache import CachedContent
from coranto_broker.fragments.index import FIRST_REFRESH_TIMEOUT_SECONDS, FragmentIndex, IndexEntry
from coranto_broker.handlers import kept_content
from coranto_broker.handlers.errors import set_logged_journal
from coranto_broker.handlers.gaps import GapReader
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.rpc.source import MessageSink, SinkComplete

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.replication.replica import Replica
    from coranto_broker.replication.resolver import Resolution

URL_TTL_SECONDS = 60.0
_log = structlog.get_logger(__name__)


async def serve(broker: Broker, request: pb.ReadRequest, context: MessageSink, claims: Claims, caller: str) -> None:
    """Serve a read from this broker, or proxy it to a broker that holds the journal.

    Raises TooManyReads for a blocking read if `caller` has too many under way, and QuotaExceeded.
    """
    limited = caller if broker.quotas.apply_to(claims) else ""
    await broker.quotas.admit_read(limited)
    if not request.block:
        await _serve(broker, request, context, claims, limited)
        return
    with broker.blocking_reads.under_way(caller), broker.quotas.stream(limited):
        await _serve(broker, request, context, claims, limited)


async def _serve(broker: Broker, request: pb.ReadRequest, context: MessageSink, claims: Claims, limited: str) -> None:
    if not is_acceptable(broker, request, request.journal, claims):
        header = broker.unrouted_header(broker.keyspace.state)
        await context.write(pb.ReadResponse(status=pb.JOURNAL_NOT_FOUND, header=header))
        return
    set_logged_journal(request.journal)
    span = None
    if broker.tracer is not None:
        span = broker.tracer.continued("read", request.journal, carried_by(context))
    context = broker.quotas.paced(context, limited)
    with span or nullcontext(), contextlib.suppress(SinkComplete):
        if span is not None:
            span.note(begin=request.offset)
        if request.HasField("content_sum") and await kept_content.send(broker, request, context, claims):
            return
        resolution = await broker.resolver.resolve(
            request.journal,
            may_proxy=not request.do_not_proxy,
            require_primary=False,
            min_revision=request.min_etcd_revision,
            proxy_header=request.header if request.HasField("header") else None,
            claims=claims,
        )
        status = resolution.status
        if status == pb.OK and not may_read(resolution.spec):
            status = pb.NOT_ALLOWED
        if status != pb.OK:
            await context.write(pb.ReadResponse(status=status, header=resolution.header))
        elif resolution.is_local:
            await _serve_local(broker, resolution, request, context)
        else:
            await _proxy(broker, resolution, request, context, span)


async def _serve_local(broker: Broker, resolution: Resolution, request: pb.ReadRequest, context: MessageSink) -> None:
    replica = resolution.require_replica
    index = replica.index
    broker.metrics.reads.inc()
    if await _is_of_another(replica, request):
        await context.write(
            pb.ReadResponse(
                status=pb.OFFSET_NOT_YET_AVAILABLE,
                header=resolution.header,
                offset=request.offset,
                write_head=index.head,
                journal_id=replica.journal_id,
            )
        )
        return
    reader = GapReader(broker, resolution, request)
    header: pb.Header | None = resolution.header
    offset = request.offset
    end = request.end_offset
    while True:
        async with AsyncExitStack() as loans:
            found = await reader.find(offset, loans)
            metadata = pb.ReadResponse(
                offset=found.offset, write_head=found.write_head, header=header, journal_id=replica.journal_id
            )
            header = None
            entry = found.entry
            if entry is None:
                metadata.status = pb.OFFSET_NOT_YET_AVAILABLE
                await context.write(metadata)
                return
            metadata.fragment.CopyFrom(entry.fragment.to_wire())
            with _relist_if_missing(index):
                content = found.copy
                if entry.local is not None:
                    # Borrow the file before any await, so that it stays readable if the fragment is removed.
                    content = loans.enter_context(entry.local.borrow())
                if entry.fragment.backing_store:
                    metadata.fragment_url = await _signed_url(broker, entry.fragment)
                await context.write(metadata)
                offset = found.offset
                if request.metadata_only or (content is None and request.do_not_proxy) or (end and offset >= end):
                    return
                stop = min(found.end, end) if end else found.end
                await _send(broker, entry, content, offset, stop, context)
        offset = stop
        if offset == end:
            return


async def _is_of_another(replica: Replica, request: pb.ReadRequest) -> bool:
    """Return True if the reader's offset belongs to another journal of the same name.

    Waits briefly for the first attempt to recover the spool, which finds the id of this journal.
    """
    if not request.journal_id:
        return False
    if not replica.journal_id:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_REFRESH_TIMEOUT_SECONDS):
                await replica.wait_recovery_attempted()
    return not is_same(request.journal_id, request.offset, replica.journal_id)


@contextmanager
def _relist_if_missing(index: FragmentIndex) -> Iterator[None]:
    """Request a listing of the stores if content of an index entry is missing or damaged."""
    try:
        yield
    except (FragmentNotFound, CorruptData):
        # The content was removed after the last listing, for example by retention; or it is damaged here, and another
        # replica may have stored it.
        index.found_missing()
        raise


async def _send(
    broker: Broker, entry: IndexEntry, here: CachedContent | None, offset: int, stop: int, context: MessageSink
) -> None:
    """Send the entry's content [offset, stop) in chunks, from `here` if given, otherwise from the store."""
    if here is not None:
        await _send_from(broker, here, entry, offset, stop, context)
        return
    async with broker.fragments.open(entry.fragment) as content:
        await _send_from(broker, content, entry, offset, stop, context)


async def _send_from(
    broker: Broker, content: CachedContent, entry: IndexEntry, offset: int, stop: int, context: MessageSink
) -> None:
    size = broker.settings.chunk_bytes
    while offset < stop:
        position, length = offset - entry.begin, min(size, stop - offset)
        data = content.read_at(position, length)
        if len(data) != length:
            raise OSError(f"fragment {entry.fragment.content_name} ends before offset {offset + length}")
        await context.write(pb.ReadResponse(offset=offset, content=data))
        broker.metrics.read_bytes.inc(length)
        offset += length


async def _signed_url(broker: Broker, fragment: Fragment) -> str:
    """Return a signed URL of the fragment, or "" if the store cannot sign one.

    Some stores need a request for each signature. Reads through brokers must work even if that request fails.
    """
    try:
        return await broker.stores.get(fragment.backing_store).sign_async(fragment, URL_TTL_SECONDS)
    except StoreError as error:
        _log.warning("fragment.url_not_signed", fragment=fragment.content_path, error=str(error))
        return ""


async def _proxy(
    broker: Broker, resolution: Resolution, request: pb.ReadRequest, context: MessageSink, span: TraceSpan | None
) -> None:
    """Proxy a read to a broker that holds the journal."""
    forwarded = pb.ReadRequest()
    forwarded.CopyFrom(request)
    forwarded.header.CopyFrom(resolution.header)
    metadata = broker.peers.metadata(Capability.READ, request.journal)
    with broker.peers.calling(resolution.header):
        call = broker.peers.stub(resolution.header).Read(forwarded, metadata=carried(metadata, span))
        broker.proxied[call] = None
        try:
            async for response in call:
                await context.write(response)
        finally:
            broker.proxied.pop(call, None)
            call.cancel()
