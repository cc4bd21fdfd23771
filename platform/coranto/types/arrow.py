"""Fields of message types as Arrow schemas, and back.

A TIMESTAMP is `timestamp[us, tz=UTC]`, a TIMESTAMP_NTZ `timestamp[us]`. All columns are nullable, even for NOT NULL
fields, because messages of earlier versions may lack them; `fields_of_arrow` trusts Arrow's nullability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from coranto.errors import InvalidInput
from coranto.types.kinds import (
    ArrayKind,
    DecimalKind,
    Kind,
    MapKind,
    PlainKind,
    StructKind,
    TypeField,
)
from coranto.types.writing import require_columns

_TYPES: Final = {
    PlainKind.BOOLEAN: pa.bool_(),
    PlainKind.TINYINT: pa.int8(),
    PlainKind.SMALLINT: pa.int16(),
    PlainKind.INT: pa.int32(),
    PlainKind.BIGINT: pa.int64(),
    PlainKind.FLOAT: pa.float32(),
    PlainKind.DOUBLE: pa.float64(),
    PlainKind.STRING: pa.string(),
    PlainKind.BINARY: pa.binary(),
    PlainKind.DATE: pa.date32(),
    PlainKind.TIMESTAMP: pa.timestamp("us", "UTC"),
    PlainKind.TIMESTAMP_NTZ: pa.timestamp("us"),
}
_KINDS: Final = {arrow: kind for kind, arrow in _TYPES.items()}
_SAME: Final = {
    pa.large_string(): PlainKind.STRING,
    pa.string_view(): PlainKind.STRING,
    pa.large_binary(): PlainKind.BINARY,
    pa.binary_view(): PlainKind.BINARY,
    pa.uint8(): PlainKind.SMALLINT,
    pa.uint16(): PlainKind.INT,
    pa.uint32(): PlainKind.BIGINT,
    pa.date64(): PlainKind.DATE,
}
"""Additional Arrow types, and the field types that hold their values."""


def arrow_schema(fields: Sequence[TypeField]) -> pa.Schema:
    """Return the columns of fields."""
    return pa.schema([(field.name, arrow_type(field.kind)) for field in fields])


def arrow_type(kind: Kind) -> pa.DataType:
    """Return the Arrow type of a field's type."""
    match kind:
        case DecimalKind(precision, scale):
            return pa.decimal128(precision, scale)
        case ArrayKind(element):
            return pa.list_(arrow_type(element))
        case MapKind(key, value):
            return pa.map_(arrow_type(key), arrow_type(value))
        case StructKind(fields):
            return pa.struct(list(arrow_schema(fields)))
    return _TYPES[kind]


def fields_of_arrow(schema: pa.Schema) -> tuple[TypeField, ...]:
    """Return the fields of columns. Raises InvalidInput for an Arrow type without a field type."""
    return tuple(TypeField(each.name, _kind(each.type, each.name), each.nullable) for each in schema)


def _kind(arrow: Any, place: str) -> Kind:
    if (known := _KINDS.get(arrow) or _SAME.get(arrow)) is not None:
        return known
    if pa.types.is_timestamp(arrow) and arrow.unit != "ns":
        return PlainKind.TIMESTAMP_NTZ if arrow.tz is None else PlainKind.TIMESTAMP
    if pa.types.is_dictionary(arrow):
        return _kind(arrow.value_type, place)
    if pa.types.is_decimal(arrow) and arrow.precision <= 38 and 0 <= arrow.scale <= arrow.precision:
        return DecimalKind(arrow.precision, arrow.scale)
    if pa.types.is_map(arrow):
        return MapKind(_kind(arrow.key_type, f"{place} (key)"), _kind(arrow.item_type, f"{place}{{}}"))
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow):
        return ArrayKind(_kind(arrow.value_type, f"{place}[]"))
    if pa.types.is_struct(arrow):
        inner = tuple(
            TypeField(each.name, _kind(each.type, f"{place}.{each.name}"), each.nullable)
            for each in (arrow.field(number) for number in range(arrow.num_fields))
        )
        return StructKind(inner)
    raise InvalidInput(f"{place} is {arrow}, which fields of message types are not: cast it", field="schema")


def require_table(table: Any, fields: Sequence[TypeField]) -> None:
    """Raise InvalidInput unless each row of an Arrow table or batch fits the fields of messages.

    All problems of the columns are reported. Values are checked only for nulls in fields that are not nullable.
    """
    require_columns(fields_of_arrow(table.schema), fields)
    require_filled(table.schema.names, table.columns, fields)


def require_filled(names: Sequence[str], columns: Sequence[Any], fields: Sequence[TypeField], place: str = "") -> None:
    """Raise InvalidInput if a column has a null where its field is not nullable. The columns must fit the fields."""
    known = {field.name: field for field in fields}
    for name, column in zip(names, columns, strict=True):
        field, where = known[name], f"{place}.{name}" if place else name
        whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if pa.types.is_dictionary(whole.type):  # Its values may be null, too.
            whole = whole.dictionary_decode()
        if not field.nullable and whole.null_count:
            raise InvalidInput(f"{where} is NOT NULL, and a row has none: fill it, or filter such rows out")
        _require_filled_within(whole, field.kind, where)


def _require_filled_within(array: Any, kind: Kind, place: str) -> None:
    present = array.drop_null()
    match kind:
        case StructKind(fields):
            names = [array.type.field(number).name for number in range(array.type.num_fields)]
            require_filled(names, present.flatten(), fields, place)
        case ArrayKind(element) if isinstance(element, StructKind | ArrayKind | MapKind):
            _require_filled_within(present.flatten(), element, f"{place}[]")
        case MapKind(_, value) if isinstance(value, StructKind | ArrayKind | MapKind):
            _require_filled_within(present.items, value, f"{place}{{}}")
