"""Deletion by key: staged rows with True in the delete column delete the table's row with their key.

Each key may be staged only once in a transaction, as with `Replace`: otherwise the result would be ambiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, Table, delete, exists, false, or_, select, true
from sqlalchemy.sql import ColumnElement

from coranto.errors import InvalidInput


def require_column(
    table: Table, name: str, columns: Sequence[str], keys: Sequence[str], other: Collection[str]
) -> None:
    """Raise InvalidInput for an invalid delete column. `other` has the columns with rules other than `Replace`."""
    where = f"table {table.name}"
    if name in table.c:
        raise InvalidInput(
            f"{name!r} is a column of the table, and cannot mark rows to delete; name another", field=where
        )
    if name not in columns:
        raise InvalidInput(f"the rows have no column {name!r}, which marks rows to delete; add it", field=where)
    if not keys:
        raise InvalidInput(f"{name!r} deletes rows by their keys, and there are none; name them", field=where)
    if other:
        raise InvalidInput(
            f"{sorted(other)[0]!r} is combined with the row that is there, which {name!r} may delete: use "
            "Replace() for all columns",
            field=where,
        )


def not_deleting(stage: Table, name: str) -> ColumnElement[bool]:
    """Return the condition for staged rows that delete nothing: their delete column is false or null."""
    return or_(stage.c[name].is_(false()), stage.c[name].is_(None))


def delete_by_key(
    connection: Connection, table: Table, keys: Sequence[str], stage: Table, name: str, chosen: ColumnElement[bool]
) -> None:
    """Delete the rows of a table whose keys are in chosen staged rows with True in the delete column `name`."""
    same = [stage.c[key] == table.c[key] for key in keys]
    staged = exists(select(stage.c[name]).where(chosen, stage.c[name].is_(true()), *same))
    connection.execute(delete(table).where(staged))
