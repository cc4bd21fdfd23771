"""Rows of SQL tables, sorted by key, read in bounded memory from one snapshot of the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

from sqlalchemy import Column, Connection, LargeBinary, MetaData, Table, Text, Uuid, cast, func, inspect, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.sql import ColumnElement

from coranto.errors import CorruptData, InvalidInput, SqlStoreError
from coranto_consumers.stores.engines import READS_ONLY
from coranto_consumers.stores.sql import SqlStore

_FETCHED: Final = 5000
"""Rows per fetch from a database."""


@contextmanager
def opened(left: SqlStore, right: SqlStore) -> Iterator[tuple[Connection, Connection]]:
    """Yield connections to both stores, each in a snapshot transaction.

    Stores with the same URL share a snapshot, except in MariaDB and MySQL, where a connection can read only one
    result at a time.
    """
    with ExitStack() as exits:
        one = exits.enter_context(reading(left))
        yield one, one if left.url == right.url and not left.is_mysql else exits.enter_context(reading(right))


@contextmanager
def reading(store: SqlStore) -> Iterator[Connection]:
    """Yield a connection to a store in a snapshot transaction."""
    try:
        with store.engine.connect() as connection:
            connection.execution_options(**{READS_ONLY: True})
            if not store.is_sqlite:
                connection.execution_options(isolation_level="REPEATABLE READ")
            # A session is idle while the other database sorts.
            if store.is_postgresql:
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            elif store.is_mysql:
                connection.exec_driver_sql("SET SESSION wait_timeout = 86400, net_write_timeout = 86400")
            yield connection
    except SQLAlchemyError as error:
        raise store.failure("a table could not be read", error) from error


class SortedRows(Protocol):
    """A table in one snapshot of its store."""

    name: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the table's order."""

    def count(self) -> int:
        """Return the number of rows."""

    def rows(self, keys: Sequence[str], columns: Sequence[str], count: int) -> Iterator[Sequence[Any]]:
        """Yield the values of the key's columns and of `columns`, sorted by the key.

        Raises SqlStoreError if the number of rows is not `count`, and CorruptData for a value that is not of its
        column's type.
        """


class SortedTable:
    """A table of a SQL store, read through a connection in a snapshot transaction."""

    def __init__(self, store: SqlStore, connection: Connection, name: str) -> None:
        """Look up the table. `name` may begin with a schema and a dot. Raises InvalidInput if it does not exist."""
        self._store = store
        self._connection = connection
        self.name = name
        self._table = _reflected(store, connection, name)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the table's order."""
        return tuple(column.name for column in self._table.columns)

    def count(self) -> int:
        """Return the number of rows."""
        return int(self._connection.execute(select(func.count()).select_from(self._table)).scalar_one())

    def rows(self, keys: Sequence[str], columns: Sequence[str], count: int) -> Iterator[Sequence[Any]]:
        """Yield the values of the key's columns and of `columns`, sorted by the key.

        Raises SqlStoreError if the number of rows is not `count`, and CorruptData for a value that is not of its
        column's type.
        """
        chosen = [self._table.c[name] for name in (*keys, *columns)]
        order = [_sorted_by_value(self._store, self._table.c[name]) for name in keys]
        statement = select(*chosen).order_by(*order).execution_options(yield_per=_FETCHED)
        read = 0
        result = self._connection.execute(statement)
        try:
            for row in result:
                read += 1
                yield row
        except (ValueError, TypeError, ArithmeticError) as error:
            raise CorruptData(
                f"table {self.name}: row {read + 1} by key holds a value that is not of its column's type: {error}"
            ) from error
        finally:
            result.close()
        if read != count:
            raise SqlStoreError(
                f"store {self._store.name}: table {self.name} has {count} rows, and {read} of them were read; "
                "compare the tables again"
            )


def _reflected(store: SqlStore, connection: Connection, name: str) -> Table:
    schema, _, bare = name.rpartition(".")
    found = inspect(connection)
    for place, table in ((None, name), *([(schema, bare)] if schema else [])):
        if found.has_table(table, place):
            return Table(table, MetaData(), schema=place, autoload_with=connection)
    raise InvalidInput(f"there is no table {name} in {store.name}; check its name and the URL", field="table")


def _sorted_by_value(store: SqlStore, column: Column[Any]) -> ColumnElement[Any]:
    """Return the expression that sorts a column by its values: text by code points, not by a language's collation."""
    try:
        is_text = column.type.python_type is str
    except NotImplementedError:
        is_text = False
    if not is_text or isinstance(column.type, Uuid):
        return column
    if store.is_sqlite:
        return column.collate("BINARY")
    return cast(column, LargeBinary) if store.is_mysql else cast(column, Text).collate("C")
