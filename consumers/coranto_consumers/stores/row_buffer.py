"""Buffered inserts and merges of a transaction, written many rows at a time.

A statement costs several times more than a row. So rows are buffered, and flushed before another statement of the
transaction could read them, at the commit, and when the buffer is full. While a commit flushes rows, the shard consumes
the next transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from sqlalchemy import Column, Connection, Dialect, Table, insert

from coranto.errors import InvalidInput
from coranto_consumers.stores.binding import Row, replace_row_surrogates, rows_of
from coranto_consumers.stores.copying import can_copy, copy_text, copying
from coranto_consumers.stores.merge import MergePlan
from coranto_consumers.stores.staging import merge_in_transaction, write_in_transaction

if TYPE_CHECKING:
    import pyarrow as pa

MAX_ROWS: Final = 10_000
"""The maximum number of buffered rows to insert."""
_MAX_MERGED_BYTES: Final = 64 << 20
"""The maximum bytes of buffered rows to merge, not counting the last batch."""

_MIN_TO_COPY: Final = 64
"""Fewer rows are written by INSERT: the fixed cost of COPY is too high for them."""

_Place: TypeAlias = tuple[Table, tuple[str, ...], int]
_Merge: TypeAlias = "tuple[MergePlan, pa.RecordBatch]"
_Part: TypeAlias = "list[Row] | pa.RecordBatch | _Merge"


class RowBuffer:
    """Rows of one transaction that are not written yet."""

    def __init__(self) -> None:
        self._places: dict[_Place, list[_Part]] = {}
        """The parts to write, in order, for each combination of table, columns and number of earlier merges."""
        self._merges = 0
        self._count = self._merged_bytes = 0
        self._failure: Exception | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """True if the buffer is full, and must be written now."""
        return self._count >= MAX_ROWS or self._merged_bytes >= _MAX_MERGED_BYTES

    def add(self, table: Table, row: Row) -> None:
        """Buffer a row, given by column name. Raises InvalidInput for a column that the table does not have."""
        parts = self._parts(table, tuple(row))
        if not parts or not isinstance(parts[-1], list):
            parts.append([])
        rows = parts[-1]
        assert isinstance(rows, list)
        rows.append(row)
        self._count += 1

    def add_batch(self, table: Table, rows: pa.RecordBatch) -> None:
        """Buffer the rows of an Arrow record batch. Its columns are columns of the table by name."""
        parts = self._parts(table, tuple(rows.schema.names))
        if rows.num_rows:
            parts.append(rows)
            self._count += rows.num_rows

    def add_merge(self, plan: MergePlan, rows: pa.RecordBatch) -> None:
        """Buffer the rows of an Arrow record batch that are to be merged. The plan is for the batch's columns."""
        self._merges += 1
        self._places[plan.table, plan.columns, -self._merges] = [(plan, rows)]
        self._merged_bytes += rows.nbytes

    def _parts(self, table: Table, names: tuple[str, ...]) -> list[_Part]:
        parts = self._places.get((table, names, self._merges))
        if parts is None:
            unknown = [name for name in names if name not in table.c]
            if unknown:
                raise InvalidInput(
                    f"table {table.name} has no column {unknown[0]!r}, but {', '.join(map(repr, table.c.keys()))}",
                    field="row",
                )
            parts = self._places[table, names, self._merges] = []
        return parts

    def flush(self, connection: Connection) -> None:
        """Write the buffered rows: tables in the order of their first rows, and the rows of each table in order.

        Rows that were added before a merge are written before it, and rows that were added after it are written later.

        Raises the database's error as SQLAlchemy does, and again at each later call: the transaction lacks rows, and
        must not commit.
        """
        if self._failure is not None:
            raise self._failure
        # Cleared before writing, because the statements below call this method again.
        places, self._places, self._count, self._merged_bytes = self._places, {}, 0, 0
        try:
            for (table, names, _), parts in places.items():
                for part in parts:
                    if isinstance(part, tuple):
                        merge_in_transaction(connection, *part)
                    elif not isinstance(part, list):
                        _write_batch(connection, table, part)
                    elif not _copied(connection, table, names, part):
                        connection.execute(insert(table), [replace_row_surrogates(row) for row in part])
        except Exception as error:
            self._failure = error
            raise


def _write_batch(connection: Connection, table: Table, batch: pa.RecordBatch) -> None:
    """Write the rows of a batch, without a Python object for each value if that has the same result."""
    names = batch.schema.names
    is_all = _others_lack_defaults(table, names) and not any(_is_generated(table.c[name]) for name in names)
    if is_all and connection.dialect.name == "postgresql":
        write_in_transaction(connection, table, batch)
    elif is_all and all(
        each.name.isidentifier()
        and _binds_unchanged(each.type)
        and can_copy(each.type, table.c[each.name], connection.dialect)
        for each in batch.schema
    ):
        statement = insert(table).values(dict.fromkeys(names)).compile(dialect=connection.dialect)
        rows: Any = batch.to_pylist()
        if statement.positiontup is not None:
            rows = list(zip(*(batch.column(name).to_pylist() for name in statement.positiontup), strict=True))
        connection.exec_driver_sql(str(statement), rows)
    else:
        connection.execute(insert(table), rows_of(batch, table, connection.dialect))


def _binds_unchanged(kind: Any) -> bool:
    """Return True if SQLAlchemy passes the Python values of an Arrow type unchanged to every driver."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_int64(kind) or pa.types.is_float64(kind))


def _others_lack_defaults(table: Table, names: Sequence[str]) -> bool:
    """Return True if SQLAlchemy does not set defaults of columns outside of `names`."""
    return all(column.default is None for column in table.c if column.key not in names)


def _is_generated(column: Column[Any]) -> bool:
    """Return True if the database generates a column's values."""
    return column.identity is not None or column.computed is not None


def _copied(connection: Connection, table: Table, names: Sequence[str], rows: Sequence[Row]) -> bool:
    """Write rows by COPY, if that has the same result as INSERT. Returns False if nothing was written."""
    if connection.dialect.name != "postgresql" or len(rows) < _MIN_TO_COPY or not names:
        return False
    if not _others_lack_defaults(table, names):
        return False
    columns = [_column([row[name] for row in rows], table.c[name], connection.dialect) for name in names]
    if any(column is None for column in columns):
        return False
    with copying(connection, table, names) as copy:
        copy.write(memoryview(copy_text((), columns)))
    return True


def _column(values: list[Any], column: Column[Any], dialect: Dialect) -> Any | None:
    """Return the values of a column as an Arrow array. None if COPY might parse their text to other values."""
    if _is_generated(column):
        return None
    import pyarrow as pa  # Imported here, because it takes a while.

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
    return array if can_copy(kind, column, dialect) else None
