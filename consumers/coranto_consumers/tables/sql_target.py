"""A table in a SQL database: comparison, creation and changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Double,
    Float,
    Integer,
    Numeric,
    SmallInteger,
    String,
    inspect,
    text,
)
from sqlalchemy.engine import Inspector
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.types import TypeEngine

from coranto.types.kinds import DecimalKind, Kind, PlainKind, widens
from coranto_consumers.stores.engines import READS_ONLY
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.targets import narrower
from coranto_consumers.tables.columns import TableLayout, sql_table
from coranto_consumers.tables.evolving import ColumnChange, TableState

_TEXTS_GROW: Final = "longer values are written there"
"""The result of `narrower` for a text column that is too short."""


class SqlTarget:
    """The table of a layout in the database of its URL."""

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        self._store = SqlStore(layout.spec.store)
        self.table = sql_table(layout)

    def compare(self) -> TableState:
        try:
            with self._store.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                inspector = inspect(connection)
                if not inspector.has_table(self.table.name):
                    return TableState(False)
                found = {each["name"]: each for each in inspector.get_columns(self.table.name)}
                problems = [*self._without_key(inspector), *self._required(found)]
        except SQLAlchemyError as error:
            raise self._store.failure(f"table {self.table.name} could not be examined", error) from error
        changes = []
        for field in self._layout.rows:
            wanted = self.table.c[field.name].type.dialect_impl(self._store.engine.dialect)
            if field.name not in found:
                changes.append(ColumnChange(field, f"has no column {field.name!r}", self._adding(field.name)))
                continue
            there = found[field.name]["type"]
            match self._difference(there, wanted):
                case "":
                    continue
                case "wider":
                    shown = there.compile(self._store.engine.dialect)
                    advice = self._widening(field.name, nullable=bool(found[field.name]["nullable"]))
                    changes.append(ColumnChange(field, f"has {field.name!r} as {shown}", advice))
                case problem:
                    problems.append(f"column {field.name!r} {problem}")
        return TableState(True, changes, problems)

    def create(self) -> None:
        self._store.create_tables(self.table)

    def change(self, changes: Sequence[ColumnChange]) -> None:
        for each in changes:
            try:
                with self._store.engine.begin() as connection:
                    connection.execute(text(each.advice.replace(":", r"\:")))
            except SQLAlchemyError as error:
                if any(left.field.name == each.field.name for left in self.compare().changes):
                    raise self._store.failure(f"{each.advice} failed", error) from error

    def _without_key(self, inspector: Inspector) -> list[str]:
        """Return a problem if no unique key of the table is exactly the layout's key."""
        key = set(self._layout.spec.key)
        if not key:
            return []
        name = self.table.name
        uniques = [set(inspector.get_pk_constraint(name)["constrained_columns"])]
        uniques += [set(filter(None, each["column_names"])) for each in inspector.get_unique_constraints(name)]
        uniques += [set(filter(None, each["column_names"])) for each in inspector.get_indexes(name) if each["unique"]]
        if key in uniques:
            return []
        names = ", ".join(self._layout.spec.key)
        return [f"has no primary key or unique constraint on exactly ({names}), and rows are replaced by it: add one"]

    def _required(self, found: Mapping[str, Any]) -> list[str]:
        """Return a problem for each NOT NULL column that may get null."""
        known = {field.name: field for field in self._layout.rows}
        return [
            f"column {name!r} must not be null, and messages may lack it: ALTER the column, or declare it NOT NULL in "
            "the file"
            for name, each in found.items()
            if not each["nullable"] and name in known and known[name].nullable
        ]

    def _difference(self, found: TypeEngine[Any], wanted: TypeEngine[Any]) -> str:
        """Return "" for a column that holds all values, "wider" for a column that can be widened, or a problem."""
        dialect = self._store.engine.dialect
        shown = f"is {found.compile(dialect)}, and {wanted.compile(dialect)} is needed"
        here, there = _number(found), _number(wanted)
        if self._store.is_sqlite:  # A column takes numbers of any size, and texts of any length.
            return "" if isinstance(found, String) == isinstance(wanted, String) else f"{shown}: use a new table"
        if here is not None and there is not None:
            if here == there or widens(there, here):
                return ""
            if widens(here, there):
                return "wider"
            return f"{shown}, which does not hold all of its values: use a new table"
        if here is not None and not (self._store.is_mysql and isinstance(wanted, Boolean)):
            return f"{shown}: use a new table"
        why = narrower(found, wanted, dialect)
        if not why:
            return ""
        return "wider" if why == _TEXTS_GROW else f"{shown}: use a new table"

    def _adding(self, name: str) -> str:
        return f"ALTER TABLE {self._name} ADD COLUMN {self._quoted(name)} {self._type(name)}"

    def _widening(self, name: str, *, nullable: bool) -> str:
        if self._store.is_mysql:
            suffix = "" if nullable else " NOT NULL"
            return f"ALTER TABLE {self._name} MODIFY COLUMN {self._quoted(name)} {self._type(name)}{suffix}"
        return f"ALTER TABLE {self._name} ALTER COLUMN {self._quoted(name)} TYPE {self._type(name)}"

    @property
    def _name(self) -> str:
        return str(self._store.engine.dialect.identifier_preparer.format_table(self.table))

    def _quoted(self, name: str) -> str:
        return str(self._store.engine.dialect.identifier_preparer.quote(name))

    def _type(self, name: str) -> str:
        return str(self.table.c[name].type.compile(self._store.engine.dialect))


def _number(kind: TypeEngine[Any]) -> Kind | None:
    """Return the field type with the values of a numeric column. None for other columns."""
    match kind:
        case BigInteger():
            return PlainKind.BIGINT
        case SmallInteger():
            return PlainKind.SMALLINT
        case Integer():
            name = kind.__visit_name__.upper()
            return {"TINYINT": PlainKind.TINYINT, "SMALLINT": PlainKind.SMALLINT, "BIGINT": PlainKind.BIGINT}.get(
                name, PlainKind.INT
            )
        case Double():
            return PlainKind.DOUBLE
        case Float():
            is_single = kind.__visit_name__.upper() in ("REAL", "FLOAT") and (kind.precision or 0) <= 24
            return PlainKind.FLOAT if is_single else PlainKind.DOUBLE
        case Numeric(precision=int(precision), scale=scale) if precision <= 38:
            return DecimalKind(precision, scale or 0)
    return None
