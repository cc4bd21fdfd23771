"""The steps by which every handler of appends takes one to its commit, and the response to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.states import State
from coranto_broker.handlers.append_answers import wire_of
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.waiting_appends import Whole

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

THROTTLE_QUANTUM_SECONDS = 0.05


def count(broker: Broker, size: int, begun: float) -> None:
    """Count an append that has committed."""
    metrics = broker.metrics
    metrics.append_bytes.value += size
    metrics.append_seconds.observe(broker.clock.monotonic() - begun)


def response_of(broker: Broker, fsm: AppendFsm, begun: float) -> pb.AppendResponse:
    """Return the response to an append that has ended. Raises its error."""
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
    response.durability.CopyFrom(wire_of(fsm.durability))
    if fsm.stored_end:
        response.durability.stored_end = fsm.stored_end
    count(broker, fsm.commit.length, begun)
    return response


def start_flow(broker: Broker, fsm: AppendFsm, min_rate: int) -> FlowControl:
    """Begin the flow control of an append, with the lowest rate of its client and the highest of its journal."""
    resolution = fsm.resolution
    assert resolution is not None
    max_rate = resolution.spec.max_append_rate
    if broker.settings.max_append_rate:
        max_rate = min(max_rate or broker.settings.max_append_rate, broker.settings.max_append_rate)
    flow = resolution.require_replica.flow_control
    flow.start(min_rate, max_rate, broker.clock.monotonic())
    return flow


async def pay(broker: Broker, fsm: AppendFsm, flow: FlowControl, size: int) -> None:
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


async def commit_whole(broker: Broker, fsm: AppendFsm, whole: Whole) -> None:
    """Commit an append that was received ahead, together with waiting members of its group."""
    flow = start_flow(broker, fsm, 0)
    if whole.content:
        await pay(broker, fsm, flow, len(whole.content))
    fsm.total_chunks = whole.chunks
    fsm.commit_whole(flow)
