"""The Iceberg store of a shard: rows, the checkpoint and the fence are in one commit of one table.

Rows to append are written to files once, before the first attempt. Rows to merge by keys are written in each attempt,
as what they make of the table's rows. Files of attempts that lost are removed. A process that dies leaves its files. No
snapshot names them, so no reader sees them, and the next owner removes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table, Transaction
from sqlalchemy.exc import DBAPIError

from coranto.errors import CommitOutcomeUnknown, InvalidInput
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.engines import is_transient
from coranto_consumers.stores.iceberg import rest
from coranto_consumers.stores.iceberg.changes import append, merge_rows
from coranto_consumers.stores.iceberg.files import sweep
from coranto_consumers.stores.iceberg.merge import last_of_keys, merge
from coranto_consumers.stores.iceberg.owner import Change, IcebergOwner
from coranto_consumers.stores.iceberg.rows import fit
from coranto_consumers.stores.iceberg.tables import columns_of, plan_for
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import MergePlan, MergeRule, Quotient, Replace


class IcebergShardStore(Store):
    """A table of an Iceberg catalog to which a shard appends rows, or into which it merges them, each exactly once.

    Several shards, and other writers, may share the table; with keys, only shards that have other keys. It may be
    partitioned. Each transaction makes a snapshot and, if it has rows, a file in each of their partitions: give shards
    a long `min_txn_duration`.

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
        delete: str = "",
        relaxed_durability: bool = False,
    ) -> None:
        """`table` is `namespace.name`. With `schema` it is created if it is absent, without partitions.

        With `keys`, a row takes the place of the table's row that has the same values in these columns, or its other
        columns are merged by `rules`. `delete` is a further column of the rows: where it is true, the row of the keys
        goes. `relaxed_durability` accepts a catalog's server that may lose commits when its machine crashes. Raises
        InvalidInput for a catalog that this store cannot use.
        """
        if (rules or delete) and not keys:
            raise InvalidInput("needs keys: give those by which rows are merged", field="rules" if rules else "delete")
        self._owner = IcebergOwner(catalog, table, folders=True, relaxed_durability=relaxed_durability)
        self._catalog = catalog
        self._name = table
        self._schema = schema
        self._keys, self._rules, self._delete = tuple(keys), dict(rules or {}), delete
        self._plan: MergePlan | None = None  # To merge by keys.
        self._unknown = False  # A commit's outcome is unknown: this owner must not go on.
        self._pending: list[pa.Table] = []
        self._commit: asyncio.Future[None] | None = None
        self._columns: pa.Schema = pa.schema([])

    def append(self, rows: Sequence[Mapping[str, object]] | pa.Table | pa.RecordBatch) -> None:
        """Add rows to the current transaction. Raises InvalidInput for rows that do not fit the table.

        Rows in Arrow are written as they are, without a Python object of any value. A nullable column that they lack is
        null, also where rows take the place of others. Of the rows of a key in a transaction, the last counts, unless
        columns have rules.
        """
        if isinstance(rows, pa.RecordBatch):
            given = pa.Table.from_batches([rows])
        elif isinstance(rows, pa.Table):
            given = rows
        else:
            self._require_known({name for row in rows for name in row})
            try:
                given = pa.Table.from_pylist(list(rows), self._columns)
            except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
                raise InvalidInput(f"do not fit {self._name}: {error}", field="rows") from error
        self._require_known(given.column_names)
        added = fit(given, self._columns, self._name)
        if added.num_rows:
            self._pending.append(added)

    def _require_known(self, names: Iterable[str]) -> None:
        if unknown := set(names) - set(self._columns.names):
            raise InvalidInput(
                f"{self._name} has no column {min(unknown)!r}: leave it out of the rows, or add it to the table and "
                f"restart the shard; there are {', '.join(self._columns.names)}",
                field="rows",
            )

    async def rows(self) -> pa.Table:
        """Return all rows of the table, and those of the current transaction."""
        if self._commit is not None:
            await asyncio.wait([self._commit])
        pending = list(self._pending)

        def read() -> pa.Table:
            columns = columns_of(table := self._owner.load())
            there = fit(table.scan().to_arrow(), columns, self._name)
            if self._plan is not None and pending:
                return merge(self._plan, there, last_of_keys(self._plan, pa.concat_tables(pending)))
            return pa.concat_tables([there, *(fit(each, columns, self._name) for each in pending)])

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
        # Values of a column that was dropped or renamed since would go nowhere.
        if gone := set(self._columns.names) - {*columns_of(table).names, self._delete}:
            raise InvalidInput(
                f"{self._name} has lost the column {min(gone)!r}: restart the shard with rows that fit the table",
                field="table",
            )
        number = owner.next_number
        folder = owner.name_of(number)
        committing = _Committing(FileWriter.of(table, folder), pa.concat_tables(rows), self._plan)
        try:
            owner.commit(checkpoint, {self._name: committing.change()}, number)
        except CommitOutcomeUnknown:
            self._unknown = True  # The table may name the files.
            raise
        except BaseException:
            sweep(table, folder)
            raise
        if committing.attempts > 1:
            sweep(table, folder, committing.named)

    def _create(self) -> None:
        try:
            table = self._catalog.load_table(self._name)
        except NoSuchTableError:
            if self._schema is None:
                raise InvalidInput(f"there is no table {self._name}; create it, or give its schema") from None
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            table = self._catalog.create_table_if_not_exists(self._name, self._schema)
        columns = columns_of(table)
        self._columns = columns
        if self._keys:
            self._plan = self._plan_to_merge(table, columns)
            self._columns = self._columns_to_merge(columns)

    def _plan_to_merge(self, table: Table, columns: pa.Schema) -> MergePlan:
        rules = {name: Replace() for name in columns.names if name not in self._keys} | self._rules
        given = [name for name in columns.names if not isinstance(rules.get(name), Quotient)]
        if self._delete:
            given.append(self._delete)
        return plan_for(table, None, given, self._keys, rules, self._delete)

    def _columns_to_merge(self, columns: pa.Schema) -> pa.Schema:
        """Return the columns of rows to merge: all have keys, and one that deletes a row may have no more."""
        if not self._delete:
            return pa.schema([each.with_nullable(each.nullable and each.name not in self._keys) for each in columns])
        nullable = [each.with_nullable(each.name not in self._keys) for each in columns]
        return pa.schema([*nullable, pa.field(self._delete, pa.bool_())])


class _Committing:
    """The rows of a transaction on their way into files that its commit names."""

    def __init__(self, writer: FileWriter, rows: pa.Table, plan: MergePlan | None) -> None:
        self._writer = writer
        self._rows = rows
        self._plan = plan
        self.attempts = 0
        self.named: set[str] = set()
        """The locations of the files of the last attempt."""

    def change(self) -> Change:
        """Return the change of the table. Rows to append are written now, and rows to merge in each attempt."""
        writer, plan = self._writer, self._plan
        if plan is None:
            files = list(writer.write(self._rows.to_batches()))

            def add(transaction: Transaction, summary: Mapping[str, str]) -> None:
                append(transaction, summary, files, writer)

            return add
        rows = last_of_keys(plan, self._rows)

        def merge_into(transaction: Transaction, summary: Mapping[str, str]) -> None:
            self.attempts += 1
            files = merge_rows(transaction, summary, plan, lambda: [rows], writer)
            self.named = {file.file_path for file in files}

        return merge_into
