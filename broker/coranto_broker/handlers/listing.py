"""List and Apply: the journals' specs, as the mirrored key space knows them and as clients want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto import labels
from coranto.auth import Claims
from coranto.coordination.etcd import MAX_TXN_OPS, Compare, Delete, Op, Put, Target
from coranto.coordination.keyspace import Item
from coranto.errors import InvalidInput, PermissionDenied
from coranto.names import shown
from coranto.specs import ANY_REVISION, validate
from coranto.store_urls import parse_store_url
from coranto.stores import StoreRegistry
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
    matches = labels.matcher(selector)
    return [
        pb.ListResponse.Journal(
            spec=item.spec,
            mod_revision=item.mod_revision,
            create_revision=item.create_revision,
            route=state.route_of(item.id),
        )
        for item in state.items
        if matches(labels.with_meta(item.id, item.spec.labels)) and claims.covers(item.id, item.spec.labels)
    ]


async def serve_apply(broker: Broker, request: pb.ApplyRequest, claims: Claims) -> pb.ApplyResponse:
    """Apply all changes in one transaction, and answer once this broker has read what it wrote.

    Whoever may not make all of them is told that and no more, whatever is in them.
    """
    state = broker.keyspace.state
    _authorize(state, request, claims)
    validate(request)
    if len(request.changes) > MAX_TXN_OPS:
        raise InvalidInput(
            f"{len(request.changes)} changes are more than the {MAX_TXN_OPS} that one transaction can hold; "
            "apply them in several batches",
            field="ApplyRequest.changes",
        )
    compares: list[Compare] = []
    ops: list[Op] = []
    for index, change in enumerate(request.changes):
        name = _name(change)
        item, key = state.item(name), broker.keyspace.layout.item_key(name)
        if change.HasField("upsert"):
            _check_new_stores(broker.stores, f"ApplyRequest.changes[{index}]", item, change.upsert)
            ops.append(Put(key, change.upsert.SerializeToString(deterministic=True)))
        else:
            ops.append(Delete(key))
        if not claims.by_name_alone:  # The labels that were judged must still be those that the journal has.
            compares.append(Compare(key, Target.MOD_REVISION, item.mod_revision if item is not None else 0))
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


def _name(change: pb.ApplyRequest.Change) -> str:
    return change.upsert.name if change.HasField("upsert") else change.delete


def _authorize(state: JournalState, request: pb.ApplyRequest, claims: Claims) -> None:
    """Raises PermissionDenied unless claims cover all changes. They may be malformed: that is looked at afterwards.

    Claims must cover a journal as it is and as it is to be, so that nobody takes one over by relabelling it, nor
    removes one that the claims exclude. A store that leads elsewhere than to the journal's own folder must be in use
    already, by a journal that they cover.
    """
    if claims.covers_all:
        return
    used: set[str] | None = None
    for change in request.changes:
        name = _name(change)
        item = state.item(name)
        views = [item.spec.labels] if item is not None else []
        if change.HasField("upsert"):
            views.append(change.upsert.labels)
        if not all(claims.covers(name, view) for view in views or [pb.LabelSet()]):
            raise PermissionDenied(f"the token's scope does not cover this change of {shown(name)}")
        for url in filter(_leads_elsewhere, change.upsert.fragment.stores):
            if used is None:
                used = {
                    known
                    for each in state.items
                    if claims.covers(each.id, each.spec.labels)
                    for known in each.spec.fragment.stores
                }
            if url not in used:
                raise PermissionDenied(
                    f"the store {shown(url)} rewrites paths or says how it is reached, and no journal that the token "
                    "covers has it yet; to introduce it takes the capability APPLY over all journals"
                )


def _leads_elsewhere(url: str) -> bool:
    """Whether a store's URL says whose files are written, at what address or as whom.

    It may be malformed, which is for validation to say.
    """
    try:
        parsed = parse_store_url(url, check_options=False)
    except InvalidInput:
        return False
    return parsed.rewrites or not parsed.options.keys().isdisjoint(("endpoint", "profile"))


def _check_new_stores(
    stores: StoreRegistry, field: str, item: Item[pb.JournalSpec] | None, spec: pb.JournalSpec
) -> None:
    """Raises InvalidInput for stores that no broker would open. Those that the journal has already may stay."""
    known = item.spec.fragment.stores if item is not None else ()
    for index, url in enumerate(spec.fragment.stores):
        try:
            if url not in known:
                stores.check(url)
                parse_store_url(url).key(f"{spec.name}/")
        except InvalidInput as error:
            raise InvalidInput(error.message, field=f"{field}.upsert.fragment.stores[{index}]") from None
