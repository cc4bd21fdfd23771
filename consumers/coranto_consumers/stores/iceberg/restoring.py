"""Restores a checkpoint that was lost from an Iceberg store's home, under a higher fence."""

from __future__ import annotations

from dataclasses import replace

import structlog

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.state import ShardState, SnapshotId, decode, key_of, require_history

_log = structlog.get_logger(__name__)


def restore(owner: IcebergOwner, shard: str, known_fence: int, checkpoint: Checkpoint) -> int:
    """Write a shard's checkpoint into the home, and return the fence. On return no earlier owner can commit.

    Use it if the state was deleted, was changed or cannot be read, and the table's rows agree with the checkpoint. The
    new fence is above `known_fence`, from the last known state, and above the current state's fence. Raises CorruptData
    if the home was rolled back behind the current state, whose rows are then gone; SqlStoreError and
    CommitOutcomeUnknown.
    """
    owner.shard = shard

    def write() -> int:
        table = owner.load()
        value = table.properties.get(key_of(shard))
        try:
            found = ShardState() if value is None else decode(shard, value)
        except CorruptData as error:
            _log.warning("iceberg.state_replaced", table=owner.home, shard=shard, error=str(error))
            found = ShardState()
        if found.snapshot:
            require_history(table, SnapshotId(found.snapshot, found.sequence), shard)
        raised = replace(owner.successor_of(replace(found, fence=max(known_fence, found.fence))), checkpoint=checkpoint)
        owner.raise_to(table, raised)
        return raised.fence

    return owner.attempt(write)
