"""Fields of message types for the rows of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from coranto.errors import InvalidInput
from coranto.types.kinds import PlainKind, TypeField

_COLUMNS: Final = {
    "text": PlainKind.STRING,
    "integer": PlainKind.BIGINT,
    "number": PlainKind.DOUBLE,
    "boolean": PlainKind.BOOLEAN,
}


def fields_of_csv(header: Sequence[str], types: Mapping[str, str]) -> tuple[TypeField, ...]:
    """Return the fields of CSV columns. Raises InvalidInput for a column of JSON, which has no fixed form."""
    for name in header:
        if types.get(name) == "json":
            raise InvalidInput(f"column {name} is json, which has no fixed form")
    return tuple(TypeField(name, _COLUMNS[types.get(name, "text")]) for name in header)


def fields_of_parquet(schema: Any) -> tuple[TypeField, ...]:
    """Return the fields of an Arrow schema. Raises InvalidInput for columns that fields cannot represent."""
    import pyarrow as pa

    from coranto.types.arrow import fields_of_arrow

    return fields_of_arrow(pa.schema([pa.field(each.name, _written(each.type), each.nullable) for each in schema]))


def _written(arrow: Any) -> Any:
    """Return the type of an Arrow type's values after their conversion to JSON."""
    import pyarrow as pa
    from pyarrow import types

    if isinstance(arrow, pa.BaseExtensionType):
        return pa.string() if arrow.extension_name == "arrow.uuid" else _written(arrow.storage_type)
    is_nanoseconds = types.is_timestamp(arrow) and arrow.unit == "ns"
    is_binary = types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow)
    if is_binary or is_nanoseconds or types.is_time(arrow):
        return pa.string()
    if types.is_uint64(arrow):
        return pa.decimal128(20, 0)
    if types.is_map(arrow):
        return pa.map_(pa.string(), _written(arrow.item_type))
    if types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow):
        return pa.list_(_written(arrow.value_type))
    if types.is_dictionary(arrow):
        return _written(arrow.value_type)
    if types.is_struct(arrow):
        inner = (arrow.field(number) for number in range(arrow.num_fields))
        return pa.struct([pa.field(each.name, _written(each.type), each.nullable) for each in inner])
    return arrow
