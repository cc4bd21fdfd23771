"""Append: streams a client's content through the append state machine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc.aio

from coranto.auth import Capability, Claims
from coranto.errors import CorantoError, InvalidInput
from coranto.specs import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append_fsm import AppendFsm, State
from coranto_broker.content import AppendMessage, Content
from coranto_broker.flow_control import FlowControl
from coranto_broker.group_commit import Whole
from coranto_broker.handlers.errors import Source, concerns, next_message
from coranto_broker.handlers.receiving import Inbox, Watchdog

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

THROTTLE_QUANTUM_SECONDS = 0.05


async def serve(broker: Broker, context: Source, claims: Claims) -> pb.AppendResponse:
    """The whole life of one append. Cancelling it (the client went away) rolls back what has not been proposed."""
    begun = broker.clock.monotonic()
    request = await next_message(context, pb.AppendRequest)
    if request is None:
        raise InvalidInput("the stream ended before its first message", field="AppendRequest")
    if not isinstance(request, Content):
        validate(request)
    if isinstance(request, Content) or not request.journal:
        raise InvalidInput("the first message of an append must name its journal", field="AppendRequest.journal")
    concerns(request.journal)
    fsm = AppendFsm(broker, request, claims)
    inbox = broker.ahead.open(context)
    try:
        if await fsm.run(until=State.ACQUIRE_PIPELINE):
            assert fsm.resolution is not None
            line = fsm.resolution.require_replica.line
            fsm.whole = await inbox.receive(request, line, broker.settings.min_append_rate, broker.clock)
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
    finally:
        fsm.release()
        inbox.close()
        broker.metrics.append_ended(fsm.state.value)


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
    response = pb.AppendResponse(  # Messages as arguments would take twice as long as to copy them.
        status=fsm.status, total_chunks=fsm.total_chunks, delayed_chunks=fsm.delayed_chunks
    )
    response.header.CopyFrom(resolution.header)
    response.commit.CopyFrom(fsm.commit.to_wire())
    response.registers.CopyFrom(fsm.registers)
    broker.metrics.append_bytes.inc(fsm.commit.length)
    broker.metrics.append_seconds.observe(broker.clock.monotonic() - begun)
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
    """Commit what was received ahead, and what waits to go along with it."""
    flow = _start_flow(broker, fsm, 0)
    if whole.content:
        await _pay(broker, fsm, flow, len(whole.content))
    fsm.total_chunks = whole.chunks
    fsm.commit_whole(flow)


async def _stream(broker: Broker, fsm: AppendFsm, inbox: Inbox) -> None:
    """Feed the client's messages to the state machine until it wants no more."""
    flow = _start_flow(broker, fsm, broker.settings.min_append_rate)
    watchdog = Watchdog(flow, broker.clock, broker.ahead.rota)
    try:
        while True:
            message = await watchdog.read(inbox)
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
        watchdog.close()


def _protobuf(message: AppendMessage) -> pb.AppendRequest:
    return pb.AppendRequest(content=bytes(message.content)) if isinstance(message, Content) else message


async def _proxy(broker: Broker, fsm: AppendFsm, inbox: Inbox) -> pb.AppendResponse:
    """Forward an append to the primary, with what was resolved, and its answer back."""
    resolution = fsm.resolution
    assert resolution is not None
    request = pb.AppendRequest()
    request.CopyFrom(fsm.request)
    request.header.CopyFrom(resolution.header)
    metadata = broker.peers.metadata(Capability.APPEND, request.journal)
    with broker.peers.calling(resolution.header):
        call = broker.peers.stub(resolution.header).Append(metadata=metadata)
        try:
            # The primary may answer, and so end the call, before all was sent: what then fails to be sent says less
            # about it than the answer does.
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
                await call.write(request)
                while (message := await inbox.read()) is not None:
                    await call.write(_protobuf(message))
                await call.done_writing()
            response: pb.AppendResponse = await call
            return response
        finally:
            call.cancel()
