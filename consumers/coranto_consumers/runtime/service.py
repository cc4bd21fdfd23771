"""The gRPC service `consumer.Shard`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
import structlog

from coranto import labels
from coranto.coordination.etcd import MAX_TXN_OPS, Compare, CompareTarget, Delete, Op, Put, unmodified
from coranto.coordination.keyspace_state import Assignment, Item
from coranto.errors import (
    CorantoError,
    CorruptData,
    InvalidInput,
    PermissionDenied,
    Unavailable,
)
from coranto.member.call_errors import code_of, public_text
from coranto.names import shown, validate_shard_id
from coranto.security.admission import caller_of
from coranto.security.tokens import Capability, Claims
from coranto.specs.validation import ANY_REVISION, validate, validate_header
from coranto.wire import consumer_pb2 as pc
from coranto.wire import consumer_pb2_grpc as pc_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire.recoverylog_pb2 import FSMHints
from coranto_consumers.recoverylog import Hints
from coranto_consumers.recoverylog.hint_store import HintStore
from coranto_consumers.runtime.resolver import covers
from coranto_consumers.runtime.specs import exclusive, hint_keys, recovery_log, validate_change, with_meta

if TYPE_CHECKING:
    from coranto_consumers.runtime.consumer import Consumer

MAX_HINTS_BYTES: Final = 1 << 20
"""The limit for hints that a client gives. etcd does not accept much larger values."""

_log = structlog.get_logger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class ShardService(pc_grpc.ShardServicer):
    """The service for clients, and for other processes of the consumer."""

    def __init__(self, process: Consumer) -> None:
        self._process = process

    async def Stat(self, request: pc.StatRequest, context: Context) -> pc.StatResponse:
        async with self._admitted("Stat", context) as claims:
            return await self._stat(request, claims)

    async def List(self, request: pc.ListRequest, context: Context) -> pc.ListResponse:
        async with self._admitted("List", context) as claims:
            return self._list(request, claims)

    async def Apply(self, request: pc.ApplyRequest, context: Context) -> pc.ApplyResponse:
        async with self._admitted("Apply", context) as claims:
            return await self._apply(request, claims, caller_of(claims, context.peer()))

    async def GetHints(self, request: pc.GetHintsRequest, context: Context) -> pc.GetHintsResponse:
        async with self._admitted("GetHints", context) as claims:
            return await self._hints(request, claims)

    async def Unassign(self, request: pc.UnassignRequest, context: Context) -> pc.UnassignResponse:
        async with self._admitted("Unassign", context) as claims:
            return await self._unassign(request, claims)

    @asynccontextmanager
    async def _admitted(self, method: str, context: Context) -> AsyncIterator[Claims]:
        """Admit a call if its claims allow it. Ends it with a status code on CorantoError."""
        try:
            async with self._process.authorizer.admitted(method, context) as claims:
                yield claims
        except CorantoError as error:
            code = code_of(error)
            _log.info("call.failed", method=method, client=context.peer(), code=code.name, error=str(error))
            await context.abort(code, public_text(error))

    # -- Stat ----------------------------------------------------------------------------------------------------------

    async def _stat(self, request: pc.StatRequest, claims: Claims) -> pc.StatResponse:
        """Return a shard's progress, once it has read through the request's offsets. The primary answers."""
        proxied = request.HasField("header")
        try:
            _validate_stat(request)
        except InvalidInput:
            if not self._is_hidden(request.shard, claims):
                raise
            return pc.StatResponse(status=pc.SHARD_NOT_FOUND, header=self._process.unrouted_header())
        found = await self._process.resolver.resolve(
            request.shard, claims, may_proxy=not proxied, proxy_header=request.header if proxied else None
        )
        response = pc.StatResponse(status=found.status, header=found.header)
        if found.status != pc.OK:
            return response
        if found.replica is None:
            return await self._proxy(request, found.header)
        sources = {source.journal for source in found.replica.spec.sources}
        offsets = {journal: offset for journal, offset in request.read_through.items() if journal in sources}
        if not (await found.replica.wait_serving() and await found.replica.wait_read_through(offsets)):
            response.status = pc.SHARD_STOPPED
            return response
        response.read_through.update(found.replica.progress.read_through)
        response.publish_at.update(found.replica.progress.publish_at)
        response.journal_ids.update(found.replica.progress.journal_ids)
        return response

    def _is_hidden(self, shard: str, claims: Claims) -> bool:
        """Return True if the shard does not exist for this caller. Then no other check may reveal more."""
        item = self._process.keyspace.state.item(shard)
        return not claims.covers_all and (item is None or not covers(claims, item.spec))

    async def _proxy(self, request: pc.StatRequest, header: pb.Header) -> pc.StatResponse:
        forwarded = pc.StatRequest()
        forwarded.CopyFrom(request)
        forwarded.header.CopyFrom(header)
        scope = labels.label_selector(include={"id": request.shard})
        metadata = self._process.tokens.for_selector(Capability.READ, scope)
        stub = self._process.peers.stub(header.route.endpoints[header.route.primary])
        try:
            response: pc.StatResponse = await stub.Stat(forwarded, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the primary of {request.shard} does not answer: {error.details()}") from error
        return response

    # -- List and Apply ------------------------------------------------------------------------------------------------

    def _list(self, request: pc.ListRequest, claims: Claims) -> pc.ListResponse:
        validate(request.selector)
        state = self._process.keyspace.state
        response = pc.ListResponse(status=pc.OK, header=self._process.unrouted_header())
        matches = labels.matcher(request.selector)
        for item in state.items:
            if matches(with_meta(item.spec)) and covers(claims, item.spec):
                response.shards.add(
                    spec=item.spec,
                    mod_revision=item.mod_revision,
                    create_revision=item.create_revision,
                    route=state.route_of(item.id),
                    status=[each.value for each in state.assignments_in_key_order(item.id)],
                )
        return response

    async def _apply(self, request: pc.ApplyRequest, claims: Claims, caller: str) -> pc.ApplyResponse:
        """Apply all changes in one transaction, and answer once this process's key space shows them.

        A caller that may not make all of the changes learns nothing else.
        """
        process = self._process
        authorized = [self._authorized(change, claims) for change in request.changes]
        if len(request.changes) > MAX_TXN_OPS:
            raise InvalidInput(
                f"{len(request.changes)} changes are more than the {MAX_TXN_OPS} that one transaction can hold; "
                "apply them in several batches",
                field="ApplyRequest.changes",
            )
        compares: list[Compare] = []
        ops: list[Op] = []
        for index, (change, item) in enumerate(zip(request.changes, authorized, strict=True)):
            try:
                validate_change(change)
            except InvalidInput as error:
                raise error.within(f"ApplyRequest.changes[{index}]") from None
            key = process.keyspace.layout.item_key(change.upsert.id or change.delete)
            if not claims.covers_all:  # The shard must still have the labels that were checked.
                compares.append(Compare(key, CompareTarget.MOD_REVISION, item.mod_revision if item is not None else 0))
            if change.HasField("upsert"):
                try:
                    await self._require_hints_location(change.upsert)
                except InvalidInput as error:
                    raise error.within(f"ApplyRequest.changes[{index}].upsert") from None
                ops.append(Put(key, change.upsert.SerializeToString(deterministic=True)))
                if change.HasField("primary_hints"):
                    hints = self._acceptable(change.primary_hints, change.upsert, claims)
                    ops.append(Put(hint_keys(change.upsert).primary, hints.to_json()))
            else:
                ops.append(Delete(key))
            if change.expect_mod_revision != ANY_REVISION:
                compares.append(Compare(key, CompareTarget.MOD_REVISION, change.expect_mod_revision))
        self._check_logs(request)
        response = pc.ApplyResponse(status=pc.OK, header=process.unrouted_header())
        if not ops:
            return response
        cost = await process.etcd_budget.spend(caller, ops)
        result = await process.coordinator.txn(list(dict.fromkeys(compares)), ops)  # Both kinds may be equal.
        if result.succeeded:
            await process.keyspace.wait_for_revision(result.header.revision)
        else:
            process.etcd_budget.give_back(caller, cost)
            response.status = pc.ETCD_TRANSACTION_FAILED
        response.header.etcd.revision = result.header.revision
        return response

    def _authorized(self, change: pc.ApplyRequest.Change, claims: Claims) -> Item[pc.ShardSpec] | None:
        """Return the current shard of a change, None if it is new. Raises PermissionDenied if claims do not cover it.

        The claims must cover the shard both before and after the change, so that it cannot be taken over by
        relabelling. The change may be malformed: it is validated afterwards.
        """
        shard = change.upsert.id or change.delete
        item = self._process.keyspace.state.item(shard)
        specs = [*([change.upsert] if change.HasField("upsert") else []), *([item.spec] if item is not None else [])]
        if not all(covers(claims, spec) for spec in specs or [pc.ShardSpec(id=shard)]):
            raise PermissionDenied(
                f"the token's scope does not cover this change of {shown(shard)}; use a token whose selector does"
            )
        return item

    async def _require_hints_location(self, spec: pc.ShardSpec) -> None:
        """Raise InvalidInput for a hint prefix among this consumer's keys, or one that holds another log's hints.

        The current prefix of a shard is accepted unchanged, because its hints are there.
        """
        process = self._process
        before = process.keyspace.state.item(spec.id)
        stays = before is not None and before.spec.hint_prefix == spec.hint_prefix
        if not spec.recovery_log_prefix or stays:
            return
        if f"{spec.hint_prefix}/".startswith(process.keyspace.layout.root):
            raise InvalidInput(
                f"{spec.hint_prefix!r} is among the keys of this consumer, which are below "
                f"{process.keyspace.layout.root}: choose a place of its own, such as /gazette/hints/app",
                field="hint_prefix",
            )
        keys = hint_keys(spec)
        try:
            present = (await HintStore(process.coordinator, keys).fetch()).present
        except CorruptData as error:
            raise InvalidInput(
                f"etcd has something else than hints at this key: {error}; choose another hint_prefix, "
                "or delete the key",
                field="hint_prefix",
            ) from error
        if foreign := sorted({hints.log for hints in present} - {recovery_log(spec)}):
            raise InvalidInput(
                f"{keys.primary} has hints of {foreign[0]}, and the shard's log is {recovery_log(spec)}: choose "
                "another place",
                field="hint_prefix",
            )

    def _check_logs(self, request: pc.ApplyRequest) -> None:
        """Raise InvalidInput for a shard that would have the recovery log, or the hints, of another shard.

        A process that takes over a recovery log fences off the earlier recorder. Without this check, no token's scope
        would protect the log.
        """
        changed = {change.upsert.id or change.delete for change in request.changes}
        present = [item.spec for item in self._process.keyspace.state.items if item.id not in changed]
        owners = {each: spec.id for spec in present for each in exclusive(spec)}
        for change in request.changes:
            for each in exclusive(change.upsert) if change.HasField("upsert") else ():
                if owners.setdefault(each, change.upsert.id) != change.upsert.id:
                    raise InvalidInput(
                        f"shard {change.upsert.id} would have {each}, which another shard has; choose other prefixes",
                        field="recovery_log_prefix",
                    )

    def _acceptable(self, given: FSMHints, spec: pc.ShardSpec, claims: Claims) -> Hints:
        """Return the hints that a client gives for a shard, after checks.

        They must be of the shard's log, and name no log outside of the client's scope: otherwise the process would read
        any journal for the client. Raises InvalidInput and PermissionDenied.
        """
        if given.ByteSize() > MAX_HINTS_BYTES:
            raise InvalidInput(
                f"{given.ByteSize()} bytes are more than the {MAX_HINTS_BYTES} that are kept; "
                "give the hints of one recovery log only",
                field="primary_hints",
            )
        log, hints = recovery_log(spec), Hints.from_wire(given)
        segments = hints.live_segments()
        if hints.log != log:
            raise InvalidInput(
                f"hints of {hints.log} are given for a shard whose log is {log}; give hints of that log",
                field="primary_hints",
            )
        covered = {recovery_log(item.spec) for item in self._process.keyspace.state.items if covers(claims, item.spec)}
        for segment in segments:
            if segment.log not in (log, *covered) and not claims.covers_all:
                raise PermissionDenied(
                    f"the token's scope does not cover {segment.log}, which the hints of {log} name; "
                    "use a token whose selector does"
                )
        return hints

    # -- Hints and assignments -----------------------------------------------------------------------------------------

    async def _hints(self, request: pc.GetHintsRequest, claims: Claims) -> pc.GetHintsResponse:
        """Return the hints of a shard's recovery log. A shard without a recovery log has none."""
        process = self._process
        try:
            validate_shard_id(request.shard)
        except InvalidInput:
            if not self._is_hidden(request.shard, claims):
                raise
            return pc.GetHintsResponse(status=pc.SHARD_NOT_FOUND, header=process.unrouted_header())
        spec = (await process.resolver.resolve(request.shard, claims)).spec
        response = pc.GetHintsResponse(status=pc.OK, header=process.unrouted_header())
        if spec is None:
            response.status = pc.SHARD_NOT_FOUND
        elif spec.recovery_log_prefix:
            stored = await HintStore(process.coordinator, hint_keys(spec)).fetch()
            if stored.primary is not None:
                response.primary_hints.hints.CopyFrom(stored.primary.to_wire())
            for backup in stored.backups:
                each = response.backup_hints.add()
                if backup is not None:
                    each.hints.CopyFrom(backup.to_wire())
        return response

    async def _unassign(self, request: pc.UnassignRequest, claims: Claims) -> pc.UnassignResponse:
        """Remove failed assignments of shards and, unless `only_failed`, the assignments of their primaries.

        The allocator then reassigns the shards.
        """
        process = self._process
        state = process.keyspace.state
        due: list[Assignment[pc.ReplicaStatus]] = []
        for shard in dict.fromkeys(request.shards):
            item = state.item(shard)
            if item is None or not covers(claims, item.spec):
                raise InvalidInput(
                    f"there is no shard {shown(shard)}; `coranto shards list` shows all", field="UnassignRequest.shards"
                )
            for each in state.assignments_in_key_order(shard):
                failed = each.value.code == pc.ReplicaStatus.FAILED
                if failed or (each.slot == 0 and not request.only_failed):
                    due.append(each)
        response = pc.UnassignResponse(status=pc.OK, shards=sorted({each.item for each in due}))
        if len(due) > MAX_TXN_OPS:
            raise InvalidInput(f"{len(due)} assignments are too many for one transaction; name fewer shards")
        if not due or request.dry_run:
            return response
        result = await process.coordinator.txn(
            [unmodified(each.kv) for each in due], [Delete(each.kv.key) for each in due]
        )
        if result.succeeded:
            await process.keyspace.wait_for_revision(result.header.revision)
            return response
        return pc.UnassignResponse(status=pc.ETCD_TRANSACTION_FAILED)


def _validate_stat(request: pc.StatRequest) -> None:
    validate_shard_id(request.shard)
    if request.HasField("header"):
        validate_header(request.header)
    for journal, offset in request.read_through.items():
        if offset < 0:
            raise InvalidInput(
                f"{offset} is below 0; give offsets of 0 or more", field=f"read_through[{shown(journal)}]"
            )
