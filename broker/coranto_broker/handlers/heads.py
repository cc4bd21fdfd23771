"""The RPC Heads: the heads of many journals in one call.

The broker reports the journals whose primary it is, and asks the other primaries, each once, for the rest. If a primary
does not respond, this broker reports its own replica's state, or the reason why the head is unknown.
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
from coranto.coordination.layout import MemberId
from coranto.errors import CorantoError
from coranto.security.tokens import Capability, Claims
from coranto.specs.validation import may_write, validate
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import HeadsRequest, HeadsResponse, JournalHead
from coranto_broker.handlers.errors import Context
from coranto_broker.replication.journal_facts import EtcdFacts
from coranto_broker.replication.replica import Replica

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.replication.resolver import JournalState

HEADS_PER_RESPONSE: Final = 200
PEER_SECONDS: Final = 10.0
"""The maximum wait for the heads of another broker."""
LISTING_SECONDS: Final = 5.0
"""The maximum total wait for the first listings of stores."""
VERSION: Final = importlib.metadata.version("coranto")
_log = structlog.get_logger(__name__)


async def serve(broker: Broker, request: HeadsRequest, context: Context, claims: Claims) -> None:
    """Send the heads of the matching journals. Raises InvalidInput for a selector that is not valid."""
    selector = labels.rewrite_legacy_prefix(request.selector)
    validate(pb.ListRequest(selector=selector))
    if request.min_etcd_revision > broker.keyspace.known_revision:
        await broker.resolver.wait_for_revision(request.min_etcd_revision)
    state, facts = broker.keyspace.state, broker.facts.all()
    await context.write(
        HeadsResponse(
            status=pb.OK,
            header=broker.unrouted_header(state),
            version=VERSION,
            time=broker.clock.now(),
            quota_rejections=broker.quotas.rejections() if claims.covers_all else (),
        )
    )
    mine, theirs, without_primary = _by_primary(broker, state, facts, selector, claims)
    asked = [
        asyncio.ensure_future(_ask(broker, endpoint, selector, request.min_etcd_revision))
        for endpoint in theirs
        if not request.do_not_proxy
    ]
    try:
        await _wait_listed(broker, mine)
        await _send(context, (_head_of(broker, each) for each in mine))
        if request.do_not_proxy:
            return
        await _send(context, (_head_of(broker, each) for each in without_primary))
        for journals, answer in zip(theirs.values(), asked, strict=True):
            found = await answer
            await _send(context, (_other(broker, each, found) for each in journals))
    finally:
        for task in asked:
            task.cancel()


async def heads_of(broker: Broker, journals: Iterable[str]) -> dict[str, JournalHead]:
    """Return the heads of journals from their primaries or, if one does not respond, from this broker's replicas."""
    selector = labels.label_selector(include=[(labels.NAME, name) for name in journals])
    state, facts = broker.keyspace.state, broker.facts.all()
    mine, theirs, without_primary = _by_primary(broker, state, facts, selector, Claims(Capability.ALL))
    await _wait_listed(broker, mine)
    found = [_head_of(broker, each) for each in (*mine, *without_primary)]
    answers = await asyncio.gather(*(_ask(broker, endpoint, selector, 0) for endpoint in theirs))
    for others, answer in zip(theirs.values(), answers, strict=True):
        found += [_other(broker, each, answer) for each in others]
    return {head.journal: head for head in found}


_Facts = list[EtcdFacts]


def _by_primary(
    broker: Broker, state: JournalState, facts: _Facts, selector: pb.LabelSelector, claims: Claims
) -> tuple[_Facts, dict[str, _Facts], _Facts]:
    """Return the matching journals of this broker, of other primaries by endpoint, and without a primary."""
    matches, covers_all = labels.matcher(selector), claims.covers_all
    mine: _Facts = []
    by_member: dict[MemberId, _Facts] = {}
    without_primary: _Facts = []
    for each in facts:
        if not matches(each.labels) or not (covers_all or claims.covers(each.item.id, each.item.spec.labels)):
            continue
        if each.primary is None:
            without_primary.append(each)
        elif each.primary == broker.member:
            mine.append(each)
        else:
            by_member.setdefault(each.primary, []).append(each)
    theirs: dict[str, _Facts] = {}
    for member_id, journals in by_member.items():
        member = state.member(member_id)
        theirs.setdefault(state.entities.endpoint(member.spec) if member is not None else "", []).extend(journals)
    return mine, theirs, without_primary


async def _wait_listed(broker: Broker, journals: _Facts) -> None:
    deadline = broker.clock.monotonic() + LISTING_SECONDS
    for each in journals:
        replica = broker.resolver.replica_of(each.item.id)
        if replica is not None and not replica.index.refreshed:
            try:
                await replica.index.wait_refreshed(max(0.0, deadline - broker.clock.monotonic()))
            except CorantoError:
                continue  # The replica is gone, and `_head_of` reports it.


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
class _PeerHeads:
    """Another broker's heads by journal, or the call's problem.

    `unsupported`: the broker has no such RPC, like Gazette's brokers.
    """

    heads: dict[str, JournalHead] = field(default_factory=dict)
    problem: str = ""
    unsupported: bool = False


async def _ask(broker: Broker, endpoint: str, selector: pb.LabelSelector, min_etcd_revision: int) -> _PeerHeads:
    found = _PeerHeads()
    request = HeadsRequest(selector=selector, do_not_proxy=True, min_etcd_revision=min_etcd_revision)
    try:
        async with asyncio.timeout(PEER_SECONDS):
            with broker.peers.calling(pb.Header()):
                metadata = broker.peers.metadata_over(Capability.READ, selector)
                call = broker.peers.heads_stub_at(endpoint).Heads(request, metadata=metadata)
                try:
                    async for response in call:
                        found.heads.update((head.journal, head) for head in response.heads)
                finally:
                    call.cancel()
    except TimeoutError:
        found.problem = f"its primary at {endpoint} did not answer within {PEER_SECONDS:g} s"
    except CorantoError as error:
        found.problem = f"its primary at {endpoint or 'an unknown address'} does not report its head: {error}"
        cause = error.__cause__
        found.unsupported = isinstance(cause, grpc.aio.AioRpcError) and cause.code() is grpc.StatusCode.UNIMPLEMENTED
    else:
        found.problem = f"the broker at {endpoint} is no longer its primary; ask again"
        return found
    _log.info("heads.peer_unknown", endpoint=endpoint, reason=found.problem)
    return found


def _other(broker: Broker, facts: EtcdFacts, answer: _PeerHeads) -> JournalHead:
    """Return the head of a journal with another primary, from the primary's response or the local replica."""
    if (head := answer.heads.get(facts.item.id)) is not None:
        return head
    replica = broker.resolver.replica_of(facts.item.id)
    if facts.head.status != pb.OK or (replica is not None and replica.committed is not None):
        return _head_of(broker, facts)
    head = _copy(facts.head)
    head.status, head.problem, head.ask_alone = pb.NOT_JOURNAL_BROKER, answer.problem, answer.unsupported
    return head


def _head_of(broker: Broker, facts: EtcdFacts) -> JournalHead:
    """Return the head of a journal from etcd and this broker's replica, if any. Callers must not change it."""
    if facts.head.status != pb.OK:
        return facts.head
    head, item = _copy(facts.head), facts.item
    replica = broker.resolver.replica_of(item.id)
    if replica is None or replica.folder.create_revision != item.create_revision:
        head.status = pb.NOT_JOURNAL_BROKER if head.replicas else pb.INSUFFICIENT_JOURNAL_BROKERS
        head.problem = "no broker holds it now" if not head.replicas else "no replica of it could be asked"
    elif replica.committed is None:
        head.status, head.problem = pb.NOT_JOURNAL_BROKER, "its spool has not been recovered yet"
    else:
        _fill(broker, head, item.spec, replica)
    return head


def _copy(head: JournalHead) -> JournalHead:
    copy = JournalHead()
    copy.CopyFrom(head)
    return copy


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
    head.append_status, head.append_status_time = replica.last_pulse
    if head.is_primary and head.append_status_time and may_write(spec):
        # The index and the spool may have changed since the last pulse.
        if max(committed.fragment.end, spec.suspend.offset) < index.known.end:
            head.append_status = pb.INDEX_HAS_GREATER_OFFSET
        elif replica.refusal and not head.suspended:
            head.append_status = pb.INSUFFICIENT_JOURNAL_BROKERS
        elif head.append_status == pb.INDEX_HAS_GREATER_OFFSET and replica.recorded:
            head.append_status = pb.OK
    head.journal_id = replica.journal_id
    head.demand_unmet, head.acknowledged_below_demand = replica.demand_unmet, replica.acknowledged_below_demand
    if spec.fragment.stores:
        head.store_problem = broker.store_watch.held_back(spec.name, spec.fragment.stores[0])
