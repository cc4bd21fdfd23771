"""Changes of a consumer's checkpoint by commands, in any kind of store, under a fence of their own."""

from __future__ import annotations

from collections.abc import Callable

from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.sql import SqlStore


def change_checkpoint(store: str, consumer: str, change: Callable[[Checkpoint], Checkpoint]) -> None:
    """Commit the result of `change` on the last committed checkpoint. This fences off a running consumer.

    Raises InvalidInput for a URL without a store, Fenced if the consumer starts during the call, CorruptData for a
    checkpoint that cannot be read or a table that was rolled back, and SqlStoreError.
    """
    if store.startswith(ICEBERG):
        _change_in_catalog(store, consumer, change)
        return
    database = SqlStore(store)
    fence, checkpoint = database.raise_fence(consumer)
    with database.transaction(consumer, fence) as transaction:
        transaction.commit(change(checkpoint))


def _change_in_catalog(store: str, consumer: str, change: Callable[[Checkpoint], Checkpoint]) -> None:
    from coranto_consumers.stores.iceberg.catalogs import FAILURES, failure  # They take the extra `lake`.
    from coranto_consumers.stores.iceberg.owner import IcebergOwner
    from coranto_consumers.stores.iceberg.urls import IcebergHome

    home = IcebergHome.at(store)
    owner = IcebergOwner(home.catalog, home.table)
    try:
        before = owner.raise_fence(consumer)
        owner.commit(change(before.checkpoint), {}, owner.state.committed)
    except FAILURES as error:
        raise failure(f"store {home.name}", error) from error
