"""A client of `consumer.Shard`, for commands and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc.aio

from coranto.client import ClientConfig
from coranto.client.connection import REFUSALS
from coranto.effects import SystemClock
from coranto.errors import CorantoError, EtcdTransactionFailed, InvalidInput, RpcFailed, Unavailable
from coranto.labels import label_selector, parse_selector
from coranto.offsets import JournalOffset
from coranto.security.call_tokens import CallTokens
from coranto.security.tokens import Capability
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import Hints
from coranto_consumers.recoverylog.hint_store import StoredHints
from coranto_consumers.runtime.peers import ShardPeers
from coranto_consumers.runtime.specs import validate_change


class ShardClient:
    """A client of the consumer process at `config.endpoint`. Any process of a consumer answers for all processes.

    Use as `async with ShardClient(config) as client:`. A cancelled call that only reads leaves nothing behind. After
    other cancelled calls, the change may or may not have been applied.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._peers = ShardPeers(config.tls)
        self._tokens = CallTokens(config.auth, SystemClock(), config.name)

    async def __aenter__(self) -> ShardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._peers.close()

    async def list(self, selector: str = "") -> Sequence[pc.ListResponse.Shard]:
        """List shards that match a selector such as `app=sums` or `id=sums-001`, by id. An empty one selects all."""
        request = pc.ListRequest(selector=parse_selector(selector))
        response: pc.ListResponse = await self._call("List", Capability.LIST, pb.LabelSelector(), request)
        return response.shards

    async def stat(self, shard: str, read_through: Mapping[str, int] | None = None) -> pc.StatResponse:
        """Return a shard's progress, once its completed transactions have read through these offsets of its sources."""
        request = pc.StatRequest(shard=shard, read_through=read_through or {})
        response: pc.StatResponse = await self._call("Stat", Capability.READ, _scope([shard]), request)
        _check(response.status, f"stat of {shard}")
        return response

    async def offsets(self, selector: str) -> Mapping[str, int] | None:
        """Return the offsets that shards of a selector have committed, with the ids of the journals.

        None before their first transaction. If several shards read a journal, its least offset is returned. Raises
        Unavailable when a shard has no primary, because only the primary knows its offsets.
        """
        found: dict[str, int] = {}
        for shard in await self.list(selector):
            if pc.ReplicaStatus.PRIMARY not in {status.code for status in shard.status}:
                raise Unavailable(f"shard {shard.spec.id} has no primary")
            progress = await self.stat(shard.spec.id)
            for journal, read_through in progress.read_through.items():
                offset = JournalOffset(read_through, progress.journal_ids.get(journal, ""))
                found[journal] = min(offset, found.get(journal, offset))
        return found or None

    async def apply(self, changes: Sequence[pc.ApplyRequest.Change]) -> int:
        """Create, update and delete shards in one transaction. Returns etcd's revision.

        Raises EtcdTransactionFailed when a shard is not at the revision that its change expects, and InvalidInput for
        changes that are not valid. After cancelling, the changes may or may not be applied.
        """
        for change in changes:
            validate_change(change)
        scope = _scope([change.upsert.id or change.delete for change in changes])
        request = pc.ApplyRequest(changes=changes)
        response: pc.ApplyResponse = await self._call("Apply", Capability.APPLY, scope, request)
        _check(response.status, f"apply of {len(changes)} changes")
        return response.header.etcd.revision

    async def hints(self, shard: str) -> StoredHints:
        """Return the hints of a shard's recovery log."""
        request = pc.GetHintsRequest(shard=shard)
        response: pc.GetHintsResponse = await self._call("GetHints", Capability.READ, _scope([shard]), request)
        _check(response.status, f"hints of {shard}")
        primary, *backups = (
            Hints.from_wire(each.hints) if each.HasField("hints") else None
            for each in (response.primary_hints, *response.backup_hints)
        )
        return StoredHints(primary, tuple(backups))

    async def unassign(
        self, shards: Sequence[str], *, only_failed: bool = False, dry_run: bool = False
    ) -> Sequence[str]:
        """Remove failed assignments of shards and, unless `only_failed`, the assignments of their primaries.

        Returns the shards with assignments that were removed, or with `dry_run` would be removed. After cancelling,
        assignments may or may not be removed.
        """
        request = pc.UnassignRequest(shards=shards, only_failed=only_failed, dry_run=dry_run)
        response: pc.UnassignResponse = await self._call("Unassign", Capability.APPLY, _scope(shards), request)
        _check(response.status, "unassign")
        return response.shards

    async def _call(self, method: str, capability: Capability, scope: pb.LabelSelector, request: Any) -> Any:
        stub = self._peers.stub(self.config.endpoint)
        await self._tokens.ready()
        metadata = self._tokens.for_selector(capability, scope)
        try:
            return await getattr(stub, method)(request, metadata=metadata, timeout=self.config.retry_timeout)
        except grpc.aio.AioRpcError as error:
            subject = f"{method} of shards: {self.config.endpoint} answered {error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidInput(error.details() or "the request was refused") from error
            if error.code() in REFUSALS:
                raise RpcFailed(subject, error.code().name) from error
            raise Unavailable(subject) from error


def _scope(shards: Sequence[str]) -> pb.LabelSelector:
    return label_selector(include=[("id", shard) for shard in shards])


def _check(status: pc.Status.ValueType, subject: str) -> None:
    if status == pc.ETCD_TRANSACTION_FAILED:
        raise EtcdTransactionFailed(subject)
    if status != pc.OK:
        raise CorantoError(f"{subject}: {pc.Status.Name(status)}")
