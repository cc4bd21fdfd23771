"""List and Apply: the journals' specs, as the mirrored key space knows them and as clients want them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coranto import labels
from coranto.auth import Claims
from coranto.coordination.etcd import MAX_TXN_OPS, Compare, Delete, Op, Put, Target
from coranto.errors import InvalidInput, PermissionDenied
from coranto.specs import ANY_REVISION, validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.errors import Context

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.resolver import JournalState

JOURNALS_PER_RESPONSE = 25


async def serve_list(broker: Broker, request: pb.ListRequest, context: Context, claims: Claims) -> None:
    """Send a snapshot of the matching journals; with `watch`, another whenever one was created, changed or deleted.

    Watched snapshots each end with an empty message. Changes of routes alone are not sent.
    """
    selector = labels.rewrite_legacy_prefix(request.selector)
    validate(pb.ListRequest(selector=selector, watch=request.watch))
    state = broker.keyspace.state
    if request.HasField("watch_resume"):
        state = await broker.keyspace.wait_for_revision(request.watch_resume.etcd.revision + 1)
    last: list[tuple[str, int]] | None = None
    while True:
        journals = _matching(state, selector, claims)
        now = [(journal.spec.name, journal.mod_revision) for journal in journals]
        if now != last:
            last = now
            await _send_snapshot(broker, state, journals, context)
            if not request.watch:
                return
            await context.write(pb.ListResponse())
        state = await broker.keyspace.wait_for_change(state)


async def _send_snapshot(
    broker: Broker, state: JournalState, journals: list[pb.ListResponse.Journal], context: Context
) -> None:
    head = pb.ListResponse(status=pb.OK, header=broker.unrouted_header(state))
    for begin in range(0, len(journals), JOURNALS_PER_RESPONSE) or (0,):
        response = head if begin == 0 else pb.ListResponse()
        response.journals.extend(journals[begin : begin + JOURNALS_PER_RESPONSE])
        await context.write(response)


def _matching(state: JournalState, selector: pb.LabelSelector, claims: Claims) -> list[pb.ListResponse.Journal]:
    return [
        pb.ListResponse.Journal(
            spec=item.spec,
            mod_revision=item.mod_revision,
            create_revision=item.create_revision,
            route=state.route_of(item.id),
        )
        for item in state.items
        if labels.matches(selector, labels.with_meta(item.id, item.spec.labels))
        and claims.covers(item.id, item.spec.labels)
    ]


async def serve_apply(broker: Broker, request: pb.ApplyRequest, claims: Claims) -> pb.ApplyResponse:
    """Apply all changes in one transaction, and answer once this broker has read what it wrote."""
    validate(request)
    if len(request.changes) > MAX_TXN_OPS:
        raise InvalidInput(
            f"{len(request.changes)} changes are more than the {MAX_TXN_OPS} that one transaction can hold; "
            "apply them in several batches",
            field="ApplyRequest.changes",
        )
    compares: list[Compare] = []
    ops: list[Op] = []
    for change in request.changes:
        name = change.upsert.name if change.HasField("upsert") else change.delete
        key = broker.keyspace.layout.item_key(name)
        compares.extend(_authorized(broker.keyspace.state, key, name, change, claims))
        if change.HasField("upsert"):
            ops.append(Put(key, change.upsert.SerializeToString(deterministic=True)))
        else:
            ops.append(Delete(key))
        if change.expect_mod_revision != ANY_REVISION:
            compares.append(Compare(key, Target.MOD_REVISION, change.expect_mod_revision))
    response = pb.ApplyResponse(status=pb.OK, header=broker.unrouted_header(broker.keyspace.state))
    if not ops:
        return response
    result = await broker.coordinator.txn(compares, ops)
    if result.succeeded:
        await broker.keyspace.wait_for_revision(result.header.revision)
    else:
        response.status = pb.ETCD_TRANSACTION_FAILED
    response.header.etcd.revision = result.header.revision
    return response


def _authorized(
    state: JournalState, key: str, name: str, change: pb.ApplyRequest.Change, claims: Claims
) -> Iterator[Compare]:
    """What must hold in etcd for claims to cover a change. Raises PermissionDenied when they do not.

    A deletion is checked against the journal's name alone, an upsert against its labels too: those that it is to have
    and, so that nobody takes a journal over by relabelling it, those that it has.
    """
    if claims.covers_all:
        return
    denied = PermissionDenied(f"the token's scope does not cover this change of {name}")
    if not change.HasField("upsert"):
        if not claims.covers(name):
            raise denied
        return
    if not claims.covers(name, change.upsert.labels):
        raise denied
    if not claims.by_name_alone:
        item = state.item(name)
        if item is not None and not claims.covers(name, item.spec.labels):
            raise denied
        yield Compare(key, Target.MOD_REVISION, item.mod_revision if item is not None else 0)
