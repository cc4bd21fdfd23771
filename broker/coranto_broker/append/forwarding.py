"""Forwarding of appends to the journal's primary, over a stream for small appends if the primary serves one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio
import structlog

from coranto.client.append.stream import MAX_CONTENT_BYTES, NotSent
from coranto.client.peer_status import PeerStatus
from coranto.security.tokens import Capability
from coranto.tracing import carried
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queued_append import QueuedAppend
from coranto_broker.quotas import Quotas
from coranto_broker.replication.peers import Peers
from coranto_broker.replication.resolver import JournalKeySpace, JournalState, Resolution
from coranto_broker.rpc.content import AppendMessage, ContentMessage

_log = structlog.get_logger(__name__)
ReadMessage = Callable[[], Awaitable[AppendMessage | None]]


class ForwardingEnvironment(Protocol):
    """The part of the broker that forwarding uses."""

    keyspace: JournalKeySpace
    peers: Peers
    quotas: Quotas

    def unrouted_header(self, state: JournalState) -> pb.Header:
        """Return the header for a response without a Route."""
        ...


async def forward_buffered(environment: ForwardingEnvironment, append: QueuedAppend) -> bytes:
    """Forward an append with buffered content, like `forward`. Small appends share a stream to the primary."""
    resolution, request, found = append.resolved, append.request, append.content
    assert found is not None
    if len(found.content) <= MAX_CONTENT_BYTES:
        metadata = environment.peers.metadata(Capability.APPEND, request.journal)
        with environment.peers.calling(resolution.header):
            streams = environment.peers.append_streams(resolution.header)
            try:
                stream = await streams.get(metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return _unreachable(environment, request.journal, resolution, error.details())
            if stream is not None:
                try:
                    traceparent = "" if append.span is None else append.span.traceparent
                    forwarded = _forwarded(request, resolution)
                    return await stream.append(forwarded, bytes(found.content), metadata, traceparent)
                except NotSent as error:
                    return _unreachable(environment, request.journal, resolution, str(error))
    messages = deque(ContentMessage(content) for content in ((found.content, b"") if found.content else (b"",)))

    async def read() -> AppendMessage | None:
        return messages.popleft() if messages else None

    return await forward(environment, append, read)


def _forwarded(request: pb.AppendRequest, resolution: Resolution) -> pb.AppendRequest:
    """Return a request for the primary, with the resolution's header."""
    forwarded = pb.AppendRequest()
    forwarded.CopyFrom(request)
    forwarded.header.CopyFrom(resolution.header)
    return forwarded


def _unreachable(environment: ForwardingEnvironment, journal: str, resolution: Resolution, error: str | None) -> bytes:
    """Return the response to an append that the primary did not get, or not completely."""
    _log.warning("append.primary_unreachable", journal=journal, error=error)
    header = environment.unrouted_header(environment.keyspace.state)
    header.route.CopyFrom(resolution.header.route)
    return pb.AppendResponse(status=pb.NO_JOURNAL_PRIMARY_BROKER, header=header).SerializeToString()


async def forward(environment: ForwardingEnvironment, append: QueuedAppend, read: ReadMessage) -> bytes:
    """Forward an append to the primary with this broker's resolution, and return the primary's encoded response.

    `read` returns its messages after the first, then None.

    If the primary becomes unavailable before the commit was forwarded, it has not applied the append. The response then
    has the status NO_JOURNAL_PRIMARY_BROKER, as usual between a primary's death and its replacement.
    """
    resolution = append.resolved
    request = _forwarded(append.request, resolution)
    metadata = environment.peers.metadata(Capability.APPEND, request.journal)
    may_commit = False
    with environment.peers.calling(resolution.header):
        call = environment.peers.stub(resolution.header).Append(metadata=carried(metadata, append.span))
        ended = PeerStatus(call)
        try:
            # The primary may end the call before everything is sent. Its answer then says more than the error of
            # sending the rest.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                await call.write(request)
                while (message := await read()) is not None:
                    if append.content is None:  # Otherwise the quota has counted it.
                        await environment.quotas.pace_append(append.caller, len(message.content))
                    may_commit = may_commit or not message.content
                    if isinstance(message, ContentMessage):
                        message = pb.AppendRequest(content=bytes(message.content))
                    await call.write(message)
                await call.done_writing()
            response: pb.AppendResponse = await call
            return response.SerializeToString()
        except grpc.aio.AioRpcError as failed:
            error = await ended.error_of(failed)
            if may_commit or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise error from failed
            return _unreachable(environment, request.journal, resolution, error.details())
        finally:
            call.cancel()
