"""The types of rows that become JSON objects. Types that would not arrive as they left are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pyspark.sql import types as T

from coranto.errors import InvalidInput

_TEXTS: Final = (T.StringType, T.CharType, T.VarcharType)
_ENCODABLE: Final = (
    *(T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.DecimalType, T.FloatType, T.DoubleType),
    *(*_TEXTS, T.DateType, T.TimestampType, T.TimestampNTZType, T.BinaryType, T.ArrayType, T.MapType, T.NullType),
)


def require_encodable(kind: T.DataType, place: str) -> None:
    """Raise InvalidInput, naming `place`, for a type that would not arrive in a message as it left."""
    require_text_keys(kind, place, field="schema")
    for where, part in _parts(kind, place):
        if isinstance(part, T.StructType):
            if repeated := sorted({name for name in part.names if part.names.count(name) > 1}):
                raise InvalidInput(f"{where or 'the row'} has two fields {repeated[0]!r}; rename one", field="schema")
        elif not isinstance(part, _ENCODABLE):
            raise InvalidInput(
                f"{where} is {part.simpleString()}, which JSON cannot express: cast it, or write texts of to_json",
                field="schema",
            )


def require_text_keys(kind: T.DataType, place: str, *, field: str) -> None:
    """Raise InvalidInput about `field`, naming `place`, for a map on any level without text keys."""
    for where, part in _parts(kind, place):
        if isinstance(part, T.MapType) and not isinstance(part.keyType, _TEXTS):
            raise InvalidInput(
                f"{where} is {part.simpleString()}, and names in JSON are texts: cast its keys to STRING, or write "
                "its entries as an array of structs (map_entries)",
                field=field,
            )


def is_encodable(kind: T.DataType) -> bool:
    """Return True if `require_encodable` refuses nothing of a type."""
    try:
        require_encodable(kind, "value")
    except InvalidInput:
        return False
    return True


def _parts(kind: T.DataType, place: str) -> Iterator[tuple[str, T.DataType]]:
    """Yield a type and all that it consists of, each with its place."""
    yield place, kind
    match kind:
        case T.StructType():
            for field in kind.fields:
                yield from _parts(field.dataType, f"{place}.{field.name}" if place else field.name)
        case T.ArrayType():
            yield from _parts(kind.elementType, f"{place}[]")
        case T.MapType():
            yield from _parts(kind.valueType, f"{place}{{}}")
