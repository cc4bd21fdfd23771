"""Rows of Iceberg tables, sorted by key. DuckDB sorts them, on disk if they are large."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import duckdb
import pyarrow as pa
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from coranto.errors import SqlStoreError
from coranto_consumers.stores.iceberg.catalogs import FAILURES
from coranto_consumers.stores.iceberg.urls import IcebergHome

_FETCHED: Final = 5000
"""Rows per fetch from DuckDB."""
_MEMORY: Final = "512MB"
"""DuckDB's memory limit. It spills to a temporary folder."""


@contextmanager
def opened_iceberg(home: IcebergHome, name: str) -> Iterator[IcebergRows]:
    """Yield a table of a home's catalog at its current snapshot. Raises InvalidInput if it does not exist."""
    table = home.load(name)
    with tempfile.TemporaryDirectory(prefix="coranto-compare-") as folder:
        with duckdb.connect(config={"memory_limit": _MEMORY, "temp_directory": folder}) as connection:
            yield IcebergRows(home, table, table.current_snapshot(), connection, name)


class IcebergRows:
    """A table at one snapshot. If another program removes its files, the comparison fails."""

    def __init__(
        self,
        home: IcebergHome,
        table: Table,
        snapshot: Snapshot | None,
        connection: duckdb.DuckDBPyConnection,
        name: str,
    ) -> None:
        self.name = name
        self._home = home
        self._table = table
        self._snapshot = snapshot
        self._connection = connection

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the table's order."""
        return tuple(field.name for field in self._table.schema().fields)

    def count(self) -> int:
        """Return the number of rows. Raises SqlStoreError."""
        if self._snapshot is None:
            return 0
        try:
            return int(self._table.scan(snapshot_id=self._snapshot.snapshot_id).count())
        except (*FAILURES, pa.ArrowException, ValueError) as error:
            raise self._failure(error) from error

    def rows(self, keys: Sequence[str], columns: Sequence[str], count: int) -> Iterator[Sequence[Any]]:
        """Yield the values of the key's columns and of `columns`, sorted by the key: text by code points.

        Raises SqlStoreError if the number of rows is not `count`, or if a file cannot be read.
        """
        if self._snapshot is None:
            return
        chosen = [*keys, *columns]
        read = 0
        try:
            scan = self._table.scan(selected_fields=tuple(chosen), snapshot_id=self._snapshot.snapshot_id)
            found = scan.to_arrow_batch_reader()
            self._connection.register("found", found.cast(_without_zones(found.schema)))
            order = ", ".join(_quoted(name) for name in keys)
            result = self._connection.execute(f"SELECT {', '.join(map(_quoted, chosen))} FROM found ORDER BY {order}")
            while rows := result.fetchmany(_FETCHED):
                read += len(rows)
                yield from rows
        except (*FAILURES, duckdb.Error, pa.ArrowException, ValueError) as error:
            raise self._failure(error) from error
        if read != count:
            raise SqlStoreError(f"{self._home.name}: {self.name} has {count} rows, and {read} of them were read")

    def _failure(self, error: Exception) -> SqlStoreError:
        return SqlStoreError(f"{self._home.name}: {self.name} could not be read: {type(error).__name__}: {error}")


def _without_zones(columns: pa.Schema) -> pa.Schema:
    """Return the columns, with UTC timestamps without a time zone: DuckDB needs pytz for time zones."""
    return pa.schema(
        [each.with_type(pa.timestamp(each.type.unit)) if pa.types.is_timestamp(each.type) else each for each in columns]
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
