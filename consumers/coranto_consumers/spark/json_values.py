"""The values of one JSON line as Spark's reader of JSON files gives them, for lines that are not parsed as columns.

The line must be JSON as RFC 8259 defines it, in UTF-8; Spark's words such as `NaN` are allowed. Other lines have no
values, even if Spark would accept them (names in single quotes, text behind the object).
"""

from __future__ import annotations

import math
import re
from typing import Final

from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from coranto.messages.json_text import Number, fields_of

_BITS: Final[dict[type[DataType], int]] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_INTEGER: Final = re.compile(r"-?\d+", re.ASCII)
_WORDS: Final = {
    "NaN": math.nan,
    **dict.fromkeys(("Infinity", "+Infinity", "+INF"), math.inf),
    **dict.fromkeys(("-Infinity", "-INF"), -math.inf),
}
MISFIT: Final = object()
"""Stands for a value that does not fit its column's type."""


def values_of(line: bytes, schema: StructType) -> tuple[list[object], bool]:
    """Return the values of a line for the columns of a schema, and True if all of them fit.

    A value that does not fit is left out. If the line is not a JSON object, all values are. If names are equal, the
    last value that fits counts.
    """
    try:
        fields = list(fields_of(line.decode()))
    except (ValueError, RecursionError):
        return [None] * len(schema.fields), False
    kinds = {field.name: field.dataType for field in schema.fields}
    found: dict[str, object] = dict.fromkeys(kinds)
    fits = True
    for name, value, text in fields:
        if name not in kinds:
            continue
        read = _value(kinds[name], value, text)
        if read is MISFIT:
            fits = False
        else:
            found[name] = read
    return list(found.values()), fits


def _value(kind: DataType, value: object, text: str) -> object:
    """Return a JSON value as a value of a column's type, or MISFIT. `text` is the value as it is written."""
    if value is None:
        return None
    if isinstance(kind, StringType):
        plain = value if type(value) is str else text
        return plain.encode(errors="replace").decode()  # Halves of surrogate pairs become question marks.
    if isinstance(kind, BooleanType):
        return value if isinstance(value, bool) else MISFIT
    if isinstance(kind, DoubleType):
        return _double(value)
    if not isinstance(value, Number) or _INTEGER.fullmatch(value) is None:
        return MISFIT
    number, limit = int(value), 1 << (_BITS[type(kind)] - 1)
    if isinstance(kind, ByteType) and limit <= number < 2 * limit:
        return number - 2 * limit  # Spark takes it for an unsigned byte.
    return number if -limit <= number < limit else MISFIT


def _double(value: object) -> object:
    if not isinstance(value, str):
        return MISFIT
    if value in _WORDS:
        return _WORDS[value]
    if not isinstance(value, Number):
        return MISFIT
    if _INTEGER.fullmatch(value) is None:
        return float(value)
    try:
        return float(int(value))  # The integer -0 is 0.
    except OverflowError:
        return math.copysign(math.inf, -1.0 if value.startswith("-") else 1.0)
