"""The Iceberg store of a shard: appended rows, the checkpoint and the fence are in one commit of one table.

Rows are written to a file once, before the first attempt. If it turns out that they will never commit, the file is
removed. A process that dies leaves its file. No snapshot names it, so no reader sees it, and the next owner removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table, Transaction
from sqlalchemy.exc import DBAPIError

from coranto.errors import CommitOutcomeUnknown, InvalidInput
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.engines import is_transient
from coranto_consumers.stores.iceberg import rest
from coranto_consumers.stores.iceberg.files import place_of, remove_file
from coranto_consumers.stores.iceberg.owner import IcebergOwner
from coranto_consumers.stores.iceberg.rows import fit


class IcebergShardStore(Store):
    """A table of an Iceberg catalog to which a shard appends rows, each exactly once.

    Several shards, and other writers that only append or compact, may share the table. It must not be partitioned. Each
    transaction makes a snapshot and, if it has rows, a file: give shards a long `min_txn_duration`.

    The catalog must be pyiceberg's REST catalog, or its SQL catalog on PostgreSQL or SQLite.
    """

    def __init__(
        self, catalog: Catalog, table: str, schema: pa.Schema | None = None, *, relaxed_durability: bool = False
    ) -> None:
        """`table` is `namespace.name`. With `schema` it is created if it is absent.

        `relaxed_durability` accepts a catalog's server that may lose commits when its machine crashes. Raises
        InvalidInput for a catalog that this store cannot use.
        """
        self._owner = IcebergOwner(catalog, table, relaxed_durability=relaxed_durability)
        self._catalog = catalog
        self._name = table
        self._schema = schema
        self._unknown = False  # A commit's outcome is unknown: this owner must not go on.
        self._pending: list[pa.Table] = []
        self._commit: asyncio.Future[None] | None = None
        self._columns: pa.Schema = pa.schema([])

    def append(self, rows: Sequence[Mapping[str, object]] | pa.Table | pa.RecordBatch) -> None:
        """Add rows to the current transaction. Raises InvalidInput for rows that do not fit the table.

        Rows in Arrow are written as they are, without a Python object of any value. Columns that the table does not
        have are left out.
        """
        if isinstance(rows, pa.RecordBatch):
            given = pa.Table.from_batches([rows])
        elif isinstance(rows, pa.Table):
            given = rows
        else:
            if unknown := {name for row in rows for name in row} - set(self._columns.names):
                raise InvalidInput(f"{self._name} has no column {min(unknown)!r}", field="rows")
            try:
                given = pa.Table.from_pylist(list(rows), self._columns)
            except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
                raise InvalidInput(f"do not fit {self._name}: {error}", field="rows") from error
        added = fit(given, self._columns, self._name)
        if added.num_rows:
            self._pending.append(added)

    async def rows(self) -> pa.Table:
        """Return all rows of the table, and those of the current transaction."""
        if self._commit is not None:
            await asyncio.wait([self._commit])
        pending = list(self._pending)

        def read() -> pa.Table:
            return pa.concat_tables([self._load().scan().to_arrow().cast(self._columns), *pending])

        return await asyncio.to_thread(read)

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        def restore() -> Checkpoint:
            self._owner.require_durability()
            self._create()
            before = self._owner.raise_fence(shard)
            self._unknown = False
            self._owner.sweep()
            return before.checkpoint

        return await asyncio.to_thread(restore)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        rows, self._pending = self._pending, []
        self._commit = asyncio.ensure_future(self._complete(rows, checkpoint, wait_for))
        return self._commit

    async def destroy(self) -> None:
        if self._commit is not None:
            await asyncio.wait([self._commit])
        self._pending = []

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return is_transient(error)
        return rest.is_transient(error) or super().is_transient(error)

    async def _complete(
        self, rows: Sequence[pa.Table], checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
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

    def _commit_rows(self, rows: Sequence[pa.Table], checkpoint: Checkpoint) -> None:
        if self._unknown:
            raise CommitOutcomeUnknown(f"{self._name}: the outcome of an earlier commit is unknown; restore anew")
        owner = self._owner
        if not rows:
            owner.commit(checkpoint, {}, owner.state.committed)
            return
        table = owner.load()
        owner.require_fence(table)
        number = owner.next_number
        file = self._write(table, owner.name_of(number), pa.concat_tables(rows))

        def add(transaction: Transaction, summary: Mapping[str, str]) -> None:
            transaction.add_files([file], snapshot_properties=dict(summary), check_duplicate_files=False)

        try:
            owner.commit(checkpoint, {self._name: add}, number)
        except CommitOutcomeUnknown:
            self._unknown = True  # The table may name the file.
            raise
        except BaseException:
            remove_file(table, file)
            raise

    def _write(self, table: Table, name: str, rows: pa.Table) -> str:
        path = place_of(table, name)
        with table.io.new_output(path).create() as stream:
            pq.write_table(rows, stream, compression="zstd")
        return path

    def _load(self) -> Table:
        return self._owner.load()

    def _create(self) -> None:
        try:
            table = self._catalog.load_table(self._name)
        except NoSuchTableError:
            if self._schema is None:
                raise InvalidInput(f"there is no table {self._name}; create it, or give its schema") from None
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            table = self._catalog.create_table_if_not_exists(self._name, self._schema)
        if not table.spec().is_unpartitioned():
            raise InvalidInput(f"{self._name} is partitioned, and shards append to tables that are not", field="table")
        self._columns = schema_to_pyarrow(table.schema(), include_field_ids=False)
