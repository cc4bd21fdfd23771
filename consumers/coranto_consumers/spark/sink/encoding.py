"""Rows as texts of JSON objects, whole columns at once: the texts that Spark's `to_json` writes, as JSON.

Fields that are null are left out, and null elements of arrays and maps are kept, as `to_json` does. Binary values are
base64, timestamps are in UTC with microseconds, and numbers that are none (`NaN`) are texts. Types that would not
arrive as they left are refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
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
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from coranto.errors import InvalidInput
from coranto.messages.columnar_json import object_texts

_PLAIN: Final = (BooleanType, ByteType, ShortType, IntegerType, LongType, DecimalType)
_FRACTIONS: Final = (FloatType, DoubleType)
_TEXTS: Final = (StringType, CharType, VarcharType)
_QUOTED: Final = (DateType, TimestampType, TimestampNTZType)


def require_encodable(kind: DataType, place: str) -> None:
    """Raise InvalidInput, naming `place`, for a type that would not arrive in a message as it left."""
    match kind:
        case StructType():
            for field in kind.fields:
                require_encodable(field.dataType, f"{place}.{field.name}" if place else field.name)
            if repeated := sorted({name for name in kind.names if kind.names.count(name) > 1}):
                raise InvalidInput(f"{place or 'the row'} has two fields {repeated[0]!r}; rename one", field="schema")
        case ArrayType():
            require_encodable(kind.elementType, f"{place}[]")
        case MapType():
            if not isinstance(kind.keyType, _TEXTS):
                raise InvalidInput(
                    f"{place} is {kind.simpleString()}, and names in JSON are texts: cast its keys to STRING, or write "
                    "its entries as an array of structs (map_entries)",
                    field="schema",
                )
            require_encodable(kind.valueType, f"{place}{{}}")
        case _ if not isinstance(kind, (*_PLAIN, *_FRACTIONS, *_TEXTS, *_QUOTED, BinaryType, NullType)):
            raise InvalidInput(
                f"{place} is {kind.simpleString()}, which JSON has no form for: cast it, or write texts of to_json",
                field="schema",
            )


def is_encodable(kind: DataType) -> bool:
    """Return True if `require_encodable` refuses nothing of a type."""
    try:
        require_encodable(kind, "value")
    except InvalidInput:
        return False
    return True


def encode_rows(fields: Sequence[StructField], columns: Sequence[Any], rows: int) -> Any:
    """Return an Arrow text array with one JSON object for each row of columns."""
    return object_texts([field.name for field in fields], columns, rows).cast(pa.string())
