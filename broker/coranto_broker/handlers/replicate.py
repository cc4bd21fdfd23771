"""The RPC Replicate: a primary's pipeline drives this broker's spool while its stream lives."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from coranto.errors import InvalidInput, Unavailable
from coranto.fragments.fragment import Fragment
from coranto.security.tokens import Claims
from coranto.specs.validation import routes_equivalent, validate
from coranto.tracing import TraceSpan
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.errors import Context, set_logged_journal
from coranto_broker.handlers.refusals import is_acceptable
from coranto_broker.ownership import Invalidated
from coranto_broker.replication.pipeline import ReplicationFailed, complete
from coranto_broker.replication.replica import Replica
from coranto_broker.replication.resolver import Resolution
from coranto_broker.rpc.content import ContentMessage, ReplicateMessage
from coranto_broker.rpc.first_message import first_message
from coranto_broker.rpc.source import next_message, require_readable
from coranto_broker.spool.durable_spool import DurableSpool

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

DEMOTED_SECONDS = 5.0
"""The time that a demoted primary has to complete its proposals."""


async def serve(broker: Broker, context: Context, claims: Claims) -> None:
    """Own the replica's spool until the primary closes the stream or fails. Then roll back uncommitted content.

    A cancelled call does the same.
    """
    request = await first_message(context, broker.receive_budget.first_message_deadlines)
    if not isinstance(request, (ContentMessage, pb.ReplicateRequest)):
        require_readable(request)
        raise InvalidInput(
            "the stream ended before its first message; send a proposal with a header first", field="ReplicateRequest"
        )
    if not isinstance(request, ContentMessage) and not is_acceptable(broker, request, request.proposal.journal, claims):
        header = broker.unrouted_header(broker.keyspace.state)
        await context.write(pb.ReplicateResponse(status=pb.JOURNAL_NOT_FOUND, header=header))
        return
    if isinstance(request, ContentMessage) or not request.HasField("header") or not request.HasField("proposal"):
        raise InvalidInput(
            "the first message is not a proposal with a header; send one first", field="ReplicateRequest.header"
        )
    set_logged_journal(request.proposal.journal)
    while True:
        resolution = await broker.resolver.resolve(
            request.proposal.journal,
            may_proxy=False,
            require_primary=False,
            proxy_header=request.header,
            claims=claims,
        )
        status = resolution.status
        if status == pb.OK and not routes_equivalent(resolution.header.route, request.header.route):
            status = pb.WRONG_ROUTE
        if status != pb.OK:
            await context.write(pb.ReplicateResponse(status=status, header=resolution.header))
            return
        replica = resolution.require_replica
        try:
            spool = await replica.spool.take(resolution.invalidated)
            break
        except Invalidated:
            continue
    try:
        await broker.appends.verify(resolution, spool)
    except BaseException:
        replica.spool.put(spool)
        raise
    driving = asyncio.ensure_future(_drive(broker, replica, spool, request, resolution.header, context))
    demoted = asyncio.ensure_future(_demoted(broker, resolution))
    try:
        await asyncio.wait((driving, demoted), return_when=asyncio.FIRST_COMPLETED)
        if not driving.done():
            raise Unavailable(
                "this stream's broker is no longer the journal's primary; it must resolve the journal again"
            )
        driving.result()
    finally:
        driving.cancel()
        demoted.cancel()
        try:
            await asyncio.gather(driving, demoted, return_exceptions=True)
        finally:
            # Even after another cancellation, because the next owner waits for the spool.
            spool.roll_back()
            replica.spool.put(spool)


async def _demoted(broker: Broker, resolution: Resolution) -> None:
    """Wait until the Route has had another primary for DEMOTED_SECONDS.

    So the old primary has time to finish, but cannot block its successor.
    """
    primary = _primary(resolution)
    while _primary(resolution) == primary:
        if resolution.invalidated is None:
            break
        await resolution.invalidated.wait()
        resolution = await broker.resolver.resolve(resolution.spec.name, may_proxy=True, require_primary=True)
    await broker.clock.sleep(DEMOTED_SECONDS)


def _primary(resolution: Resolution) -> pb.ProcessSpec.ID | None:
    route = resolution.header.route
    return route.members[route.primary] if 0 <= route.primary < len(route.members) else None


async def _drive(
    broker: Broker,
    replica: Replica,
    spool: DurableSpool,
    first_request: pb.ReplicateRequest,
    header: pb.Header,
    context: Context,
) -> None:
    first: pb.Header | None = header
    revision = first_request.header.etcd.revision
    # Gazette's primaries do not send the offset that all replicas have. Their commits are readable immediately.
    waits = first_request.HasField("readable")
    request: ReplicateMessage | None = first_request
    is_plain = False
    span: TraceSpan | None = None
    try:
        while request is not None:
            if isinstance(request, ContentMessage):
                spool.write(request.content_delta, request.content)
                await spool.wait_for_capacity()
            elif not request.HasField("proposal"):
                if request.content:
                    spool.write(request.content_delta, request.content)
                    await spool.wait_for_capacity()
                else:
                    spool.publish_through(request.readable)
            else:
                span = None
                if broker.tracer is not None and request.traceparent:
                    span = broker.tracer.continued("replicate", replica.journal, request.traceparent)
                if request.readable:
                    spool.publish_through(request.readable)
                if is_plain:
                    await _confirmed(broker)
                if is_plain and spool.commit_proposed(request.content, request.proposal, revision):
                    response = pb.ReplicateResponse(status=pb.OK)
                else:
                    if is_plain:
                        validate(request)
                    if request.content:
                        spool.write(request.content_delta, request.content)
                    await spool.written()
                    await _confirmed(broker)
                    decision = spool.propose(
                        Fragment.from_wire(request.proposal),
                        request.registers,
                        primary=False,
                        revision=revision,
                        settled=not request.acknowledge,
                    )
                    response = decision.response()
                # After a mismatch the primary continues at this replica's end, so its content must be kept.
                await complete(response, spool, replica, spool.version, request.ask)
                if response.status == pb.OK and not waits:
                    spool.publish_through(spool.fragment.end)
                if request.acknowledge:
                    if first is not None:
                        response.header.CopyFrom(first)
                        response.takes_readable = response.takes_content_with_proposal = response.tells_synced = True
                        if broker.frames is not None:
                            response.frames.CopyFrom(broker.frames)
                        first = None
                    await context.write(response)
                    if span is not None:
                        span.end(end=request.proposal.end, status=pb.Status.Name(response.status))
                elif response.status != pb.OK:
                    raise ReplicationFailed(
                        f"a proposal that needs no acknowledgement does not fit: it is [{request.proposal.begin}, "
                        f"{request.proposal.end}), our fragment is [{spool.fragment.begin}, {spool.fragment.end})"
                    )
            request = await next_message(context, pb.ReplicateRequest)
            if request is not None and not isinstance(request, ContentMessage):
                is_plain = _is_plain(request, spool.registers)
                if not is_plain:
                    validate(request)
    except BaseException as error:
        if span is not None:
            span.end(error)
        raise


def _is_plain(request: pb.ReplicateRequest, registers: pb.LabelSet) -> bool:
    """Return True if a request has only content and its proposal. It is valid if the proposal fits the spool."""
    return (
        bool(request.content)
        and request.HasField("proposal")
        and request.acknowledge
        and not request.content_delta
        and request.readable >= 0
        and not request.HasField("header")
        and not request.deprecated_journal
        and request.registers == registers
    )


async def _confirmed(broker: Broker) -> None:
    """Wait while the membership of this broker is in doubt.

    If this process was paused, the other replicas may have rolled back content that is uncommitted here. A commit would
    make it readable at this broker.
    """
    if broker.session is not None:
        await broker.session.confirmed()
