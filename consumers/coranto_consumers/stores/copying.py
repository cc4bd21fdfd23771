"""Text for PostgreSQL's COPY, built from whole Arrow columns, without a Python object per value.

Functions that need Arrow or PostgreSQL's driver import them themselves: the imports take half a second, and most
processes do not need them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Column, Connection, Dialect, Table
from sqlalchemy.exc import DBAPIError

from coranto_consumers.stores.binding import is_plain

if TYPE_CHECKING:
    from psycopg import Copy, sql

_NULL: Final = r"\N"
_ESCAPES: Final = (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\r", "\\r"))


def can_copy(kind: Any, column: Column[Any], dialect: Dialect) -> bool:
    """Return True if COPY parses the text of an Arrow type's values to the same values in a table's column."""
    import pyarrow as pa

    types = pa.types
    if not is_plain(column, dialect):
        return False
    try:
        stored = column.type.python_type
    except NotImplementedError:
        return False
    if types.is_string(kind):
        return stored is str
    if types.is_integer(kind):
        return stored in (int, float, Decimal)
    if types.is_float64(kind):
        return stored in (float, Decimal)
    if types.is_decimal128(kind):
        return stored is Decimal
    if types.is_boolean(kind):
        return stored is bool
    if types.is_timestamp(kind):
        return stored is dt.datetime
    return bool(types.is_date32(kind)) and stored is dt.date


def copy_text(owner: Sequence[object], columns: Sequence[Any]) -> Any:
    """Return a buffer with rows in COPY's text format: first the values of `owner`, which all rows share, then columns.

    `columns` has at least one Arrow array. Arrays have equal lengths, and types that `can_copy` accepts.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from coranto.messages.arrow_values import joined

    *before, last = map(_texts, columns)
    ended = pc.binary_join_element_wise(last, "", "\n", null_handling="replace", null_replacement=_NULL)
    shared = [pa.scalar(_escaped(str(value))) for value in owner]
    rows = pc.binary_join_element_wise(*shared, *before, ended, "\t", null_handling="replace", null_replacement=_NULL)
    return joined(rows)


def copy_statement(table: Table, names: Sequence[str]) -> sql.Composed:
    """Return the statement that copies text into columns of a table."""
    from psycopg import sql

    place = [part for part in (table.schema, table.name) if part is not None]
    listed = sql.SQL(", ").join(sql.Identifier(table.c[name].name) for name in names)
    return sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(*place), listed)


@contextmanager
def copying(connection: Connection, table: Table, names: Sequence[str]) -> Iterator[Copy]:
    """Copy rows into columns of a PostgreSQL table, in a transaction. Raises database errors as SQLAlchemy does."""
    import psycopg

    driver: Any = connection.connection.driver_connection
    statement = copy_statement(table, names)
    try:
        with driver.cursor() as cursor, cursor.copy(statement) as copy:
            yield copy
    except psycopg.Error as error:
        lost = bool(driver.closed)
        raise DBAPIError.instance(  # As for any other statement of the transaction.
            statement.as_string(driver), None, error, psycopg.Error, hide_parameters=True, connection_invalidated=lost
        ) from error


def _texts(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        return pc.cast(column, pa.string())
    if not _may_need_escapes(column):
        return column
    for character, escape in _ESCAPES:
        column = pc.replace_substring(column, character, escape)
    return column


def _may_need_escapes(texts: Any) -> bool:
    """Return True if strings may have characters that COPY escapes: a backslash, or any control character up to CR."""
    from coranto.messages.arrow_values import joined

    characters = joined(texts)
    return bool(((characters <= ord("\r")) | (characters == ord("\\"))).any())


def _escaped(text: str) -> str:
    for character, escape in _ESCAPES:
        text = text.replace(character, escape)
    return text
