"""The RPC Append: streams a client's content through the append state machine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NoReturn

import grpc
import grpc.aio
import structlog

from coranto.client.peer_status import PeerStatus
from coranto.errors import CorantoError, InvalidInput
from coranto.security.tokens import Capability, Claims
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import fast_path
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.receiving import Inbox, MinRateGuard
from coranto_broker.append.states import State
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.handlers.append_answers import Answers
from coranto_broker.handlers.errors import concerns
from coranto_broker.handlers.first_message import first_message
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.pipeline import ReplicationFailed
from coranto_broker.replication.waiting_appends import Whole
from coranto_broker.rpc.content import AppendMessage, ContentMessage
from coranto_broker.rpc.rolled_back import RolledBack
from coranto_broker.rpc.source import MessageSource, require_readable

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

THROTTLE_QUANTUM_SECONDS = 0.05
_log = structlog.get_logger(__name__)


async def serve(broker: Broker, context: MessageSource, claims: Claims) -> pb.AppendResponse:
    """Serve one append. Cancelling it (the client went away) rolls back content that has not been proposed."""
    return pb.AppendResponse.FromString(await serve_encoded(broker, context, claims, Answers()))


async def serve_encoded(broker: Broker, context: MessageSource, claims: Claims, answers: Answers) -> bytes:
    """Serve one append, and return the encoded response. Cancelling it rolls back content not yet proposed."""
    begun = broker.clock.monotonic()
    request = await first_message(context, broker.receive_budget.first_message_deadlines)
    if not isinstance(request, pb.AppendRequest):
        _refuse_first(request)
    candidate = fast_path.candidate(broker, request) if claims is UNRESTRICTED or claims.covers_all else None
    if candidate is None or candidate.after is None:
        if not is_acceptable(broker, request, request.journal, claims):
            header = broker.unrouted_header(broker.keyspace.state)
            return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=header).SerializeToString()
        if not request.journal:
            _refuse_first(request)
    concerns(request.journal)
    inbox = broker.receive_budget.open(context)
    state = State.ACQUIRE_PIPELINE
    whole: Whole | None = None
    try:
        if candidate is not None:
            line = candidate.resolution.require_replica.line
            whole = await inbox.receive(request, line, broker.settings.min_append_rate, broker.clock)
            committed = fast_path.commit(broker, candidate, request, whole) if whole is not None else None
            if committed is not None:
                state = State.FINISHED
                _count(broker, committed.length, begun)
                return answers.encode(committed)
        fsm = AppendFsm(broker, request, claims)
        try:
            if candidate is not None:
                fsm.whole = whole
            elif await fsm.run(until=State.ACQUIRE_PIPELINE):
                assert fsm.resolution is not None
                line = fsm.resolution.require_replica.line
                fsm.whole = await inbox.receive(request, line, broker.settings.min_append_rate, broker.clock)
            return (await _drive(broker, fsm, inbox, begun)).SerializeToString()
        finally:
            state = fsm.state
            fsm.release()
    except (ReplicationFailed, RolledBack):
        state = State.ERROR
        raise
    finally:
        inbox.close()
        broker.metrics.appends.count(state)


async def _drive(broker: Broker, fsm: AppendFsm, inbox: Inbox, begun: float) -> pb.AppendResponse:
    """Take an append through its remaining states."""
    if await fsm.run():
        await fsm.prepare_stream()
        if fsm.whole is not None:
            await _commit_whole(broker, fsm, fsm.whole)
        else:
            await _stream(broker, fsm, inbox)
        await fsm.finish()
    if fsm.state is State.PROXY:
        return await _proxy(broker, fsm, inbox)
    return _response(broker, fsm, begun)


def _refuse_first(message: object) -> NoReturn:
    """Raise InvalidInput that says what is wrong with the first message, or that none came."""
    require_readable(message)
    if isinstance(message, (ContentMessage, pb.AppendRequest)):
        raise InvalidInput("the first message of an append must name its journal", field="AppendRequest.journal")
    raise InvalidInput("the stream ended before its first message", field="AppendRequest")


def _count(broker: Broker, size: int, begun: float) -> None:
    """Count an append that has committed."""
    metrics = broker.metrics
    metrics.append_bytes.value += size
    metrics.append_seconds.observe(broker.clock.monotonic() - begun)


def _response(broker: Broker, fsm: AppendFsm, begun: float) -> pb.AppendResponse:
    if fsm.error is not None:
        raise fsm.error
    resolution = fsm.resolution
    assert resolution is not None
    if fsm.state is State.ERROR:
        response = pb.AppendResponse(status=fsm.status, header=resolution.header)
        if fsm.status == pb.REGISTER_MISMATCH:
            response.registers.CopyFrom(fsm.registers)
        response.store_health_error = fsm.store_health_error
        return response
    assert fsm.commit is not None
    response = pb.AppendResponse(  # Messages as arguments take twice as long as CopyFrom.
        status=fsm.status, total_chunks=fsm.total_chunks, delayed_chunks=fsm.delayed_chunks
    )
    response.header.CopyFrom(resolution.header)
    response.commit.CopyFrom(fsm.commit.to_wire())
    response.registers.CopyFrom(fsm.registers)
    _count(broker, fsm.commit.length, begun)
    return response


def _start_flow(broker: Broker, fsm: AppendFsm, min_rate: int) -> FlowControl:
    resolution = fsm.resolution
    assert resolution is not None
    max_rate = resolution.spec.max_append_rate
    if broker.settings.max_append_rate:
        max_rate = min(max_rate or broker.settings.max_append_rate, broker.settings.max_append_rate)
    flow = resolution.require_replica.flow_control
    flow.start(min_rate, max_rate, broker.clock.monotonic())
    return flow


async def _pay(broker: Broker, fsm: AppendFsm, flow: FlowControl, size: int) -> None:
    """Account for a chunk, and wait while the journal's rate is exhausted."""
    resolution = fsm.resolution
    assert resolution is not None
    flow.chunk(size)
    while flow.throttled:
        await broker.clock.sleep(min(flow.seconds_until_paid(), THROTTLE_QUANTUM_SECONDS))
        flow.tick(broker.clock.monotonic())
        if resolution.invalidated is not None and resolution.invalidated.fired:
            flow.lift()
    fsm.total_chunks, fsm.delayed_chunks = flow.total_chunks, flow.delayed_chunks


async def _commit_whole(broker: Broker, fsm: AppendFsm, whole: Whole) -> None:
    """Commit an append that was received ahead, together with waiting members of its group."""
    flow = _start_flow(broker, fsm, 0)
    if whole.content:
        await _pay(broker, fsm, flow, len(whole.content))
    fsm.total_chunks = whole.chunks
    fsm.commit_whole(flow)


async def _stream(broker: Broker, fsm: AppendFsm, inbox: Inbox) -> None:
    """Pass the client's messages to the state machine until it wants no more."""
    flow = _start_flow(broker, fsm, broker.settings.min_append_rate)
    guard = MinRateGuard(flow, broker.clock, broker.receive_budget.deadlines)
    try:
        while True:
            message = await guard.read(inbox)
            if message is None:
                await fsm.written()
                fsm.client_ended()
                return
            if size := len(message.content):
                await _pay(broker, fsm, flow, size)
            if not fsm.client_sent(message):
                return
            await fsm.drain()
            flow.forgive(broker.clock.monotonic())
    except CorantoError as error:
        fsm.client_failed(error)
    finally:
        guard.close()


def _protobuf(message: AppendMessage) -> pb.AppendRequest:
    return pb.AppendRequest(content=bytes(message.content)) if isinstance(message, ContentMessage) else message


async def _proxy(broker: Broker, fsm: AppendFsm, inbox: Inbox) -> pb.AppendResponse:
    """Forward an append to the primary with our resolution, and return the primary's response.

    If the primary becomes unavailable before the commit was forwarded, it has not applied the append. The response then
    has the status NO_JOURNAL_PRIMARY_BROKER, so that the client knows. That is normal after a primary's death until
    another broker takes over.
    """
    resolution = fsm.resolution
    assert resolution is not None
    request = pb.AppendRequest()
    request.CopyFrom(fsm.request)
    request.header.CopyFrom(resolution.header)
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
                while (message := await inbox.read()) is not None:
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
            _log.warning("append.primary_unreachable", journal=request.journal, error=error.details())
            header = broker.unrouted_header(broker.keyspace.state)
            header.route.CopyFrom(resolution.header.route)
            return pb.AppendResponse(status=pb.NO_JOURNAL_PRIMARY_BROKER, header=header)
        finally:
            call.cancel()
