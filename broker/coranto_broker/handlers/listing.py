"""List and Apply: the journals' specs, as the mirrored key space knows them and as clients want them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coranto import labels
from coranto.auth import Claims
from coranto.coordination.etcd import MAX_TXN_OPS, Compare, Delete, Op, Put, Relation, Target
from coranto.errors import InvalidInput, PermissionDenied
from coranto.specs import ANY_REVISION, validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.errors import Context
from coranto_broker.handlers.nesting import nesting_pair, with_guards

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.resolver import JournalState

JOURNALS_PER_RESPONSE = 25
_ATTEMPTS = 32
"""Of an Apply that others overtake. Each time, one of them has come through."""


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
    """Apply all changes in one transaction, and answer once this broker has read what it wrote.

    Raises InvalidInput, with the name of the other, for a new journal whose name nests with another's.
    """
    validate(request)
    if len(request.changes) > MAX_TXN_OPS:
        raise InvalidInput(
            f"{len(request.changes)} changes are more than the {MAX_TXN_OPS} that one transaction can hold; "
            "apply them in several batches",
            field="ApplyRequest.changes",
        )
    for _ in range(_ATTEMPTS):
        state = broker.keyspace.state
        wanted = _transaction(state, request, claims, nesting=broker.settings.allow_nested_names)
        response = await _attempt(broker, state, wanted, claims)
        if response is not None:
            return response
    return _failed(broker, broker.keyspace.known_revision)


@dataclass(slots=True)
class _Transaction:
    """What an Apply asks of etcd. `expected` are the revisions that its keys must have, as far as the client says."""

    compares: list[Compare] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    expected: dict[str, int] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    """Names that are new and must not nest."""


def _transaction(state: JournalState, request: pb.ApplyRequest, claims: Claims, *, nesting: bool) -> _Transaction:
    wanted = _Transaction()
    for change in request.changes:
        name = change.upsert.name if change.HasField("upsert") else change.delete
        key = state.layout.item_key(name)
        authorized = list(_authorized(state, key, name, change, claims))
        wanted.compares.extend(authorized)
        if change.expect_mod_revision != ANY_REVISION:
            wanted.compares.append(Compare(key, Target.MOD_REVISION, change.expect_mod_revision))
            wanted.expected[key] = change.expect_mod_revision
        if not change.HasField("upsert"):
            wanted.ops.append(Delete(key))
            continue
        wanted.ops.append(Put(key, change.upsert.SerializeToString(deterministic=True)))
        if nesting or change.expect_mod_revision > 0:
            continue
        if state.entries.get(key) is None:
            wanted.created.append(name)
        elif change.expect_mod_revision == ANY_REVISION and not authorized:  # Gone by now, it would be created.
            wanted.compares.append(Compare(key, Target.CREATE_REVISION, 0, Relation.GREATER))
    return wanted


async def _attempt(
    broker: Broker, state: JournalState, wanted: _Transaction, claims: Claims
) -> pb.ApplyResponse | None:
    """The response; None when others have overtaken `state`, once this broker knows of what they did.

    Raises InvalidInput for a new journal whose name nests with another's.
    """
    pair = nesting_pair(state, wanted.created)
    if pair is not None and pair[1] in wanted.created:
        raise _nesting(*pair)
    taken = [key for key, revision in wanted.expected.items() if not revision and state.entries.get(key) is not None]
    obstacle = state.layout.item_key(pair[1]) if pair is not None else taken[0] if taken else None
    if obstacle is not None:  # As far as is known here, where the last changes may not have arrived yet.
        header, found = await broker.coordinator.get(obstacle)
        itself = None
        if found is not None and pair is not None:
            header, itself = await broker.coordinator.get(state.layout.item_key(pair[0]))
        if found is None or itself is not None:
            await broker.keyspace.wait_for_revision(header.revision)
            return None
        if pair is None:
            return _failed(broker, header.revision)
        item = state.item(pair[1])
        covered = claims.covers(pair[1], item.spec.labels if item is not None else None)
        raise _nesting(pair[0], pair[1] if covered else "a journal that the token does not cover")
    response = pb.ApplyResponse(status=pb.OK, header=broker.unrouted_header(state))
    if not wanted.ops:
        return response
    compares = with_guards(state, wanted.created, wanted.compares)
    result = await broker.coordinator.txn(compares, wanted.ops, otherwise=list(wanted.expected))
    revisions = zip(wanted.expected.values(), result.found, strict=False)
    if not result.succeeded and any(want != (kv.mod_revision if kv is not None else 0) for want, kv in revisions):
        return _failed(broker, result.header.revision)
    await broker.keyspace.wait_for_revision(result.header.revision)
    response.header.etcd.revision = result.header.revision
    return response if result.succeeded else None


def _failed(broker: Broker, revision: int) -> pb.ApplyResponse:
    response = pb.ApplyResponse(status=pb.ETCD_TRANSACTION_FAILED, header=broker.unrouted_header(broker.keyspace.state))
    response.header.etcd.revision = revision
    return response


def _nesting(name: str, other: str) -> InvalidInput:
    return InvalidInput(
        f"{name} nests with {other}: in a fragment store, the folder of one would lie within the other's. Choose a "
        "name that does not go on from another journal's after a '/', nor another's from it",
        field="JournalSpec.name",
    )


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
