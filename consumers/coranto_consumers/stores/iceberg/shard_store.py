"""The Iceberg store of a shard: rows, the checkpoint and the fence are in one commit.

Rows to append are written to files once, before the first attempt of the commit. Rows to merge by keys are merged with
the table's rows, and written to files, in each attempt. Files of failed attempts are removed. A process that dies
leaves its files. No snapshot refers to them, so readers do not see them, and the next owner removes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

import pyarrow as pa
from pyiceberg.catalog import Catalog

from coranto.errors import CommitOutcomeUnknown, InvalidInput
from coranto.messages.checkpoints import Checkpoint, Identity
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.iceberg.catalogs import is_transient
from coranto_consumers.stores.iceberg.files import sweep
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.shard_table import Rows, ShardTable
from coranto_consumers.stores.merge import MergeRule


class IcebergShardStore(Store):
    """Tables of an Iceberg catalog. A shard appends rows to them, or merges rows into them, each row exactly once.

    The first table, the home, has the checkpoint. In a SQL catalog, further tables may be added (`add_table`); all
    tables change in one commit.

    Several shards, and other writers, may share a table. With keys, shards must write different keys. A table may be
    partitioned. Each transaction makes a snapshot and, if it has rows, a file in each partition of these rows: give
    shards a long `min_txn_duration`.

    The catalog must be pyiceberg's REST catalog, or its SQL catalog on PostgreSQL or SQLite.
    """

    def __init__(
        self,
        catalog: Catalog,
        table: str,
        schema: pa.Schema | None = None,
        *,
        keys: Sequence[str] = (),
        rules: Mapping[str, MergeRule] | None = None,
        delete: str | None = None,
        relaxed_durability: bool = False,
    ) -> None:
        """`table` is `namespace.name`. With `schema` it is created if it is absent, without partitions.

        With `keys`, a row replaces the table's row that has the same values in these columns, or its other columns are
        merged by `rules`. `delete` names an additional column of the rows: if it is true, the table's row with the same
        keys is deleted. `relaxed_durability` accepts a catalog whose server may lose commits when its machine crashes.
        Raises InvalidInput for a catalog that this store cannot use.
        """
        self._owner = IcebergOwner(catalog, table, relaxed_durability=relaxed_durability)
        self._catalog = catalog
        self._name = table
        self._tables = {table: ShardTable(table, schema, keys, rules, delete)}
        self._unknown = False  # A commit's outcome is unknown: this owner must not continue.
        self._commit: asyncio.Future[None] | None = None

    def add_table(
        self,
        table: str,
        schema: pa.Schema | None = None,
        *,
        keys: Sequence[str] = (),
        rules: Mapping[str, MergeRule] | None = None,
        delete: str | None = None,
    ) -> IcebergShardStore:
        """Add another table of the same catalog, before the shard starts. Returns this store.

        For a REST catalog, which commits each table by itself, `restore_checkpoint` then raises InvalidInput.
        """
        if table in self._tables:
            raise InvalidInput(f"{table!r} is a table of this store already; add each once", field="table")
        self._tables[table] = ShardTable(table, schema, keys, rules, delete)
        return self

    def append(self, rows: Rows, table: str = "") -> None:
        """Add rows for a table, by default the first, to the current transaction.

        Arrow rows are written without a Python object per value. A nullable column that the rows lack becomes null,
        even if a row replaces another one. If a transaction has several rows with one key, the last counts, unless
        columns have rules. Raises InvalidInput for rows that do not fit the table.
        """
        self._table(table).append(rows)

    async def rows(self, table: str = "") -> pa.Table:
        """Return all rows of a table, by default the first, including rows of the current transaction."""
        of = self._table(table)
        if self._commit is not None:
            await asyncio.wait([self._commit])
        pending = list(of.pending)
        return await asyncio.to_thread(lambda: of.view(self._owner.load(of.name), pending))

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        def restore() -> Checkpoint:
            self._owner.require_durability()
            for each in self._tables.values():
                each.open(self._catalog)
            before = self._owner.raise_fence(shard)
            self._unknown = False
            for name in self._tables.keys() - {self._name}:
                self._owner.register_table(name)
            self._owner.sweep()
            return before.checkpoint

        return await asyncio.to_thread(restore)

    def identity(self) -> Identity:
        return Identity(outputs=frozenset(f"table {name}" for name in self._tables), store=self._owner.location)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        rows = {name: each.pending for name, each in self._tables.items() if each.pending}
        self._forget_pending()
        self._commit = asyncio.ensure_future(self._complete(rows, checkpoint, wait_for))
        return self._commit

    async def require_fence(self) -> None:
        await asyncio.to_thread(lambda: self._owner.require_fence(self._owner.load()))

    async def destroy(self) -> None:
        if self._commit is not None:
            await asyncio.wait([self._commit])
        self._forget_pending()

    def is_transient(self, error: BaseException) -> bool:
        return is_transient(error) or super().is_transient(error)

    def _table(self, name: str) -> ShardTable:
        found = self._tables.get(name or self._name)
        if found is None:
            raise InvalidInput(
                f"this store has no table {name!r}: add it with add_table; it has {', '.join(self._tables)}",
                field="table",
            )
        return found

    def _forget_pending(self) -> None:
        for each in self._tables.values():
            each.pending = []

    async def _complete(
        self, rows: Mapping[str, Sequence[pa.Table]], checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> None:
        for awaited in wait_for:
            await awaited
        # Work in a thread cannot be cancelled, so a cancelled caller waits for its end.
        working = asyncio.ensure_future(asyncio.to_thread(self._commit_rows, rows, checkpoint))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def _commit_rows(self, rows: Mapping[str, Sequence[pa.Table]], checkpoint: Checkpoint) -> None:
        if self._unknown:
            raise CommitOutcomeUnknown(f"{self._name}: the outcome of an earlier commit is unknown; restore again")
        owner = self._owner
        if not rows:
            owner.commit(checkpoint, {}, owner.state.committed)
            return
        home = owner.load()
        owner.require_fence(home)
        number = owner.next_number
        folder = owner.name_of(number)
        tables = {name: home if name == self._name else owner.load(name) for name in rows}
        committing = {name: self._tables[name].committing(tables[name], folder, each) for name, each in rows.items()}
        try:
            owner.commit(checkpoint, {name: each.change() for name, each in committing.items()}, number)
        except CommitOutcomeUnknown:
            self._unknown = True  # The commit may have been applied, so the files must stay.
            raise
        except BaseException:
            for table in tables.values():
                sweep(table, folder)
            raise
        if any(each.merges > 1 for each in committing.values()):
            named = set[str]().union(*(each.named for each in committing.values()))  # Tables may share a folder.
            for table in tables.values():
                sweep(table, folder, named)
