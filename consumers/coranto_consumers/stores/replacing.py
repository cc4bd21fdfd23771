"""Replacement of rows by key. A key may be staged only once in a transaction, or the result would be ambiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Insert, Select, Table, and_, exists, false, func, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.sql import ColumnElement

from coranto.errors import InvalidInput
from coranto_consumers.stores.engines import is_repeated_row


def refuse_repeated_keys(
    connection: Connection, table: Table, keys: Sequence[str], stage: Table, chosen: ColumnElement[bool]
) -> None:
    """Raise InvalidInput if several chosen rows of a stage table have the same key."""
    columns = [stage.c[key] for key in keys]
    repeated = connection.execute(
        select(*columns).where(chosen).group_by(*columns).having(func.count() > 1).limit(1)
    ).one_or_none()
    if repeated is not None:
        raise InvalidInput(
            f"a key ({', '.join(keys)}) was staged more than once, and Replace() cannot choose between the rows; "
            "aggregate the rows by key first",
            field=f"table {table.name}",
        )


def replace_by_key(
    connection: Connection,
    table: Table,
    columns: Sequence[str],
    keys: Sequence[str],
    stage: Table,
    chosen: ColumnElement[bool],
) -> None:
    """Replace rows of a table by chosen rows of a stage table with the same keys, in PostgreSQL.

    Raises InvalidInput for two rows with one key. PostgreSQL itself detects them: grouping the rows first would double
    the time. Rows are written in key order, so that two consumers that write to one table cannot deadlock.
    """
    rows = select(*(stage.c[name] for name in columns)).where(chosen).order_by(*(stage.c[key] for key in keys))
    replacing = _replacing(table, columns, keys, rows)
    if _are_new(connection, table, keys, stage, chosen):
        _require_constraint(connection, _replacing(table, columns, keys, select(*rows.selected_columns).where(false())))
        if _can_insert(connection, table, columns, rows):
            return
    try:
        with connection.begin_nested():
            connection.execute(replacing)
    except DBAPIError as error:
        if is_repeated_row(error):
            refuse_repeated_keys(connection, table, keys, stage, chosen)
        raise


def _replacing(table: Table, columns: Sequence[str], keys: Sequence[str], rows: Select[Any]) -> Insert:
    insert = postgresql.insert(table).from_select(list(columns), rows)
    values = {name: insert.excluded[name] for name in columns if name not in keys}
    return insert.on_conflict_do_update(index_elements=list(keys), set_=values)


def _require_constraint(connection: Connection, replacing: Insert) -> None:
    """Let the database plan a statement without running it. This fails if the keys have no unique constraint."""
    connection.exec_driver_sql(f"EXPLAIN {replacing.compile(dialect=connection.dialect)}")


def _are_new(
    connection: Connection, table: Table, keys: Sequence[str], stage: Table, chosen: ColumnElement[bool]
) -> bool:
    """Return True if no row of a table has the key of a chosen row."""
    same = and_(*(table.c[key] == stage.c[key] for key in keys))
    found = exists(select(1).select_from(stage.join(table, same)).where(chosen))
    return not connection.execute(select(found)).scalar_one()


def _can_insert(connection: Connection, table: Table, columns: Sequence[str], rows: Select[Any]) -> bool:
    """Insert rows, and return True. If a constraint of the table forbids it, insert nothing and return False.

    INSERT takes half as long as INSERT … ON CONFLICT. It fails if another consumer has inserted one of the keys since
    the check, or if a key was staged twice. The caller's INSERT … ON CONFLICT handles both cases.
    """
    try:
        with connection.begin_nested():
            connection.execute(table.insert().from_select(list(columns), rows))
    except IntegrityError:
        return False
    return True
