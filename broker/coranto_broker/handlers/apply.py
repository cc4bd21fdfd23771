"""The RPC Apply: changes journal specs in etcd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coranto.coordination.etcd import MAX_TXN_OPS, Compare, CompareTarget, Delete, Op, Put
from coranto.coordination.keyspace_state import Item
from coranto.errors import InvalidInput, PermissionDenied
from coranto.fragments.store_urls import parse_store_url
from coranto.fragments.stores import StoreRegistry
from coranto.names import shown
from coranto.security.tokens import Claims
from coranto.specs.validation import ANY_REVISION, validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.heads import heads_of
from coranto_broker.specs.forks import fork_guards, new_shared_ends, require_stored
from coranto_broker.specs.nesting import nesting_pair, with_guards
from coranto_broker.specs.store_folders import folder_conflict, folder_guards, unchanged_since

if TYPE_CHECKING:
    from coranto_broker.broker import Broker
    from coranto_broker.replication.resolver import JournalState

_ATTEMPTS = 32
"""The maximum attempts of an Apply that conflicts with concurrent changes."""


async def serve(broker: Broker, request: pb.ApplyRequest, claims: Claims, caller: str) -> pb.ApplyResponse:
    """Apply all changes in one transaction, and respond once this broker's key space has them.

    Raises PermissionDenied if the caller may not make all of the changes, even if they are malformed. Raises
    InvalidInput for a new journal whose name nests with another's, for a journal that would share a folder in a store
    with another, and for changes that would break a fork. Raises EtcdBudgetExceeded if `caller` has written too much to
    etcd.
    """
    _authorize(broker.keyspace.state, request, claims)
    validate(request)
    if len(request.changes) > MAX_TXN_OPS:
        raise InvalidInput(
            f"{len(request.changes)} changes are more than the {MAX_TXN_OPS} that one transaction can hold; "
            "apply them in several batches",
            field="ApplyRequest.changes",
        )
    for _ in range(_ATTEMPTS):
        state = broker.keyspace.state
        _authorize(state, request, claims)  # Labels may have changed.
        if not await _keeps_folders_apart(broker, state, request, claims):
            continue
        try:
            guards = fork_guards(state, request, claims)
        except (InvalidInput, PermissionDenied):
            if await _is_outdated(broker, state):
                continue
            raise
        if ends := new_shared_ends(state, request):
            require_stored(ends, await heads_of(broker, ends))
        wanted = _transaction(broker, state, request)
        wanted.compares += guards
        response = await _attempt(broker, state, wanted, claims, caller)
        if response is not None:
            return response
    return _failed(broker, broker.keyspace.known_revision)


async def _keeps_folders_apart(broker: Broker, state: JournalState, request: pb.ApplyRequest, claims: Claims) -> bool:
    """Return True if no journal would share a folder in a store with another. Raises InvalidInput if one would.

    Returns False, after an update of the key space, if `state` was outdated.
    """
    upserts = [change.upsert for change in request.changes if change.HasField("upsert")]
    deleted = {change.delete for change in request.changes if change.delete}
    conflict = folder_conflict(state, upserts, deleted)
    if conflict is None:
        return True
    if (item := state.item(conflict.other)) is not None:  # Read it from etcd, in case it has changed.
        header, found = await broker.coordinator.get(state.layout.item_key(conflict.other))
        if found is None or found.mod_revision != item.mod_revision:
            await broker.keyspace.wait_for_revision(header.revision)
            return False
    covered = item is None or claims.covers(item.id, item.spec.labels)
    other = f"{conflict.other} in {conflict.other_store}" if covered else "a journal that the token does not cover"
    raise InvalidInput(
        f"{conflict.name} in {conflict.store} would share a folder with {other}, so that each would treat the "
        "other's fragments as its own. Choose another name, or a store whose prefix keeps them apart",
        field="JournalSpec.fragment.stores",
    )


@dataclass(slots=True)
class _Transaction:
    """The etcd transaction of an Apply. `expected` has the revisions that the client expects, by key."""

    compares: list[Compare] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    expected: dict[str, int] = field(default_factory=dict)
    created: list[str] = field(default_factory=list)
    """The names of new journals, which must not nest with others."""
    guards: list[Compare] = field(default_factory=list)
    """Compares that keep other journals out of these journals' folders."""


async def _is_outdated(broker: Broker, state: JournalState) -> bool:
    """Return True, after an update of the key space, if journals have changed since `state`."""
    header, _ = await broker.coordinator.get(state.layout.items)
    await broker.keyspace.wait_for_revision(header.revision)
    return broker.keyspace.state is not state


def _transaction(broker: Broker, state: JournalState, request: pb.ApplyRequest) -> _Transaction:
    wanted = _Transaction()
    for index, change in enumerate(request.changes):
        name = _name(change)
        item, key = state.item(name), state.layout.item_key(name)
        # The journal must not have changed since the checks of its labels and forks.
        wanted.compares.append(Compare(key, CompareTarget.MOD_REVISION, _revision(state, key)))
        if change.expect_mod_revision != ANY_REVISION:
            wanted.expected[key] = change.expect_mod_revision
        if not change.HasField("upsert"):
            wanted.ops.append(Delete(key))
            continue
        _check_new_stores(broker.stores, f"ApplyRequest.changes[{index}]", item, change.upsert)
        wanted.ops.append(Put(key, change.upsert.SerializeToString(deterministic=True)))
        if broker.settings.allow_nested_names or change.expect_mod_revision > 0:
            continue
        if state.entries.get(key) is None:
            wanted.created.append(name)
    guards = folder_guards(state, [change.upsert for change in request.changes if change.HasField("upsert")])
    wanted.guards = guards.compares
    wanted.ops += guards.puts
    return wanted


def _revision(state: JournalState, key: str) -> int:
    """Return the revision that last changed a key; 0 if it is absent."""
    entry = state.entries.get(key)
    return entry.kv.mod_revision if entry is not None else 0


def _compares(state: JournalState, wanted: _Transaction) -> list[Compare]:
    """Return all compares of a transaction. Raises InvalidInput if one transaction cannot hold them."""
    compares = with_guards(state, wanted.created, [*wanted.compares, *wanted.guards])
    if len(compares) > MAX_TXN_OPS and wanted.guards:
        compares = with_guards(state, wanted.created, [*wanted.compares, unchanged_since(state)])
    if max(len(compares), len(wanted.ops)) > MAX_TXN_OPS:
        raise InvalidInput(
            f"with the conditions that keep journals' folders apart, the changes need more than the {MAX_TXN_OPS} "
            "operations that one transaction can hold; apply them in smaller batches",
            field="ApplyRequest.changes",
        )
    return compares


async def _attempt(
    broker: Broker, state: JournalState, wanted: _Transaction, claims: Claims, caller: str
) -> pb.ApplyResponse | None:
    """Try the transaction. If a concurrent change came first, update the key space and return None.

    Raises InvalidInput for a new journal whose name nests with another's.
    """
    pair = nesting_pair(state, wanted.created)
    if pair is not None and pair[1] in wanted.created:
        raise _nesting(*pair)
    others = [key for key, revision in wanted.expected.items() if revision != _revision(state, key)]
    if pair is None and others:  # Read from etcd, because this key space may be behind.
        header, found = await broker.coordinator.get(others[0])
        if (found.mod_revision if found is not None else 0) != wanted.expected[others[0]]:
            return _failed(broker, header.revision)
        await broker.keyspace.wait_for_revision(header.revision)
        return None
    if pair is not None:  # Read from etcd, as above.
        header, found = await broker.coordinator.get(state.layout.item_key(pair[1]))
        itself = None
        if found is not None:
            header, itself = await broker.coordinator.get(state.layout.item_key(pair[0]))
        if found is None or itself is not None:
            await broker.keyspace.wait_for_revision(header.revision)
            return None
        item = state.item(pair[1])
        covered = claims.covers(pair[1], item.spec.labels if item is not None else None)
        raise _nesting(pair[0], pair[1] if covered else "a journal that the token does not cover")
    response = pb.ApplyResponse(status=pb.OK, header=broker.unrouted_header(state))
    if not wanted.ops:
        return response
    compares = _compares(state, wanted)
    cost = await broker.etcd_budget.spend(caller, wanted.ops)
    result = await broker.coordinator.txn(compares, wanted.ops, otherwise=list(wanted.expected))
    if not result.succeeded:
        broker.etcd_budget.give_back(caller, cost)
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
        "name such that neither continues the other one after a '/'",
        field="JournalSpec.name",
    )


def _name(change: pb.ApplyRequest.Change) -> str:
    return change.upsert.name if change.HasField("upsert") else change.delete


def _authorize(state: JournalState, request: pb.ApplyRequest, claims: Claims) -> None:
    """Check that the claims cover all changes, which are not validated yet. Raises PermissionDenied.

    Claims must cover a journal before and after the change, so that callers cannot relabel or remove journals that the
    claims exclude. A store URL that leads elsewhere (`_leads_elsewhere`) must already be in use by a journal that the
    claims cover.
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
            raise PermissionDenied(
                f"the token's scope does not cover this change of {shown(name)}; use a token whose selector does"
            )
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
                    f"the store {shown(url)} rewrites paths or sets its endpoint or profile, and no journal that the "
                    "token covers uses it; introducing it needs the capability APPLY over all journals"
                )


def _leads_elsewhere(url: str) -> bool:
    """Return True if a store's URL rewrites paths, or sets an endpoint or a profile.

    Returns False for a malformed URL: validation reports it.
    """
    try:
        parsed = parse_store_url(url, check_options=False)
    except InvalidInput:
        return False
    return parsed.rewrites or not parsed.options.keys().isdisjoint(("endpoint", "profile"))


def _check_new_stores(
    stores: StoreRegistry, field: str, item: Item[pb.JournalSpec] | None, spec: pb.JournalSpec
) -> None:
    """Check the new stores of a spec, not its current ones. Raises InvalidInput if brokers cannot open one."""
    known = item.spec.fragment.stores if item is not None else ()
    for index, url in enumerate(spec.fragment.stores):
        try:
            if url not in known:
                stores.check(url)
                parse_store_url(url).key(f"{spec.name}/")
        except InvalidInput as error:
            raise InvalidInput(error.message, field=f"{field}.upsert.fragment.stores[{index}]") from None
