"""Shard specs for the reconciler (`coranto.reconcile`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coranto.reconcile import PresentSpec, SpecKind
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.specs import exclusive, with_meta


def _sharing(deleted: Sequence[pc.ShardSpec], created: Sequence[pc.ShardSpec]) -> set[str]:
    """Return the ids of deleted shards whose recovery log or hints a created shard takes over."""
    taken = {each for spec in created for each in exclusive(spec)}
    return {spec.id for spec in deleted if not taken.isdisjoint(exclusive(spec))}


SHARDS = SpecKind(
    noun="shard",
    change=pc.ApplyRequest.Change,
    name_of=lambda spec: str(spec.id),
    labels_of=with_meta,
    keep=lambda wanted, present: wanted,
    blocking_deletions=_sharing,
    deletes_in_transaction=True,
)


class ShardSpecs:
    """The shards of a client's consumer."""

    def __init__(self, client: ShardClient) -> None:
        self._client = client

    async def present(self) -> Mapping[str, PresentSpec]:
        return {shard.spec.id: PresentSpec(shard.spec, shard.mod_revision) for shard in await self._client.list()}

    async def apply(self, changes: Sequence[pc.ApplyRequest.Change]) -> None:
        await self._client.apply(changes)
