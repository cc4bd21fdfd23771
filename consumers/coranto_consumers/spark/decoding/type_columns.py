"""Conversion between fields of message types and Spark's columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from coranto.errors import InvalidInput
from coranto.types.kinds import ArrayKind, DecimalKind, Kind, MapKind, PlainKind, StructKind, TypeField

_TYPES: Final[dict[PlainKind, DataType]] = {
    PlainKind.BOOLEAN: BooleanType(),
    PlainKind.TINYINT: ByteType(),
    PlainKind.SMALLINT: ShortType(),
    PlainKind.INT: IntegerType(),
    PlainKind.BIGINT: LongType(),
    PlainKind.FLOAT: FloatType(),
    PlainKind.DOUBLE: DoubleType(),
    PlainKind.STRING: StringType(),
    PlainKind.BINARY: BinaryType(),
    PlainKind.DATE: DateType(),
    PlainKind.TIMESTAMP: TimestampType(),
    PlainKind.TIMESTAMP_NTZ: TimestampNTZType(),
}
_KINDS: Final = {type(spark): kind for kind, spark in _TYPES.items()}


def spark_schema(fields: Sequence[TypeField]) -> StructType:
    """Return the columns for fields. All are nullable, because messages of earlier versions may lack them."""
    return StructType([StructField(field.name, spark_type(field.kind)) for field in fields])


def spark_type(kind: Kind) -> DataType:
    """Return Spark's type for a field's type."""
    match kind:
        case DecimalKind(precision, scale):
            return DecimalType(precision, scale)
        case ArrayKind(element):
            return ArrayType(spark_type(element))
        case MapKind(key, value):
            return MapType(spark_type(key), spark_type(value))
        case StructKind(fields):
            return spark_schema(fields)
    return _TYPES[kind]


def fields_of_spark(schema: StructType) -> tuple[TypeField, ...]:
    """Return the fields for columns. Raises InvalidInput for a type that fields cannot have."""
    return tuple(TypeField(each.name, _kind(each.dataType, each.name), each.nullable) for each in schema.fields)


def _kind(kind: DataType, place: str) -> Kind:
    match kind:
        case DecimalType():
            return DecimalKind(kind.precision, kind.scale)
        case ArrayType():
            return ArrayKind(_kind(kind.elementType, f"{place}[]"))
        case MapType():
            return MapKind(_kind(kind.keyType, f"{place} (key)"), _kind(kind.valueType, f"{place}{{}}"))
        case StructType():
            inner = (
                TypeField(each.name, _kind(each.dataType, f"{place}.{each.name}"), each.nullable)
                for each in kind.fields
            )
            return StructKind(tuple(inner))
        case CharType() | VarcharType():
            return PlainKind.STRING
    found = _KINDS.get(type(kind))
    if found is None:
        raise InvalidInput(
            f"{place} is {kind.simpleString()}, which fields of message types are not: cast it", field="schema"
        )
    return found
