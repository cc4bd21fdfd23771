"""The RPC Append: one append to a journal, which a broker that is not the primary forwards to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio
import structlog

from coranto.client.append.stream import MAX_CONTENT_BYTES, NotSent
from coranto.client.peer_status import PeerStatus
from coranto.errors import InvalidInput
from coranto.security.tokens import Capability, Claims
from coranto.tracing import carried, carried_by
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.entry import recognize, resolve
from coranto_broker.append.queue import queue_of
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.receiving import Inbox
from coranto_broker.append.states import State
from coranto_broker.handlers.errors import set_logged_journal
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.rpc.first_message import first_message
from coranto_broker.rpc.source import MessageSource, require_readable

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

_log = structlog.get_logger(__name__)


async def serve(broker: Broker, context: MessageSource, claims: Claims, caller: str) -> pb.AppendResponse:
    """Serve one append. Cancelling it rolls back content that was not proposed."""
    return pb.AppendResponse.FromString(await serve_encoded(broker, context, claims, caller))


async def serve_encoded(broker: Broker, context: MessageSource, claims: Claims, caller: str = "") -> bytes:
    """Serve one append, and return the encoded response. Cancelling it rolls back content that was not proposed.

    `caller` has been admitted by its quota; it is empty if there is none.
    """
    begun = broker.clock.monotonic()
    request = await first_message(context, broker.receive_budget.first_message_deadlines)
    if not isinstance(request, pb.AppendRequest):
        _refuse_first(request)
    append = QueuedAppend(request, claims, begun=begun)
    if not recognize(broker.appends, append):
        if not is_acceptable(broker, request, request.journal, claims):
            return broker.journal_not_found()
        if not request.journal:
            _refuse_first(request)
    set_logged_journal(request.journal)
    append.caller = caller
    if broker.tracer is not None:
        append.span = broker.tracer.continued("append", request.journal, carried_by(context))
    host, inbox = broker.appends, Inbox(context, broker.receive_budget, broker.settings.min_append_rate, broker.clock)
    append.inbox = inbox
    try:
        if append.resolution is None and (refusal := await resolve(host, append)) is not None:
            append.settle(refusal)
        else:
            queue = queue_of(append.resolved.require_replica)
            await inbox.receive(append, queue.arrivals)
            if append.content is not None:
                broker.quotas.count(caller, len(append.content))
            queue.enqueue(append)
        outcome = append.outcome if isinstance(append.outcome, AppendOutcome) else await append.settled()
        if append.state is State.PROXY:
            return await forward(broker, append, inbox.read)
        return outcome.encode()
    except BaseException as error:
        if append.span is not None:
            append.span.end(error)
        raise
    finally:
        append.leave()
        inbox.close()
        host.ended(append)


def _refuse_first(message: object) -> NoReturn:
    """Raise InvalidInput for an invalid or missing first message."""
    require_readable(message)
    if isinstance(message, (ContentMessage, pb.AppendRequest)):
        raise InvalidInput("the first message of an append must name its journal", field="AppendRequest.journal")
    raise InvalidInput("the stream ended before its first message", field="AppendRequest")


async def forward(broker: Broker, append: QueuedAppend, read: Callable[[], Awaitable[AppendMessage | None]]) -> bytes:
    """Forward an append to the primary with this broker's resolution, and return the primary's encoded response.

    `read` returns its messages after the first, then None.

    If the primary becomes unavailable before the commit was forwarded, it has not applied the append. The response then
    has the status NO_JOURNAL_PRIMARY_BROKER, as usual between a primary's death and its replacement.
    """
    header, may_commit = append.resolved.header, False
    metadata = broker.peers.metadata(Capability.APPEND, append.request.journal)
    with broker.peers.calling(header):
        call = broker.peers.stub(header).Append(metadata=carried(metadata, append.span))
        ended = PeerStatus(call)
        try:
            # The primary may end the call before everything is sent. Its response is then more useful than the error
            # of the send.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                await call.write(_forwarded(append))
                while (message := await read()) is not None:
                    if append.content is None:  # Otherwise the quota has counted it.
                        await broker.quotas.pace_append(append.caller, len(message.content))
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
            return _unreachable(broker, append, error.details())
        finally:
            call.cancel()


async def forward_buffered(broker: Broker, append: QueuedAppend) -> bytes:
    """Forward an append with buffered content, like `forward`. Small appends share a stream to the primary."""
    header, content = append.resolved.header, append.content
    assert content is not None
    if len(content) <= MAX_CONTENT_BYTES:
        metadata = broker.peers.metadata(Capability.APPEND, append.request.journal)
        with broker.peers.calling(header):
            streams = broker.peers.append_streams(header)
            try:
                stream = await streams.get(metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return _unreachable(broker, append, error.details())
            if stream is not None:
                try:
                    traceparent = "" if append.span is None else append.span.traceparent
                    return await stream.append(_forwarded(append), bytes(content), metadata, traceparent)
                except NotSent as error:
                    return _unreachable(broker, append, str(error))
    messages = deque(ContentMessage(each) for each in ((content, b"") if content else (b"",)))

    async def read() -> AppendMessage | None:
        return messages.popleft() if messages else None

    return await forward(broker, append, read)


def _forwarded(append: QueuedAppend) -> pb.AppendRequest:
    """Return the request for the primary, with the resolution's header."""
    forwarded = pb.AppendRequest()
    forwarded.CopyFrom(append.request)
    forwarded.header.CopyFrom(append.resolved.header)
    return forwarded


def _unreachable(broker: Broker, append: QueuedAppend, error: str | None) -> bytes:
    """Return the response to an append that the primary did not get, or not completely."""
    _log.warning("append.primary_unreachable", journal=append.request.journal, error=error)
    header = broker.unrouted_header(broker.keyspace.state)
    header.route.CopyFrom(append.resolved.header.route)
    return pb.AppendResponse(status=pb.NO_JOURNAL_PRIMARY_BROKER, header=header).SerializeToString()
