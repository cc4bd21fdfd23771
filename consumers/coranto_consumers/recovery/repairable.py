"""Stores that recovery can repair: databases and Iceberg catalogs."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from coranto.errors import CorantoError, SqlStoreError
from coranto.messages import Checkpoint
from coranto_consumers.stores.fencing import Restored
from coranto_consumers.stores.merge import STAGE_COLUMNS
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.retired import Retired
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from coranto_consumers.stores.staging import stage_tables


class RepairableStore(Protocol):
    """A store that has a consumer's checkpoints."""

    @property
    def shows_present_tables(self) -> bool:
        """True if queries read the current tables; False if they read the snapshots that the checkpoint records."""

    def raise_fence(self, shard: str) -> Restored:
        """Raise a shard's fence. Return it with the checkpoint.

        Raises SqlStoreError, and CorruptData if the state is damaged or rows are gone.
        """

    def write_checkpoint(self, shard: str, known_fence: int, checkpoint: Checkpoint) -> int:
        """Write a checkpoint under a fence above `known_fence` and the current fence, and return the new fence.

        Raises InvalidInput for a retired consumer, CorruptData if rows are gone, and SqlStoreError.
        """

    def delete_staged(self, shard: str, table: str) -> int:
        """Delete a shard's rows below its current fence from a stage table, and return their number."""


def repairable_store(url: str) -> RepairableStore:
    """Return the store of a URL. Raises InvalidInput, and SqlStoreError if a catalog does not answer."""
    return RepairableCatalog(url) if url.startswith(ICEBERG) else RepairableDatabase(SqlStore(url))


class RepairableDatabase:
    """A SQL database with consumers' checkpoints."""

    shows_present_tables = True

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    def raise_fence(self, shard: str) -> Restored:
        return self._store.raise_fence(shard)

    def delete_staged(self, shard: str, table: str) -> int:
        """Delete a shard's rows below its current fence from one stage table."""
        shard_column, fence_column, _ = STAGE_COLUMNS
        deleted = 0
        try:
            with self._store.engine.begin() as connection:
                fence = connection.execute(
                    select(CHECKPOINTS.c.fence).where(CHECKPOINTS.c.shard_fqn == shard)
                ).scalar_one_or_none()
                if fence is None:
                    raise CorantoError(f"{shard} has no checkpoint any more, so its fence is not known")
                for stage in stage_tables(self._store, connection):
                    if stage.name == table:
                        stale = delete(stage).where(stage.c[shard_column] == shard, stage.c[fence_column] < int(fence))
                        deleted += connection.execute(stale).rowcount
        except SQLAlchemyError as error:
            raise self._store.failure("staged rows could not be deleted", error) from error
        return deleted

    def write_checkpoint(self, shard: str, known_fence: int, checkpoint: Checkpoint) -> int:
        self._store.create_tables()
        row = CHECKPOINTS.c.shard_fqn == shard
        try:
            with self._store.engine.begin() as connection:
                present = connection.execute(
                    select(CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint).where(row).with_for_update()
                ).one_or_none()
                if present is not None and (retired := Retired.from_bytes(bytes(present.checkpoint))) is not None:
                    raise retired.error(shard)
                fence = max(known_fence, 0 if present is None else int(present.fence)) + 1
                values = {"fence": fence, "checkpoint": checkpoint.to_bytes()}
                if present is None:
                    connection.execute(insert(CHECKPOINTS).values(shard_fqn=shard, **values))
                else:
                    connection.execute(update(CHECKPOINTS).where(row).values(**values))
        except SQLAlchemyError as error:
            raise self._store.failure(f"the checkpoint of {shard} could not be written back", error) from error
        return fence


class RepairableCatalog:
    """An Iceberg catalog with consumers' checkpoints, in the home table of a URL."""

    shows_present_tables = False

    def __init__(self, url: str) -> None:
        from coranto_consumers.stores.iceberg.owner import IcebergOwner  # Needs the extra `lake`.
        from coranto_consumers.stores.iceberg.urls import IcebergHome

        home = IcebergHome.at(url)
        self._name = home.name
        # This owner writes no data files. Like any owner, it names a folder, where the next owner looks for files.
        self._owner = IcebergOwner(home.catalog, home.table)

    def raise_fence(self, shard: str) -> Restored:
        from coranto_consumers.stores.iceberg.catalogs import FAILURES

        try:
            found = self._owner.raise_fence(shard)
        except FAILURES as error:
            raise self._failure(shard, error) from error
        return Restored(found.fence + 1, found.checkpoint)

    def write_checkpoint(self, shard: str, known_fence: int, checkpoint: Checkpoint) -> int:
        from coranto_consumers.stores.iceberg.catalogs import FAILURES
        from coranto_consumers.stores.iceberg.restoring import restore

        try:
            return restore(self._owner, shard, known_fence, checkpoint)
        except FAILURES as error:
            raise self._failure(shard, error) from error

    def delete_staged(self, shard: str, table: str) -> int:
        raise CorantoError(f"{self._name} has no stage tables: the next owner of {shard} removes files that are left")

    def _failure(self, shard: str, error: Exception) -> SqlStoreError:
        return SqlStoreError(
            f"{self._name}: the state of {shard} could not be written: {type(error).__name__}: {error}"
        )
