"""Decoding of protobuf messages into Spark's columns: fields by their names, nested messages as structs.

`coranto.types.protobuf` lists the column types for each field type. A field that is not set is null if it has presence
(`optional`, messages, members of a `oneof`), and otherwise has its type's default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StringType, StructType, TimestampType

from coranto.errors import InvalidInput
from coranto.types.protobuf import SCALARS, TIMESTAMP, map_entry
from coranto_consumers.spark.decoding.type_columns import spark_type

_SCALARS: Final[dict[int, tuple[DataType, ...]]] = {
    field: tuple(spark_type(kind) for kind in kinds) for field, kinds in SCALARS.items()
}

_Convert: TypeAlias = Callable[[Any], object]


class _Unfit(Exception):
    """A value exceeds the range of its column's type."""


def reader_of(kind: Any, schema: StructType) -> Callable[[bytes], tuple[list[object], bool]]:
    """Return a function that decodes a message to its values, and True if all fit.

    Raises InvalidInput for columns that do not match the message type's fields.
    """
    columns = [_field(kind.DESCRIPTOR, column.name, column.dataType) for column in schema.fields]

    def values(payload: bytes) -> tuple[list[object], bool]:
        try:
            message = kind.FromString(payload)
        except DecodeError:
            return [None] * len(columns), False
        found: list[object] = []
        fits = True
        for column in columns:
            try:
                found.append(column(message))
            except _Unfit:
                found.append(None)
                fits = False
        return found, fits

    return values


def _field(owner: Descriptor, name: str, kind: DataType) -> _Convert:
    field = owner.fields_by_name.get(name)
    if field is None:
        names = ", ".join(each.name for each in owner.fields)
        raise InvalidInput(f"{owner.full_name} has no field {name!r}; it has {names}", field="schema")
    convert = _converter(field, kind)
    if not field.has_presence:
        return lambda message: convert(getattr(message, name))
    return lambda message: convert(getattr(message, name)) if message.HasField(name) else None


def _converter(field: FieldDescriptor, kind: DataType) -> _Convert:
    if (entry := map_entry(field)) is not None:
        if not isinstance(kind, MapType):
            raise _wrong(field, kind, "a map")
        key, value = _single(entry[0], kind.keyType), _single(entry[1], kind.valueType)
        return lambda found: [(key(each), value(found[each])) for each in found]
    if field.is_repeated:
        if not isinstance(kind, ArrayType):
            raise _wrong(field, kind, "repeated")
        element = _single(field, kind.elementType)
        return lambda found: [element(each) for each in found]
    return _single(field, kind)


def _single(field: FieldDescriptor, kind: DataType) -> _Convert:
    if field.message_type is not None:
        if field.message_type.full_name == TIMESTAMP and isinstance(kind, TimestampType):
            return lambda found: _fitting(found.seconds * 1_000_000 + found.nanos // 1000)
        if not isinstance(kind, StructType):
            raise _wrong(field, kind, f"a message {field.message_type.full_name}")
        inner = {each.name: _field(field.message_type, each.name, each.dataType) for each in kind.fields}
        return lambda found: {name: convert(found) for name, convert in inner.items()}
    fitting = _SCALARS.get(field.type, ())
    if kind not in fitting:
        raise _wrong(field, kind, " or ".join(each.simpleString().upper() for each in fitting) or "of no such type")
    if field.enum_type is not None and isinstance(kind, StringType):
        names = {number: value.name for number, value in field.enum_type.values_by_number.items()}
        return lambda found: names.get(found, str(found))
    if isinstance(kind, LongType):
        return _fitting
    return lambda found: found


def _fitting(number: int) -> int:
    if not -(1 << 63) <= number < 1 << 63:
        raise _Unfit
    return number


def _wrong(field: FieldDescriptor, kind: DataType, actual: str) -> InvalidInput:
    return InvalidInput(
        f"the field {field.full_name} is {actual}, and cannot fill a column of {kind.simpleString()}", field="schema"
    )
