"""Conversion between fields of message types and Spark's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import types as T

from coranto.errors import InvalidInput
from coranto.types.kinds import ArrayKind, DecimalKind, Kind, MapKind, PlainKind, StructKind, TypeField

_TYPES: Final[dict[PlainKind, T.DataType]] = {
    PlainKind.BOOLEAN: T.BooleanType(),
    PlainKind.TINYINT: T.ByteType(),
    PlainKind.SMALLINT: T.ShortType(),
    PlainKind.INT: T.IntegerType(),
    PlainKind.BIGINT: T.LongType(),
    PlainKind.FLOAT: T.FloatType(),
    PlainKind.DOUBLE: T.DoubleType(),
    PlainKind.STRING: T.StringType(),
    PlainKind.BINARY: T.BinaryType(),
    PlainKind.DATE: T.DateType(),
    PlainKind.TIMESTAMP: T.TimestampType(),
    PlainKind.TIMESTAMP_NTZ: T.TimestampNTZType(),
}
_KINDS: Final = {type(spark): kind for kind, spark in _TYPES.items()}


def spark_schema(fields: Sequence[TypeField]) -> T.StructType:
    """Return the columns for fields. All columns are nullable, because messages of earlier versions may lack fields."""
    return T.StructType([T.StructField(field.name, spark_type(field.kind)) for field in fields])


def spark_type(kind: Kind) -> T.DataType:
    match kind:
        case DecimalKind(precision, scale):
            return T.DecimalType(precision, scale)
        case ArrayKind(element):
            return T.ArrayType(spark_type(element))
        case MapKind(key, value):
            return T.MapType(spark_type(key), spark_type(value))
        case StructKind(fields):
            return spark_schema(fields)
    return _TYPES[kind]


def fields_of_spark(schema: T.StructType, inside: str = "") -> tuple[TypeField, ...]:
    """Return the fields for columns. Raises InvalidInput for a column type that message types do not support."""
    kinds = [_kind(each.dataType, f"{inside}{each.name}") for each in schema.fields]
    return tuple(TypeField(each.name, kind, each.nullable) for each, kind in zip(schema.fields, kinds, strict=True))


def _kind(kind: T.DataType, place: str) -> Kind:
    match kind:
        case T.DecimalType():
            return DecimalKind(kind.precision, kind.scale)
        case T.ArrayType():
            return ArrayKind(_kind(kind.elementType, f"{place}[]"))
        case T.MapType():
            return MapKind(_kind(kind.keyType, f"{place} (key)"), _kind(kind.valueType, f"{place}{{}}"))
        case T.StructType():
            return StructKind(fields_of_spark(kind, f"{place}."))
        case T.CharType() | T.VarcharType():
            return PlainKind.STRING
    found = _KINDS.get(type(kind))
    if found is None:
        raise InvalidInput(
            f"{place} is {kind.simpleString()}, which message types do not support: cast it", field="schema"
        )
    return found
