"""Comparison of two tables in SQL stores or Iceberg catalogs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from coranto.errors import InvalidInput
from coranto.telemetry import ProgressReport, progress
from coranto_consumers.comparison.merging import RowMerger
from coranto_consumers.comparison.report import TableComparison
from coranto_consumers.comparison.tables import SortedRows, SortedTable, opened, reading
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.sql import SqlStore

if TYPE_CHECKING:
    from coranto_consumers.stores.iceberg.urls import IcebergHome

_REPORTED_ROWS: Final = 1000
"""Rows per progress report."""


@dataclass(frozen=True, slots=True)
class TableOf:
    """A table in a store. `name` may begin with a schema and a dot. For Iceberg, it begins with a namespace."""

    store: SqlStore | IcebergHome
    name: str

    @property
    def place(self) -> tuple[str, str]:
        """The store and the name, which identify the table."""
        return self.store.url if isinstance(self.store, SqlStore) else f"{ICEBERG}{self.store.catalog.name}", self.name


def table_at(store: str, name: str) -> TableOf:
    """Return a table in the store at a URL: of a database, or iceberg://CATALOG/namespace.table.

    The default namespace of an Iceberg table is the URL's. Raises InvalidInput, and SqlStoreError.
    """
    if not store.startswith(ICEBERG):
        return TableOf(SqlStore(store), name)
    from coranto_consumers.stores.iceberg.urls import IcebergHome  # Needs the extra `lake`.

    home = IcebergHome.at(store)
    return TableOf(home, name if "." in name else f"{home.table.rpartition('.')[0]}.{name}")


def compare_tables(
    left: TableOf,
    right: TableOf,
    keys: Sequence[str],
    *,
    ignore: Collection[str] = (),
    tolerance: float = 0.0,
    examples: int = 10,
) -> TableComparison:
    """Compare two tables by the columns of a key, and all other columns except `ignore`.

    Floats may differ by `tolerance`, relatively or absolutely; all else is compared exactly. `examples` is the maximum
    number of examples of each kind of difference. Memory does not grow with the tables: databases sort them. An Iceberg
    table is read at its current snapshot, and sorted by DuckDB. Raises InvalidInput for tables and columns that do not
    exist and for keys without an order, SqlStoreError and CorruptData for a table that could not be read completely.
    """
    if not keys:
        raise InvalidInput("name the columns that identify rows", field="keys")
    if not 0 <= tolerance < math.inf:
        raise InvalidInput(f"{tolerance} is not a tolerance; give 0 or more, such as 1e-9", field="tolerance")
    if left.place == right.place:
        raise InvalidInput(f"{left.name} is to be compared with itself; name another table, or store", field="right")
    with _opened(left, right) as (mine, others):
        for table in (mine, others):
            if missing := [name for name in keys if name not in table.columns]:
                raise InvalidInput(
                    f"has no column {missing[0]}; its columns are {', '.join(table.columns)}",
                    field=f"table {table.name}",
                )
        both = [name for name in mine.columns if name in others.columns]
        if unknown := sorted(set(ignore) - {*mine.columns, *others.columns}):
            raise InvalidInput(f"neither table has a column {unknown[0]}", field="ignore")
        columns = [name for name in both if name not in keys and name not in ignore]
        counts = mine.count(), others.count()
        named = [mine.name, others.name]
        if named[0] == named[1]:
            named = [f"{left.name} (left)", f"{right.name} (right)"]
        with progress("Comparing", sum(counts), unit="rows") as report:
            merged = RowMerger(keys, columns, tolerance=tolerance, examples=examples).merge(
                (named[0], _with_progress(mine.rows(keys, columns, counts[0]), report)),
                (named[1], _with_progress(others.rows(keys, columns, counts[1]), report)),
            )
    return TableComparison(
        tuple(keys),
        tuple(columns),
        merged,
        tuple(sorted(ignore)),
        tuple(name for name in mine.columns if name not in others.columns and name not in ignore),
        tuple(name for name in others.columns if name not in mine.columns and name not in ignore),
        tolerance,
    )


@contextmanager
def _opened(left: TableOf, right: TableOf) -> Iterator[tuple[SortedRows, SortedRows]]:
    """Yield both tables, each in one snapshot. Tables of one database share a snapshot where it allows that."""
    with ExitStack() as exits:
        if isinstance(left.store, SqlStore) and isinstance(right.store, SqlStore):
            one, other = exits.enter_context(opened(left.store, right.store))
            yield SortedTable(left.store, one, left.name), SortedTable(right.store, other, right.name)
        else:
            yield _alone(exits, left), _alone(exits, right)


def _alone(exits: ExitStack, table: TableOf) -> SortedRows:
    if isinstance(table.store, SqlStore):
        return SortedTable(table.store, exits.enter_context(reading(table.store)), table.name)
    from coranto_consumers.comparison.iceberg import opened_iceberg  # Needs the extra `lake`.

    return exits.enter_context(opened_iceberg(table.store, table.name))


def _with_progress(rows: Iterator[Sequence[Any]], report: ProgressReport) -> Iterator[Sequence[Any]]:
    """Yield rows, and report their number as progress."""
    since = 0
    for row in rows:
        yield row
        since += 1
        if since == _REPORTED_ROWS:
            report.advance(since)
            since = 0
    report.advance(since)
