"""Parsing of one JSON line with the same values as Spark's JSON reader, for lines that are not parsed column-wise.

The line must be RFC 8259 JSON in UTF-8, and may also contain `NaN`, `Infinity` and `-Infinity`. Other lines have no
values, even if Spark would accept them (names in single quotes, text after the object). The same is true of lines
nested more deeply than Python's parser allows, about 900 levels, which is slightly less than Spark allows. Dates are
days since 1970, times are microseconds since 1970, and maps are lists of (name, value) pairs, as pyarrow expects them.
A map may repeat a name.
"""

from __future__ import annotations

import binascii
import decimal
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import tzinfo
from fractions import Fraction
from typing import Any, Final, NamedTuple, TypeAlias

from pyspark.sql import types as T

from coranto.errors import InvalidInput
from coranto.messages.json_text import Number, elements_of, fields_of
from coranto_consumers.spark.decoding.json_times import NoZone, days_of, local_micros_of, micros_of

BITS: Final[dict[type[T.DataType], int]] = {T.ByteType: 8, T.ShortType: 16, T.IntegerType: 32, T.LongType: 64}
_INTEGER: Final = re.compile(r"-?\d+", re.ASCII)
_DECIMAL: Final = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?")
_DIGIT: Final = "[A-Za-z0-9+/]"
_BASE64: Final = re.compile(rf"(?:[\x00-\x20]|{_DIGIT * 4}|{_DIGIT * 3}=|{_DIGIT * 2}==)*+")
_BELOW_PRINTABLE: Final = dict.fromkeys(range(0x21))
_MAX_EXPONENT: Final = (1 << 31) - 1
"""The largest exponent of Java's decimals, and their largest number of decimal places."""
_WORDS: Final = {
    "NaN": math.nan,
    **dict.fromkeys(("Infinity", "+Infinity", "+INF"), math.inf),
    **dict.fromkeys(("-Infinity", "-INF"), -math.inf),
}
MAX_DIGITS: Final = 1000
"""The maximum digits of a JSON number in Spark, including its exponent. pyarrow and Python have other limits."""
MAX_DEPTH: Final = 1000
# Possessive, so that the time is linear in the length of a line.
_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
MISFIT: Final = object()
"""The result for a value that does not fit its column's type."""

Convert: TypeAlias = Callable[[object, str], object]
"""Converts a JSON value, given with its JSON text, to a value of a column, MISFIT, or Partial."""


class Partial(NamedTuple):
    """A struct, or a value with structs, that has nulls for values that do not fit."""

    value: object


class LineValues:
    """Parses lines into the columns of a schema. `zone` is the time zone of times without one."""

    def __init__(self, schema: T.StructType, zone: tzinfo | None = None) -> None:
        self._columns = {field.name: converter_of(field, field.dataType, zone) for field in schema.fields}

    def __call__(self, line: bytes) -> tuple[list[object], bool]:
        """Return the values of a line, null where they do not fit, and True if all fit. Raises InvalidInput."""
        try:
            text = line.decode()
            if is_deep(text):
                return [None] * len(self._columns), False
            found, fits = _fields(self._columns, text)
        except NoZone as error:
            raise InvalidInput(
                "a TIMESTAMP of a message names no time zone; set the option to the session's, "
                "spark.conf.get('spark.sql.session.timeZone')",
                field="option timeZone",
            ) from error
        except (ValueError, RecursionError):
            return [None] * len(self._columns), False
        return list(found.values()), fits


def is_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(text):
        first = token[0][0]
        depth += first in "[{"
        depth -= first in "]}"
        if depth > MAX_DEPTH:
            return True
    return False


def has_long_number(value: object, text: str) -> bool:
    """Return True if a JSON value is or contains a number that is too long. `text` is its JSON text."""
    if len(text) <= MAX_DIGITS:
        return False
    left = [value]
    while left:
        match left.pop():
            case Number() as number:
                if sum(map(str.isdigit, number)) > MAX_DIGITS:
                    return True
            case dict() as found:
                left.extend(found.values())
            case list() as found:
                left.extend(found)
    return False


def converter_of(column: T.StructField, kind: T.DataType, zone: tzinfo | None) -> Convert:
    """Return the function that converts values of a type. Raises InvalidInput for unsupported types."""
    match kind:
        case T.ArrayType():
            return _several(list, elements_of, converter_of(column, kind.elementType, zone))
        case T.MapType() if kind.keyType == T.StringType():
            return _several(dict, fields_of, converter_of(column, kind.valueType, zone))
        case T.StructType() if kind.fields and len({*kind.names}) == len(kind.fields):
            return _struct({field.name: converter_of(column, field.dataType, zone) for field in kind.fields})
        case T.DecimalType():
            return _decimal(kind.precision, kind.scale)
        case T.TimestampType():
            return lambda value, text: _timestamp(value, text, zone)
    for known, convert in _SIMPLE.items():
        if kind == known:
            return convert
    raise InvalidInput(
        f"column {column.name!r} has {kind.simpleString()}, which lines are not parsed into. Declare STRING and "
        "parse or cast the text, or read messages as they are and use from_json",
        field="schema",
    )


def _fields(columns: Mapping[str, Convert], text: str) -> tuple[dict[str, object], bool]:
    """Return the values of an object's fields, and True if all fit. Raises ValueError if it is not an object."""
    found: dict[str, object] = dict.fromkeys(columns)
    fits = True
    for name, value, written in fields_of(text):
        if name not in columns:
            if has_long_number(value, written):
                raise ValueError(f"a number of {name[:100]!r} has too many digits")
            continue
        read = None if value is None else columns[name](value, written)
        if read is MISFIT:
            fits = False
        elif isinstance(read, Partial):
            found[name], fits = read.value, False
        else:
            found[name] = read
    return found, fits


def _struct(columns: Mapping[str, Convert]) -> Convert:
    def convert(value: object, text: str) -> object:
        if not isinstance(value, dict):
            return MISFIT
        found, fits = _fields(columns, text)
        return found if fits else Partial(found)

    return convert


def _several(kind: type, parts_of: Callable[[str], Iterable[tuple[Any, ...]]], convert_one: Convert) -> Convert:
    """Return the converter of a list, or of an object to a list of (name, value) pairs."""

    def convert(value: object, text: str) -> object:
        if not isinstance(value, kind):
            return MISFIT
        found: list[object] = []
        fits = True
        for *name, each, written in parts_of(text):
            read = None if each is None else convert_one(each, written)
            if read is MISFIT:
                return MISFIT
            if isinstance(read, Partial):
                read, fits = read.value, False
            found.append((_plain(name[0]), read) if name else read)
        return found if fits else Partial(found)

    return convert


def _plain(text: str) -> str:
    return text.encode(errors="replace").decode()  # Unpaired surrogates become question marks.


def _string(value: object, text: str) -> object:
    if has_long_number(value, text):
        return MISFIT
    return _plain(value if type(value) is str else text)


def _whole(value: object) -> int | None:
    """Return a number that is written as an integer and not too long for Spark. None for other values."""
    if not isinstance(value, Number) or _INTEGER.fullmatch(value) is None or has_long_number(value, value):
        return None
    return int(value)


def _integer(kind: type[T.DataType]) -> Convert:
    limit = 1 << (BITS[kind] - 1)

    def convert(value: object, _: str) -> object:
        number = _whole(value)
        if number is None:
            return MISFIT
        if kind is T.ByteType and limit <= number < 2 * limit:
            return number - 2 * limit  # Spark reads it as an unsigned byte.
        return number if -limit <= number < limit else MISFIT

    return convert


def _double(value: object, _: str) -> object:
    if not isinstance(value, str):
        return MISFIT
    if value in _WORDS:
        return _WORDS[value]
    if not isinstance(value, Number) or has_long_number(value, value):
        return MISFIT
    if _INTEGER.fullmatch(value) is None:
        return float(value)
    try:
        return float(int(value))  # The integer -0 is 0.
    except OverflowError:
        return math.copysign(math.inf, -1.0 if value.startswith("-") else 1.0)


def _float(value: object, text: str) -> object:
    near = _double(value, text)
    if not isinstance(near, float) or not isinstance(value, Number) or value in _WORDS:
        return near
    return _nearest(value, near)


def _nearest(text: str, near: float) -> float:
    """Return the 32-bit float nearest to a number, whose double is `near`."""
    if near == 0 or not math.isfinite(near) or abs(near) >= 2.0**128:
        return near if abs(near) < 2.0**128 else math.copysign(math.inf, near)
    if abs(near) < 2.0**-151:
        return math.copysign(0.0, near)
    # Round the exact number: rounding the double again would be wrong near the midpoint of two floats.
    unit = math.ldexp(1.0, max(math.frexp(near)[1] - 24, -149))
    exact = Fraction(text)
    rounded = float(round(exact / Fraction(unit))) * unit
    if abs(rounded) >= 2.0**128:
        return math.copysign(math.inf, near)
    [found] = struct.unpack("f", struct.pack("f", math.copysign(rounded, near)))
    return float(found)


def _decimal(precision: int, scale: int) -> Convert:
    places = decimal.Decimal(1).scaleb(-scale)
    context = decimal.Context(
        2 * T.DecimalType().precision + 80, decimal.ROUND_HALF_UP, decimal.MIN_EMIN, decimal.MAX_EMAX
    )

    def convert(value: object, _: str) -> object:
        if not isinstance(value, str) or has_long_number(value, value):
            return MISFIT
        digits = value if isinstance(value, Number) else value.replace(",", "")
        if _DECIMAL.fullmatch(digits) is None or any(character > "\uffff" for character in digits):
            return MISFIT
        if not _is_decimal_of_java(digits):
            return MISFIT
        number = decimal.Decimal(digits)
        if not number:
            return decimal.Decimal(0).quantize(places)
        if number.adjusted() >= precision - scale:
            return MISFIT
        rounded = number.quantize(places, context=context)
        return rounded if rounded.adjusted() < precision - scale or not rounded else MISFIT

    return convert


def _is_decimal_of_java(digits: str) -> bool:
    mantissa, _, exponent = digits.lower().partition("e")
    if len(exponent.lstrip("+-0")) > len(str(_MAX_EXPONENT)):
        return False
    power = int(exponent or 0)
    behind = len(mantissa.partition(".")[2]) - power
    return abs(power) <= _MAX_EXPONENT and -_MAX_EXPONENT <= behind <= _MAX_EXPONENT


def _binary(value: object, _: str) -> object:
    if type(value) is not str or _BASE64.fullmatch(value) is None:
        return MISFIT
    digits = value.translate(_BELOW_PRINTABLE)
    if "=" not in digits[:-2]:
        return binascii.a2b_base64(digits)
    return b"".join(binascii.a2b_base64(digits[at : at + 4]) for at in range(0, len(digits), 4))


def _of_text(parse: Callable[[str], int | None]) -> Convert:

    def convert(value: object, _: str) -> object:
        found = parse(value) if type(value) is str else None
        return MISFIT if found is None else found

    return convert


def _timestamp(value: object, text: str, zone: tzinfo | None) -> object:
    if not isinstance(value, Number):
        return _of_text(lambda time: micros_of(time, zone))(value, text)
    seconds = _whole(value)
    if seconds is None or not -(1 << 63) <= seconds < 1 << 63:
        return MISFIT
    return (seconds * 1_000_000 + (1 << 63)) % (1 << 64) - (1 << 63)  # As Java multiplies.


_SIMPLE: Final[Mapping[T.DataType, Convert]] = {
    T.StringType(): _string,
    T.BooleanType(): lambda value, _: value if isinstance(value, bool) else MISFIT,
    **{kind(): _integer(kind) for kind in BITS},
    T.FloatType(): _float,
    T.DoubleType(): _double,
    T.BinaryType(): _binary,
    T.DateType(): _of_text(days_of),
    T.TimestampNTZType(): _of_text(local_micros_of),
}
