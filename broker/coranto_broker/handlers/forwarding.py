"""Forwarding of appends to the journal's primary, over a stream for small appends where the primary serves one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio
import structlog

from coranto.client.append_stream import MAX_CONTENT_BYTES, NotSent
from coranto.client.peer_status import PeerStatus
from coranto.security.tokens import Capability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.replication.resolver import Resolution
from coranto_broker.replication.waiting_appends import Whole
from coranto_broker.rpc.content import AppendMessage, ContentMessage

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

_log = structlog.get_logger(__name__)


class Messages(Protocol):
    """An append's messages after the first."""

    async def read(self) -> AppendMessage | None:
        """Return the next message, or None at the end."""
        ...


class _WholeMessages:
    """The messages of an append of which everything is here."""

    def __init__(self, whole: Whole) -> None:
        messages = (whole.content, b"") if whole.content else (b"",)
        self._messages = deque(ContentMessage(content) for content in messages)

    async def read(self) -> AppendMessage | None:
        return self._messages.popleft() if self._messages else None


async def forward_whole(broker: Broker, fsm: AppendFsm, whole: Whole) -> pb.AppendResponse:
    """Forward an append of which everything is here, as `forward` does. Small ones share a stream to the primary."""
    resolution = fsm.resolution
    assert resolution is not None
    if len(whole.content) > MAX_CONTENT_BYTES:
        return await forward(broker, fsm, _WholeMessages(whole))
    metadata = broker.peers.metadata(Capability.APPEND, fsm.request.journal)
    with broker.peers.calling(resolution.header):
        streams = broker.peers.append_streams(resolution.header)
        try:
            stream = await streams.get(metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return _unreachable(broker, fsm.request.journal, resolution, error.details())
        if stream is not None:
            request = _forwarded(fsm.request, resolution)
            try:
                encoded = await stream.append(request, bytes(whole.content), metadata)
            except NotSent as error:
                return _unreachable(broker, fsm.request.journal, resolution, str(error))
            return pb.AppendResponse.FromString(encoded)
    return await forward(broker, fsm, _WholeMessages(whole))


def _forwarded(request: pb.AppendRequest, resolution: Resolution) -> pb.AppendRequest:
    """Return a request for the primary, with the resolution by which it is forwarded."""
    forwarded = pb.AppendRequest()
    forwarded.CopyFrom(request)
    forwarded.header.CopyFrom(resolution.header)
    return forwarded


def _unreachable(broker: Broker, journal: str, resolution: Resolution, error: str | None) -> pb.AppendResponse:
    """Return the response to an append of which the primary was told nothing, or not its end."""
    _log.warning("append.primary_unreachable", journal=journal, error=error)
    header = broker.unrouted_header(broker.keyspace.state)
    header.route.CopyFrom(resolution.header.route)
    return pb.AppendResponse(status=pb.NO_JOURNAL_PRIMARY_BROKER, header=header)


def _protobuf(message: AppendMessage) -> pb.AppendRequest:
    return pb.AppendRequest(content=bytes(message.content)) if isinstance(message, ContentMessage) else message


async def forward(broker: Broker, fsm: AppendFsm, source: Messages) -> pb.AppendResponse:
    """Forward an append to the primary with our resolution, and return the primary's response.

    If the primary becomes unavailable before the commit was forwarded, it has not applied the append. The response then
    has the status NO_JOURNAL_PRIMARY_BROKER, so that the client knows. That is normal after a primary's death until
    another broker takes over.
    """
    resolution = fsm.resolution
    assert resolution is not None
    request = _forwarded(fsm.request, resolution)
    metadata = broker.peers.metadata(Capability.APPEND, request.journal)
    may_commit = False
    with broker.peers.calling(resolution.header):
        call = broker.peers.stub(resolution.header).Append(metadata=metadata)
        ended = PeerStatus(call)
        try:
            # The primary may answer, and so end the call, before everything is sent. Its answer then says more than the
            # error of sending the rest.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                await call.write(request)
                while (message := await source.read()) is not None:
                    forwarded = _protobuf(message)
                    may_commit = may_commit or not forwarded.content
                    await call.write(forwarded)
                await call.done_writing()
            response: pb.AppendResponse = await call
            return response
        except grpc.aio.AioRpcError as failed:
            error = await ended.told(failed)
            if may_commit or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise error from failed
            return _unreachable(broker, fsm.request.journal, resolution, error.details())
        finally:
            call.cancel()
