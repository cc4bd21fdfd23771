"""Append: streams a client's content through the append state machine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc.aio

from coranto.auth import Capability, Claims
from coranto.effects import Clock
from coranto.errors import CorantoError, InvalidInput
from coranto.specs import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append_fsm import AppendFsm, State
from coranto_broker.flow_control import AppendUnderflow, FlowControl
from coranto_broker.handlers.errors import Source, concerns, next_message

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

THROTTLE_QUANTUM_SECONDS = 0.05
LATE_SECONDS = 0.25
"""A timer that fires later than this after its time says that this process was busy, not that the client was slow."""


async def serve(broker: Broker, context: Source, claims: Claims) -> pb.AppendResponse:
    """The whole life of one append. Cancelling it (the client went away) rolls back what has not been proposed."""
    begun = broker.clock.monotonic()
    request = await next_message(context, pb.AppendRequest)
    if request is None:
        raise InvalidInput("the stream ended before its first message", field="AppendRequest")
    validate(request)
    if not request.journal:
        raise InvalidInput("the first message of an append must name its journal", field="AppendRequest.journal")
    concerns(request.journal)
    fsm = AppendFsm(broker, request, claims)
    try:
        if await fsm.run():
            await _stream(broker, fsm, context)
            await fsm.finish()
    finally:
        fsm.release()
        broker.metrics.appends.labels(fsm.state.value).inc()
    if fsm.state is State.PROXY:
        return await _proxy(broker, fsm, context)
    return _response(broker, fsm, begun)


def _response(broker: Broker, fsm: AppendFsm, begun: float) -> pb.AppendResponse:
    if fsm.error is not None:
        raise fsm.error
    resolution = fsm.resolution
    assert resolution is not None
    response = pb.AppendResponse(status=fsm.status, header=resolution.header)
    if fsm.state is State.ERROR:
        if fsm.status == pb.REGISTER_MISMATCH:
            response.registers.CopyFrom(fsm.registers)
        response.store_health_error = fsm.store_health_error
        return response
    assert fsm.commit is not None
    flow = resolution.require_replica.flow_control
    response.commit.CopyFrom(fsm.commit.to_wire())
    response.registers.CopyFrom(fsm.registers)
    response.total_chunks, response.delayed_chunks = flow.total_chunks, flow.delayed_chunks
    broker.metrics.append_bytes.inc(fsm.commit.length)
    broker.metrics.append_seconds.observe(broker.clock.monotonic() - begun)
    return response


async def _stream(broker: Broker, fsm: AppendFsm, context: Source) -> None:
    """Feed the client's messages to the state machine until it wants no more."""
    resolution = fsm.resolution
    assert resolution is not None
    await fsm.prepare_stream()
    flow = resolution.require_replica.flow_control
    max_rate = resolution.spec.max_append_rate
    if broker.settings.max_append_rate:
        max_rate = min(max_rate or broker.settings.max_append_rate, broker.settings.max_append_rate)
    flow.start(broker.settings.min_append_rate, max_rate, broker.clock.monotonic())
    watchdog = _Watchdog(flow, broker.clock)
    try:
        while True:
            message = await watchdog.read(context)
            if message is None:
                fsm.client_ended()
                return
            if message.content:
                flow.chunk(len(message.content))
                while flow.throttled:
                    await broker.clock.sleep(min(flow.seconds_until_paid(), THROTTLE_QUANTUM_SECONDS))
                    flow.tick(broker.clock.monotonic())
                    if resolution.invalidated is not None and resolution.invalidated.fired:
                        flow.lift()
            if not fsm.client_sent(message):
                return
            if not fsm.local_only:
                await fsm.drain()
            flow.forgive(broker.clock.monotonic())
    except CorantoError as error:
        fsm.client_failed(error)
    finally:
        watchdog.close()


class _Watchdog:
    """Reads a client's messages, and raises AppendUnderflow when they come too slowly.

    It costs one timer for the whole append, not one per message.
    """

    def __init__(self, flow: FlowControl, clock: Clock) -> None:
        self._flow = flow
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._reading = False
        self._underflow: AppendUnderflow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    async def read(self, context: Source) -> pb.AppendRequest | None:
        """The client's next message, or None at the end of its stream."""
        self._reading = True
        try:
            message = await next_message(context, pb.AppendRequest)
        except asyncio.CancelledError:
            if self._underflow is None or self._task is None or self._task.uncancel() > 0:
                raise
            raise self._underflow from None
        finally:
            self._reading = False
        self._flow.tick(self._clock.monotonic())
        return message

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        seconds = self._flow.seconds_until_underflow()
        if seconds != float("inf"):
            self._due = self._loop.time() + seconds
            self._timer = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        now = self._clock.monotonic()
        if not self._reading or self._loop.time() - self._due > LATE_SECONDS:
            self._flow.forgive(now)
        try:
            self._flow.tick(now)
        except AppendUnderflow as underflow:
            self._underflow = underflow
            assert self._task is not None
            self._task.cancel()
            return
        self._arm()


async def _proxy(broker: Broker, fsm: AppendFsm, context: Source) -> pb.AppendResponse:
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
                while (message := await next_message(context, pb.AppendRequest)) is not None:
                    await call.write(message)
                await call.done_writing()
            response: pb.AppendResponse = await call
            return response
        finally:
            call.cancel()
