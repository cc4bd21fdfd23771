"""A table in an Iceberg catalog: comparison, creation and changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError

from coranto.errors import InvalidInput
from coranto.types.arrow import arrow_type, fields_of_arrow
from coranto.types.kinds import DecimalKind, Kind, PlainKind, TypeField, format_kind, widens
from coranto_consumers.stores.iceberg.catalogs import FAILURES, failure
from coranto_consumers.stores.iceberg.tables import columns_of, find_or_create
from coranto_consumers.stores.iceberg.urls import IcebergHome
from coranto_consumers.tables.columns import TableLayout, arrow_columns
from coranto_consumers.tables.evolving import ColumnChange, TableState

_ATTEMPTS: Final = 5
_NARROW: Final = (PlainKind.TINYINT, PlainKind.SMALLINT)


class IcebergTarget:
    """The table of a layout in the catalog of its URL."""

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        self._home = IcebergHome.at(layout.spec.store_url)

    def compare(self) -> TableState:
        try:
            columns = columns_of(self._home.catalog.load_table(self._home.table))
        except NoSuchTableError:
            return TableState(False)
        except FAILURES as error:
            raise failure(f"table {self._home.table} could not be examined", error) from error
        changes, problems = [], []
        for field in self._layout.rows:
            wanted = PlainKind.INT if field.kind in _NARROW else field.kind
            if field.name not in columns.names:
                advice = f"add an optional column of {format_kind(wanted)}"
                changes.append(ColumnChange(field, f"has no column {field.name!r}", advice))
                continue
            column = columns.field(field.name)
            if not column.nullable and field.nullable:
                problems.append(
                    f"column {field.name!r} is required, and messages may lack it: make it optional, or declare it NOT "
                    "NULL in the file"
                )
            there = _kind(columns, field.name)
            if there is None or there == wanted or widens(wanted, there):
                continue
            shown = f"{field.name!r} as {format_kind(there)}"
            if _can_widen(there, wanted):
                changes.append(ColumnChange(field, f"has {shown}", f"make it {format_kind(wanted)}"))
            else:
                problems.append(f"has {shown}, which Iceberg cannot make {format_kind(wanted)}: use a new table")
        return TableState(True, changes, problems)

    def create(self) -> None:
        try:
            find_or_create(self._home.catalog, self._home.table, arrow_columns(self._layout.rows))
        except FAILURES as error:
            raise failure(f"table {self._home.table} could not be created", error) from error

    def change(self, changes: Sequence[ColumnChange]) -> None:
        for attempt in range(_ATTEMPTS):
            table = self._home.load()
            columns = columns_of(table)
            schema = pa.schema([_column(each.field, columns) for each in changes])
            try:
                with table.update_schema() as update:
                    update.union_by_name(schema)
                return
            except CommitFailedException as error:
                if not self.compare().changes:
                    return  # Another process was faster.
                if attempt == _ATTEMPTS - 1:
                    raise failure(f"table {self._home.table} could not be changed", error) from error
            except FAILURES as error:
                raise failure(f"table {self._home.table} could not be changed", error) from error


def _column(field: TypeField, columns: pa.Schema) -> pa.Field:
    nullable = field.name not in columns.names or columns.field(field.name).nullable
    return pa.field(field.name, arrow_type(field.kind), nullable)


def _kind(columns: pa.Schema, name: str) -> Kind | None:
    """Return the type of a column. None if fields of messages cannot have it."""
    try:
        [found] = fields_of_arrow(pa.schema([columns.field(name)]))
    except InvalidInput:
        return None
    return found.kind


def _can_widen(there: Kind, wanted: Kind) -> bool:
    """Return True for the type changes that Iceberg supports: int to long, float to double, more digits."""
    if isinstance(there, DecimalKind) and isinstance(wanted, DecimalKind):
        return there.scale == wanted.scale and widens(there, wanted)
    return (there, wanted) in ((PlainKind.INT, PlainKind.BIGINT), (PlainKind.FLOAT, PlainKind.DOUBLE))
