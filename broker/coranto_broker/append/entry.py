"""The way of an append to its journal's queue: it is resolved, without a wait or by the state machine."""

from __future__ import annotations

from coranto.errors import CorantoError
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append import registers as of_registers
from coranto_broker.append.decision import is_plain
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.host import AppendHost
from coranto_broker.append.queue import queue_of
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import State
from coranto_broker.authorization import UNRESTRICTED


def recognize(host: AppendHost, append: QueuedAppend) -> bool:
    """Resolve an append without a wait if that is possible. Returns True if its request is certain to be well-formed.

    Its journal then exists, so its name is valid.
    """
    request = append.request
    if (append.claims is not UNRESTRICTED and not append.claims.covers_all) or request.HasField("header"):
        return False
    resolution = host.resolver.known(request.journal, request.min_etcd_revision)
    if resolution is None or resolution.replica is None or resolution.status != pb.OK:
        return False
    pipeline = resolution.replica.pipeline.at_rest
    if pipeline is None or not pipeline.fits(resolution):
        if resolution.is_local:
            append.resolution = resolution
        return False
    append.resolution = resolution
    if request.offset or request.at_start or request.suspend:
        return False
    before = append.met = pipeline.spool.registers
    append.foreseen = before if is_plain(request) else of_registers.replaced(request, before)
    return append.foreseen is not None


async def resolve(host: AppendHost, append: QueuedAppend) -> AppendOutcome | CorantoError | None:
    """Resolve an append that is in no queue. Returns its outcome if it is refused, or is to be forwarded."""
    if append.resolution is None:
        fsm = AppendFsm(host, append)
        if not await fsm.run(State.ACQUIRE_PIPELINE):
            return fsm.outcome
    return None


async def run_buffered(host: AppendHost, append: QueuedAppend) -> AppendOutcome:
    """Take an append whose content is buffered to its outcome. Raises its error."""
    try:
        if (outcome := await resolve(host, append)) is None:
            queue_of(append.resolved.require_replica).enqueue(append)
        else:
            append.settle(outcome)
        return await append.settled()
    finally:
        append.leave()
