"""The columns of a table: in a database, and in Iceberg.

| fields | databases | Iceberg |
|---|---|---|
| TINYINT, SMALLINT, INT, BIGINT | SMALLINT, SMALLINT, INTEGER, BIGINT | int, int, int, long |
| FLOAT, DOUBLE | DOUBLE PRECISION | float, double |
| ARRAY, MAP, STRUCT | JSON | list, map, struct |

Other fields have the type of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    SmallInteger,
    Table,
    Text,
)

from coranto.errors import InvalidInput
from coranto.types.kinds import DecimalKind, Kind, PlainKind, TypeField, format_kind
from coranto_consumers.stores.mysql import NAME
from coranto_consumers.tables.spec import TableSpec, require_columns, require_name, table_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from coranto.types.catalog import TypeVersion

_TYPES: Final[dict[PlainKind, Any]] = {
    PlainKind.BOOLEAN: Boolean,
    PlainKind.TINYINT: SmallInteger,
    PlainKind.SMALLINT: SmallInteger,
    PlainKind.INT: Integer,
    PlainKind.BIGINT: BigInteger,
    PlainKind.FLOAT: Double,
    PlainKind.DOUBLE: Double,
    PlainKind.STRING: Text,
    PlainKind.BINARY: LargeBinary,
    PlainKind.DATE: Date,
    PlainKind.TIMESTAMP_NTZ: DateTime,
}
_KEYS: Final = frozenset(
    {
        *(PlainKind.BOOLEAN, PlainKind.TINYINT, PlainKind.SMALLINT, PlainKind.INT, PlainKind.BIGINT),
        *(PlainKind.STRING, PlainKind.DATE, PlainKind.TIMESTAMP, PlainKind.TIMESTAMP_NTZ),
    }
)
"""Types of keys: all stores agree which of their values are equal. Decimals are possible, too."""
_SQLITE_DIGITS: Final = 15
"""The maximum digits of a decimal in SQLite."""


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table whose columns are known."""

    spec: TableSpec
    messages: tuple[TypeField, ...]
    """The fields of messages that are read. Keys are not nullable."""
    rows: tuple[TypeField, ...]
    """The columns of the table. Empty if expressions define them, and Spark has not resolved them yet."""
    version: TypeVersion | None = None
    """The registered type of the messages."""

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.rows]


def layout_of(spec: TableSpec, version: TypeVersion | None = None) -> TableLayout:
    """Return the layout of a table. `version` is the type of its messages, if the file names a registry.

    Raises InvalidInput for a key or an operation column that messages do not have, and for unsupported types.
    """
    fields = spec.columns
    if version is not None:  # Messages of earlier versions may lack any field.
        fields = tuple(replace(field, nullable=True) for field in version.definition.fields)
        for field in fields:
            require_name(field.name)
        require_columns(spec, [field.name for field in fields])
    _require_operation(spec, fields)
    if spec.select:
        return TableLayout(spec, fields, (), version)
    fields = tuple(replace(field, nullable=field.nullable and field.name not in spec.key) for field in fields)
    names = table_columns(spec, [field.name for field in fields])
    return with_rows(TableLayout(spec, fields, (), version), [field for field in fields if field.name in names])


def with_rows(layout: TableLayout, rows: Sequence[TypeField]) -> TableLayout:
    """Return a layout with the columns of its table. Raises InvalidInput for types that its store does not support."""
    spec = layout.spec
    for field in rows:
        if field.name in spec.key and field.kind not in _KEYS and not isinstance(field.kind, DecimalKind):
            raise InvalidInput(
                f"{field.name!r} is {format_kind(field.kind)}, whose values are not compared in the same way "
                "everywhere: choose a key of whole numbers, texts or times",
                field="key",
            )
        is_wide = isinstance(field.kind, DecimalKind) and field.kind.precision > _SQLITE_DIGITS
        if is_wide and spec.store.startswith("sqlite"):
            raise InvalidInput(
                f"{field.name!r} is {format_kind(field.kind)}, and SQLite keeps {_SQLITE_DIGITS} digits: make it a "
                "STRING, or use another store",
                field="columns",
            )
    return replace(
        layout, rows=tuple(replace(field, nullable=field.name not in spec.key and field.nullable) for field in rows)
    )


def _require_operation(spec: TableSpec, fields: Sequence[TypeField]) -> None:
    if spec.operation is None:
        return
    kind = next(field.kind for field in fields if field.name == spec.operation.column)
    wanted = PlainKind.STRING if spec.operation.deletes else PlainKind.BOOLEAN
    if kind is not wanted:
        advice = (
            "`deletes` needs a STRING" if spec.operation.deletes else "add `deletes` with the texts that mark deletions"
        )
        raise InvalidInput(
            f"{spec.operation.column!r} is {format_kind(kind)}, and not {wanted.value}: {advice}", field="operation"
        )


def sql_table(layout: TableLayout) -> Table:
    """Return the definition of the table in a database."""
    keys = layout.spec.key
    columns: list[Column[Any]] = [
        Column(
            field.name,
            NAME if field.name in keys and field.kind is PlainKind.STRING else sql_type(field.kind),
            primary_key=field.name in keys,
            nullable=field.nullable,
            autoincrement=False,
        )
        for field in layout.rows
    ]
    return Table(layout.spec.table, MetaData(), *columns)


def sql_type(kind: Kind) -> Any:
    """Return the type of a column in a database."""
    if isinstance(kind, DecimalKind):
        return Numeric(kind.precision, kind.scale)
    if kind is PlainKind.TIMESTAMP:
        return DateTime(timezone=True)
    return _TYPES[kind]() if isinstance(kind, PlainKind) else JSON()


def arrow_columns(fields: Sequence[TypeField]) -> pa.Schema:
    """Return the Arrow schema of fields, with their nullability."""
    import pyarrow as pa

    from coranto.types.arrow import arrow_type

    return pa.schema([pa.field(field.name, arrow_type(field.kind), field.nullable) for field in fields])
