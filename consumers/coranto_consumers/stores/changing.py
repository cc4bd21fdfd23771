"""Changes of a consumer's checkpoint by CLI commands, in any kind of store. Each change raises the fence."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, update

from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore

Change = Callable[[Restored], Checkpoint]
"""Returns the new checkpoint. Its argument has the last committed checkpoint, and the fence of the new commit."""


def change_checkpoint(store: str, consumer: str, change: Change) -> Restored:
    """Raise the fence of a consumer and commit the checkpoint from `change`, atomically. Return the new row.

    This fences off a running consumer, so that it cannot commit in between. Raises InvalidInput for a URL that names no
    store, CorruptData for a checkpoint that cannot be read or a table that was rolled back, SqlStoreError, and the
    errors of `change`. After an error, nothing has changed.
    """
    if store.startswith(ICEBERG):
        return _change_in_catalog(store, consumer, change)
    made: list[Restored] = []

    def write(connection: Connection, restored: Restored) -> None:
        checkpoint = change(restored)
        row = CHECKPOINTS.c.shard_fqn == consumer
        connection.execute(update(CHECKPOINTS).where(row).values(checkpoint=checkpoint.to_bytes()))
        made.append(Restored(restored.fence, checkpoint))

    SqlStore(store).raise_fence_with(consumer, write)
    return made[-1]


def _change_in_catalog(store: str, consumer: str, change: Change) -> Restored:
    from coranto_consumers.stores.iceberg.catalogs import FAILURES, failure  # Needs the extra `lake`.
    from coranto_consumers.stores.iceberg.owner import IcebergOwner
    from coranto_consumers.stores.iceberg.urls import IcebergHome

    home = IcebergHome.at(store)
    owner = IcebergOwner(home.catalog, home.table)
    try:
        owner.raise_fence(consumer, lambda fence, checkpoint: change(Restored(fence, checkpoint)))
    except FAILURES as error:
        raise failure(f"store {home.name}", error) from error
    return Restored(owner.state.fence, owner.state.checkpoint)
