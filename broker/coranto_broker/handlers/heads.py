"""The RPC Heads: tells the heads of many journals at once.

The broker answers for the journals that it is primary of, and asks the primaries of the others, each once. If a primary
does not answer, this broker tells what its own replica knows, or why nothing is known.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc
import grpc.aio
import structlog

from coranto import labels
from coranto.coordination.keyspace_state import Item
from coranto.errors import CorantoError
from coranto.security.tokens import Capability, Claims
from coranto.specs.validation import may_read, may_write, validate
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import HeadsRequest, HeadsResponse, JournalHead
from coranto_broker.handlers.errors import Context
from coranto_broker.replication.replica import Replica

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.replication.resolver import JournalState

HEADS_PER_RESPONSE: Final = 200
PEER_SECONDS: Final = 10.0
"""The longest wait for the heads of another broker."""
LISTING_SECONDS: Final = 5.0
"""The longest wait, in all, for the first listings of stores. Usually there is none."""
VERSION: Final = importlib.metadata.version("coranto")
_log = structlog.get_logger(__name__)


async def serve(broker: Broker, request: HeadsRequest, context: Context, claims: Claims) -> None:
    """Send the heads of the matching journals. Raises InvalidInput for a selector that is not valid."""
    selector = labels.rewrite_legacy_prefix(request.selector)
    validate(pb.ListRequest(selector=selector))
    if request.min_etcd_revision > broker.keyspace.known_revision:
        await broker.resolver.wait_for_revision(request.min_etcd_revision)
    state = broker.keyspace.state
    await context.write(
        HeadsResponse(status=pb.OK, header=broker.unrouted_header(state), version=VERSION, time=broker.clock.now())
    )
    mine, theirs, nobodys = _by_primary(broker, state, selector, claims)
    asked = [asyncio.ensure_future(_ask(broker, endpoint, selector)) for endpoint in theirs if not request.do_not_proxy]
    try:
        await _wait_listed(broker, mine)
        await _send(context, (head_of(broker, state, item) for item in mine))
        if request.do_not_proxy:
            return
        await _send(context, (head_of(broker, state, item) for item in nobodys))
        for items, answer in zip(theirs.values(), asked, strict=True):
            told = await answer
            await _send(context, (_other(broker, state, item, told) for item in items))
    finally:
        for task in asked:
            task.cancel()


_Items = list[Item[pb.JournalSpec]]


def _by_primary(
    broker: Broker, state: JournalState, selector: pb.LabelSelector, claims: Claims
) -> tuple[_Items, dict[str, _Items], _Items]:
    """Return the matching journals of this broker, those of others by endpoint, and those without a primary."""
    matches = labels.matcher(selector)
    mine: _Items = []
    theirs: dict[str, _Items] = {}
    nobodys: _Items = []
    for item in state.items:
        if not matches(labels.with_meta(item.id, item.spec.labels)) or not claims.covers(item.id, item.spec.labels):
            continue
        primary = next((each for each in state.assignments_in_key_order(item.id) if each.slot == 0), None)
        if primary is None:
            nobodys.append(item)
        elif primary.member == broker.member:
            mine.append(item)
        else:
            member = state.member(primary.member)
            endpoint = state.entities.endpoint(member.spec) if member is not None else ""
            theirs.setdefault(endpoint, []).append(item)
    return mine, theirs, nobodys


async def _wait_listed(broker: Broker, items: _Items) -> None:
    deadline = broker.clock.monotonic() + LISTING_SECONDS
    for item in items:
        replica = broker.resolver.replica_of(item.id)
        if replica is not None and not replica.index.refreshed:
            try:
                await replica.index.wait_refreshed(max(0.0, deadline - broker.clock.monotonic()))
            except CorantoError:
                continue  # The replica is gone. Its head will say so.


async def _send(context: Context, heads: Iterable[JournalHead]) -> None:
    response = HeadsResponse()
    for head in heads:
        response.heads.append(head)
        if len(response.heads) == HEADS_PER_RESPONSE:
            await context.write(response)
            response = HeadsResponse()
    if response.heads:
        await context.write(response)


@dataclass(slots=True)
class _Told:
    """Another broker's heads by journal, or the reason why it gives none. `lacks` is true for one of Gazette's."""

    heads: dict[str, JournalHead] = field(default_factory=dict)
    problem: str = ""
    lacks: bool = False


async def _ask(broker: Broker, endpoint: str, selector: pb.LabelSelector) -> _Told:
    told = _Told()
    request = HeadsRequest(selector=selector, do_not_proxy=True)
    try:
        async with asyncio.timeout(PEER_SECONDS):
            with broker.peers.calling(pb.Header()):
                metadata = broker.peers.metadata_over(Capability.READ, selector)
                call = broker.peers.heads_stub_at(endpoint).Heads(request, metadata=metadata)
                try:
                    async for response in call:
                        told.heads.update((head.journal, head) for head in response.heads)
                finally:
                    call.cancel()
    except TimeoutError:
        told.problem = f"its primary at {endpoint} did not answer within {PEER_SECONDS:g} s"
    except CorantoError as error:
        told.problem = f"its primary at {endpoint or 'an unknown address'} does not tell its head: {error}"
        cause = error.__cause__
        told.lacks = isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED
    else:
        told.problem = f"the broker at {endpoint} is not its primary any more; ask again"
        return told
    _log.info("heads.peer_unknown", endpoint=endpoint, reason=told.problem)
    return told


def _other(broker: Broker, state: JournalState, item: Item[pb.JournalSpec], told: _Told) -> JournalHead:
    """Return the head of a journal that another broker is primary of: as told, or as our own replica knows it."""
    if (head := told.heads.get(item.id)) is not None:
        return head
    if (replica := broker.resolver.replica_of(item.id)) is not None and replica.committed is not None:
        return head_of(broker, state, item)
    head = _of_etcd(broker, state, item)
    if head.status == pb.OK:
        head.status, head.problem, head.ask_alone = pb.NOT_JOURNAL_BROKER, told.problem, told.lacks
    return head


def head_of(broker: Broker, state: JournalState, item: Item[pb.JournalSpec]) -> JournalHead:
    """Return the head of a journal as etcd and this broker's replica, if there is one, know it."""
    head = _of_etcd(broker, state, item)
    replica = broker.resolver.replica_of(item.id)
    if head.status != pb.OK:
        return head
    if replica is None or replica.folder.create_revision != item.create_revision:
        head.status = pb.NOT_JOURNAL_BROKER if head.replicas else pb.INSUFFICIENT_JOURNAL_BROKERS
        head.problem = "no broker holds it now" if not head.replicas else "no replica of it could be asked"
    elif replica.committed is None:
        head.status, head.problem = pb.NOT_JOURNAL_BROKER, "its spool has not been recovered yet"
    else:
        _fill(broker, head, item.spec, replica)
    return head


def _of_etcd(broker: Broker, state: JournalState, item: Item[pb.JournalSpec]) -> JournalHead:
    assignments = state.assignments_in_key_order(item.id)
    spec = item.spec
    head = JournalHead(
        journal=item.id,
        status=pb.OK,
        create_revision=item.create_revision,
        mod_revision=item.mod_revision,
        replication=max(0, state.entities.replication(spec)),
        replicas=len(assignments),
        in_sync=bool(assignments) and all(state.entities.consistent([(a.key, a.value) for a in assignments])),
        suspended=spec.suspend.level,
        is_primary=any(each.slot == 0 and each.member == broker.member for each in assignments),
    )
    head.broker.zone, head.broker.suffix = broker.member.zone, broker.member.suffix
    if not may_read(spec):
        head.status, head.problem = pb.NOT_ALLOWED, "its flags do not allow reading"
    elif spec.suspend.level == pb.JournalSpec.Suspend.FULL:
        head.status, head.head = pb.SUSPENDED, spec.suspend.offset
        head.problem = "it is fully suspended; the next append wakes it"
    return head


def _fill(broker: Broker, head: JournalHead, spec: pb.JournalSpec, replica: Replica) -> None:
    """Set the fields that only a replica knows. The spool must be recovered."""
    index, committed = replica.index, replica.committed
    assert committed is not None
    extent = index.extent
    head.begin, head.persisted_head, head.unpersisted_bytes = extent.begin, extent.persisted, extent.unpersisted
    head.head = max(extent.head, spec.suspend.offset)
    waits = [extent.unpersisted_since] if extent.unpersisted_since else []
    if committed.fragment.length:
        waits.append(committed.first_append_time)
    head.unpersisted_since = min(waits, default=0.0)
    head.last_append_time = max(index.appended_at, index.known.flushed_at if not index.appended_at else 0.0)
    head.listed = index.refreshed
    head.registers.CopyFrom(committed.registers)
    head.append_status, head.append_status_time = replica.answer
    if head.is_primary and head.append_status_time and may_write(spec):
        # The last pulse may be older than what the index and the spool know now.
        if max(committed.fragment.end, spec.suspend.offset) < index.known.end:
            head.append_status = pb.INDEX_HAS_GREATER_OFFSET
        elif head.append_status == pb.INDEX_HAS_GREATER_OFFSET:
            head.append_status = pb.OK
    if spec.fragment.stores:
        head.store_problem = broker.held_back(spec.name, spec.fragment.stores[0])
