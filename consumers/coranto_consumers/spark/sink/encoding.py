"""Rows as texts of JSON objects, whole columns at once: the texts that Spark's `to_json` writes, as JSON.

Fields that are null are left out, and null elements of arrays and maps are kept, as `to_json` does. Binary values are
base64, timestamps are in UTC with microseconds, and numbers that are none (`NaN`) are texts. Types that would not
arrive as they left are refused before anything is written.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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

_PLAIN: Final = (BooleanType, ByteType, ShortType, IntegerType, LongType, DecimalType)
_FRACTIONS: Final = (FloatType, DoubleType)
_TEXTS: Final = (StringType, CharType, VarcharType)
_QUOTED: Final = (DateType, TimestampType, TimestampNTZType)
_SPECIAL: Final = r'["\\\x00-\x1f]'


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


def encode_structs(fields: Sequence[StructField], column: Any) -> Any:
    """Return an Arrow text array with a JSON object for each of a column's structs. Raises InvalidInput for a null."""
    if column.null_count:
        raise InvalidInput("a row has no value; filter such rows out", field="column value")
    return encode_rows(fields, [column.field(at) for at in range(len(fields))], len(column))


def encode_rows(fields: Sequence[StructField], columns: Sequence[Any], rows: int) -> Any:
    """Return an Arrow text array with one JSON object for each row of columns."""
    if not fields:
        return pa.repeat(pa.scalar("{}"), rows)
    parts = []
    for field, column in zip(fields, columns, strict=True):
        name = f",{json.dumps(field.name, ensure_ascii=False)}:"
        parts.append(_joined(pa.scalar(name), _encoded(field.dataType, column)).fill_null(""))
    inner = pc.utf8_replace_slice(_joined(*parts), 0, 1, "")
    return _joined(pa.scalar("{"), inner, pa.scalar("}"))


def _encoded(kind: DataType, column: Any) -> Any:
    """Return the texts of values; null for a value that is null."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    match kind:
        case NullType():
            return pa.nulls(len(column), pa.string())
        case StructType():
            texts = encode_rows(kind.fields, [column.field(index) for index in range(len(kind.fields))], len(column))
            return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string()))
        case ArrayType():
            return _in_brackets("[", column, _encoded(kind.elementType, column.values).fill_null("null"), "]")
        case MapType():
            values = _encoded(kind.valueType, column.items).fill_null("null")
            return _in_brackets("{", column, _joined(_quoted(column.keys), pa.scalar(":"), values), "}")
        case FloatType() | DoubleType():
            return _fractions(column)
        case BinaryType():
            found = [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
            return _joined(pa.scalar('"'), pa.array(found, pa.string()), pa.scalar('"'))
        case TimestampType() | TimestampNTZType() | DateType():
            if isinstance(kind, TimestampType):
                column = column.cast(pa.timestamp("us", "UTC"))
            texts = pc.replace_substring(column.cast(pa.string()), " ", "T", max_replacements=1)
            return _joined(pa.scalar('"'), texts, pa.scalar('"'))
        case StringType() | CharType() | VarcharType():
            return _quoted(column)
    return column.cast(pa.string())


def _in_brackets(opening: str, column: Any, elements: Any, closing: str) -> Any:
    """Return the texts of lists (or maps), from those of the elements of all of them together."""
    borders = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    lists = pa.ListArray.from_arrays(pa.array(borders), elements)
    texts = _joined(pa.scalar(opening), pc.binary_join(lists, ","), pa.scalar(closing))
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, pa.string()))


def _fractions(column: Any) -> Any:
    texts = pc.replace_substring_regex(column.cast(pa.string()), r"^(-?\d+)$", r"\1.0")
    finite = pc.is_finite(column)
    if pc.all(finite).as_py() is not False:
        return texts
    words = pc.case_when(pc.make_struct(pc.is_nan(column), pc.greater(column, 0)), '"NaN"', '"Infinity"', '"-Infinity"')
    return pc.if_else(finite, texts, words)


def _quoted(column: Any) -> Any:
    column = column.cast(pa.string())
    special = pc.match_substring_regex(column, _SPECIAL).fill_null(False)
    texts = _joined(pa.scalar('"'), column, pa.scalar('"'))
    if not pc.any(special).as_py():
        return texts
    escaped = [json.dumps(text, ensure_ascii=False) for text in column.filter(special).to_pylist()]
    return pc.replace_with_mask(texts, special, pa.array(escaped, pa.string()))


def _joined(*parts: Any) -> Any:
    """Return texts joined row by row; null where a part is null."""
    return pc.binary_join_element_wise(*parts, "")
