"""Checks that a database's tables can store the rows that a consumer writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Dialect, Table, TypeDecorator, inspect, text
from sqlalchemy.types import (
    BigInteger,
    Date,
    DateTime,
    Float,
    Integer,
    LargeBinary,
    Numeric,
    SmallInteger,
    String,
    TypeEngine,
)

from coranto.errors import InvalidInput

_BYTES: Final = {"TINYINT": 1, "SMALLINT": 2, "MEDIUMINT": 3, "INTEGER": 4, "INT": 4, "BIGINT": 8}
_KINDS: Final[tuple[tuple[str, type[TypeEngine[Any]]], ...]] = (
    ("text", String),
    ("a number", Integer),
    ("a number", Numeric),
    ("a time", DateTime),
    ("a date", Date),
    ("bytes", LargeBinary),
)
_TRIGGERS: Final = {
    "postgresql": "SELECT count(*) FROM pg_trigger WHERE tgrelid = to_regclass(:name) AND NOT tgisinternal",
    "mysql": "SELECT count(*) FROM information_schema.triggers WHERE event_object_schema = DATABASE() "
    "AND event_object_table = :name",
}


def require_target(connection: Connection, table: Table, columns: Sequence[str] | None = None) -> None:
    """Raise InvalidInput if a table of the database cannot store rows with `columns` of its definition.

    `columns` is None if the rows' columns are unknown. Returns without a check if the table does not exist.
    """
    inspector, dialect = inspect(connection), connection.dialect
    if not inspector.has_table(table.name, schema=table.schema):
        return
    found = {each["name"]: each for each in inspector.get_columns(table.name, schema=table.schema)}
    names = table.c.keys() if columns is None else list(columns)
    problems = [*_lacking(table, names, found, dialect), *_without_values(connection, table, names, found, columns)]
    if problems:
        raise InvalidInput(
            f"does not fit its definition in the database: {'; '.join(problems)}", field=f"table {table.name}"
        )


def _lacking(table: Table, names: Sequence[str], found: dict[str, Any], dialect: Dialect) -> Iterator[str]:
    """Yield a problem for each column that is missing or too narrow."""
    for name in names:
        column = table.c[name]
        wanted = column.type.dialect_impl(dialect)
        kind = wanted.compile(dialect)
        if (there := found.get(column.name)) is None:
            yield f"it has no column {name!r}: ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}"
        elif why := narrower(there["type"], wanted, dialect):
            yield f"column {name!r} is {there['type'].compile(dialect)}, and {why} as {kind}: change its type"


def narrower(found: TypeEngine[Any], wanted: TypeEngine[Any], dialect: Dialect) -> str:
    """Return the reason why the type `found` cannot store all values of `wanted`. "" if it can, or if unknown."""
    if dialect.name == "sqlite":
        return ""  # A column stores values of any type and length.
    if isinstance(wanted, TypeDecorator):
        wanted = wanted.load_dialect_impl(dialect)
    kinds = _kind(found), _kind(wanted)
    if "" not in kinds and kinds[0] != kinds[1]:
        return f"{kinds[1]} is written there"
    narrower = "longer values are written there"
    if isinstance(wanted, String) and isinstance(found, String):
        return narrower if found.length is not None and found.length < (wanted.length or 1 << 62) else ""
    if isinstance(wanted, Integer) and isinstance(found, Integer):
        return narrower if _bytes(found) < _bytes(wanted) else ""
    if isinstance(wanted, Integer) or not isinstance(wanted, Numeric) or isinstance(wanted, Float):
        return ""
    if isinstance(found, Integer):
        return narrower
    if isinstance(found, Numeric) and not isinstance(found, Float) and found.precision is not None:
        scale, wanted_scale = found.scale or 0, wanted.scale or 0
        if (
            wanted.precision is None
            or scale < wanted_scale
            or found.precision - scale < wanted.precision - wanted_scale
        ):
            return narrower
    return ""


def _kind(kind: TypeEngine[Any]) -> str:
    return next((name for name, each in _KINDS if isinstance(kind, each)), "")


def _bytes(kind: Integer) -> int:
    default = 8 if isinstance(kind, BigInteger) else 2 if isinstance(kind, SmallInteger) else 4
    return _BYTES.get(kind.__visit_name__.upper(), default)


def _without_values(
    connection: Connection, table: Table, names: Sequence[str], found: dict[str, Any], columns: Sequence[str] | None
) -> Iterator[str]:
    """Yield a problem for each column that must not be null, and gets no value."""
    given = {table.c[name].name for name in names}
    made = {each.name for each in table.c if columns is not None and each.default is not None}
    lacking = [
        name
        for name, each in found.items()
        if name not in given | made
        and not each["nullable"]
        and each.get("default") is None
        and each.get("autoincrement") is not True
        and not each.get("identity")
        and not each.get("computed")
    ]
    if lacking and not _has_triggers(connection, table):
        for name in lacking:
            yield f"column {name!r} must not be null, and gets no value: give it a default, or write it"


def _has_triggers(connection: Connection, table: Table) -> bool:
    """Return True if the table has triggers, which may set values of columns."""
    statement = _TRIGGERS.get(connection.dialect.name)
    if statement is None:
        return False
    name = table.name
    if connection.dialect.name == "postgresql":
        name = connection.dialect.identifier_preparer.format_table(table)
    return bool(connection.execute(text(statement), {"name": name}).scalar_one())
