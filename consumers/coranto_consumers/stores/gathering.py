"""Rows that a transaction inserts: gathered, and written many at a time.

One statement for each row costs several times what the row does. So rows are written before anything may read them:
before another statement of the transaction, at its commit, and once they are many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from sqlalchemy import Column, Connection, Table, TypeDecorator, insert

from coranto.errors import InvalidInput
from coranto_consumers.stores.copying import can_copy, copy_into, copy_text

MOST_ROWS: Final = 10_000
"""Rows that are gathered before they are written in any case."""

_LEAST_TO_COPY: Final = 64
"""Fewer rows go by INSERT: COPY's own cost would not pay."""

Row: TypeAlias = Mapping[str, Any]
_Place: TypeAlias = tuple[Table, tuple[str, ...]]


class GatheredRows:
    """Rows of one transaction that are not written yet."""

    def __init__(self) -> None:
        self._places: dict[_Place, list[Row]] = {}
        self._count = 0
        self._failure: Exception | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, table: Table, row: Row) -> None:
        """Gather a row, given by column. Raises InvalidInput for a column that the table does not have."""
        names = tuple(row)
        rows = self._places.get((table, names))
        if rows is None:
            unknown = [name for name in names if name not in table.c]
            if unknown:
                raise InvalidInput(
                    f"table {table.name} has no column {unknown[0]!r}, but {', '.join(map(repr, table.c.keys()))}",
                    field="row",
                )
            rows = self._places[table, names] = []
        rows.append(row)
        self._count += 1

    def write(self, connection: Connection) -> None:
        """Write what was gathered: tables in the order of their first rows, and the rows of each in their order.

        Raises the database's error as SQLAlchemy does, and again at each later call: the transaction lacks rows then,
        and must not commit.
        """
        if self._failure is not None:
            raise self._failure
        # Taken before it is written, since the statements below announce themselves like any others.
        places, self._places, self._count = self._places, {}, 0
        try:
            for (table, names), rows in places.items():
                if not _copied(connection, table, names, rows):
                    connection.execute(insert(table), rows)
        except Exception as error:
            self._failure = error
            raise


def _copied(connection: Connection, table: Table, names: Sequence[str], rows: Sequence[Row]) -> bool:
    """Write rows by COPY, if that means the same as to insert them. Returns False if nothing was written."""
    if connection.dialect.name != "postgresql" or len(rows) < _LEAST_TO_COPY or not names:
        return False
    if any(column.default is not None for column in table.c if column.key not in names):
        return False  # SQLAlchemy would give these columns their values.
    columns = [_column([row[name] for row in rows], table.c[name]) for name in names]
    if any(column is None for column in columns):
        return False
    copy_into(connection, table, names, copy_text((), columns))
    return True


def _column(values: list[Any], column: Column[Any]) -> Any | None:
    """Return the values of a column as an Arrow array; None if their text might not mean the same to COPY."""
    if isinstance(column.type, TypeDecorator) or column.identity is not None or column.computed is not None:
        return None
    import pyarrow as pa  # Only for this: it takes a while.

    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError):
        return None
    kind = array.type
    if pa.types.is_null(kind):
        return array.cast(pa.string())
    plain = pa.types.is_string(kind) or pa.types.is_int64(kind) or pa.types.is_boolean(kind)
    if not plain and not (pa.types.is_float64(kind) and column.type.python_type is float):
        return None
    return array if can_copy(kind, column) else None
