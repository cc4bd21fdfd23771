"""A table that a shard writes to, with the rows of the current transaction and their files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.table import Table, Transaction

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg.changes import append, merge_rows
from coranto_consumers.stores.iceberg.merge import merge
from coranto_consumers.stores.iceberg.owner import Change
from coranto_consumers.stores.iceberg.rows import fit
from coranto_consumers.stores.iceberg.tables import columns_of, find_or_create, plan_for
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import MergePlan, MergeRule, Quotient, Replace, last_of_keys

Rows: TypeAlias = Sequence[Mapping[str, object]] | pa.Table | pa.RecordBatch
"""Rows as dicts, or in Arrow."""


class ShardTable:
    """A table, and the rows of the current transaction for it. Call `open` first."""

    def __init__(
        self,
        name: str,
        schema: pa.Schema | None,
        keys: Sequence[str],
        rules: Mapping[str, MergeRule] | None,
        delete: str | None,
    ) -> None:
        """See `IcebergShardStore`. Raises InvalidInput for rules without keys."""
        if (rules or delete) and not keys:
            raise InvalidInput("needs keys: give the columns for merging rows", field="rules" if rules else "delete")
        self.name = name
        self.pending: list[pa.Table] = []
        """The rows of the current transaction."""
        self._schema = schema
        self._keys, self._rules, self._delete = tuple(keys), dict(rules or {}), delete
        self._plan: MergePlan | None = None  # None without keys.
        self._columns: pa.Schema = pa.schema([])

    def open(self, catalog: Catalog) -> None:
        """Load the columns of the table, and create it if absent. Raises InvalidInput if keys or rules do not fit."""
        table = find_or_create(catalog, self.name, self._schema)
        columns = columns_of(table)
        self._columns = columns
        if self._keys:
            self._plan = self._plan_to_merge(table, columns)
            self._columns = self._columns_to_merge(columns)

    def append(self, rows: Rows) -> None:
        """Add rows to the current transaction. Raises InvalidInput for rows that do not fit the table."""
        if isinstance(rows, pa.RecordBatch):
            given = pa.Table.from_batches([rows])
        elif isinstance(rows, pa.Table):
            given = rows
        else:
            self._require_known({name for row in rows for name in row})
            try:
                given = pa.Table.from_pylist(list(rows), self._columns)
            except (pa.ArrowException, TypeError, OverflowError, UnicodeError) as error:
                raise InvalidInput(f"do not fit {self.name}: {error}", field="rows") from error
        self._require_known(given.column_names)
        added = fit(given, self._columns, self.name)
        if added.num_rows:
            self.pending.append(added)

    def view(self, table: Table, pending: Sequence[pa.Table]) -> pa.Table:
        """Return all rows of the table, including the uncommitted rows in `pending`."""
        columns = columns_of(table)
        there = fit(table.scan().to_arrow(), columns, self.name)
        if self._plan is not None and pending:
            return merge(self._plan, there, last_of_keys(self._plan, pa.concat_tables(pending)))
        return pa.concat_tables([there, *(fit(each, columns, self.name) for each in pending)])

    def committing(self, table: Table, folder: str, rows: Sequence[pa.Table]) -> CommittingRows:
        """Return the rows of a transaction, which will be written to files in `folder`.

        Raises InvalidInput if a column of the rows was dropped from the table.
        """
        if gone := set(self._columns.names) - {*columns_of(table).names, self._delete}:
            raise InvalidInput(
                f"{self.name} has lost the column {min(gone)!r}: restart the shard with rows that fit the table",
                field="table",
            )
        return CommittingRows(FileWriter.of(table, folder), pa.concat_tables(rows), self._plan)

    def _require_known(self, names: Iterable[str]) -> None:
        if unknown := set(names) - set(self._columns.names):
            raise InvalidInput(
                f"{self.name} has no column {min(unknown)!r}: leave it out of the rows, or add it to the table and "
                f"restart the shard; there are {', '.join(self._columns.names)}",
                field="rows",
            )

    def _plan_to_merge(self, table: Table, columns: pa.Schema) -> MergePlan:
        rules = {name: Replace() for name in columns.names if name not in self._keys} | self._rules
        given = [name for name in columns.names if not isinstance(rules.get(name), Quotient)]
        if self._delete:
            given.append(self._delete)
        return plan_for(table, None, given, self._keys, rules, self._delete)

    def _columns_to_merge(self, columns: pa.Schema) -> pa.Schema:
        """Return the columns of rows to merge. Keys are required. With `delete`, all other columns are nullable."""
        if not self._delete:
            return pa.schema([each.with_nullable(each.nullable and each.name not in self._keys) for each in columns])
        nullable = [each.with_nullable(each.name not in self._keys) for each in columns]
        return pa.schema([*nullable, pa.field(self._delete, pa.bool_())])


class CommittingRows:
    """The rows of a transaction, and the files that are written for them."""

    def __init__(self, writer: FileWriter, rows: pa.Table, plan: MergePlan | None) -> None:
        self._writer = writer
        self._rows = rows
        self._plan = plan
        self.merges = 0
        """The number of attempts that merged rows and wrote new files."""
        self.named: set[str] = set()
        """The locations of the last attempt's files."""

    def change(self) -> Change:
        """Return the change of the table. Rows to append are written to files now, rows to merge in each attempt."""
        writer, plan = self._writer, self._plan
        if plan is None:
            files = list(writer.write(self._rows.to_batches()))
            self.named = {file.file_path for file in files}

            def add(transaction: Transaction, summary: Mapping[str, str]) -> None:
                append(transaction, summary, files, writer)

            return add
        rows = last_of_keys(plan, self._rows)

        def merge_into(transaction: Transaction, summary: Mapping[str, str]) -> None:
            self.merges += 1
            files = merge_rows(transaction, summary, plan, lambda: [rows], writer)
            self.named = {file.file_path for file in files}

        return merge_into
