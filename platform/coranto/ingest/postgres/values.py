"""Conversion of PostgreSQL's text values to the JSON values of message types, and of column types to fields.

Decimals and times are texts, bytes are base64, and arrays are lists. Values of types that message types do not have,
such as JSON, ranges and enums, keep PostgreSQL's text.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from coranto.types.kinds import ArrayKind, DecimalKind, Kind, PlainKind, TypeField

Convert: TypeAlias = Callable[[bytes], Any]

SESSION: Final[Mapping[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO, YMD",
    "intervalstyle": "iso_8601",
    "timezone": "UTC",
    "bytea_output": "hex",
    "extra_float_digits": "3",
}
"""The settings of the sessions that produce these texts."""
_HEADER: Final = 4
_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[{},]|[^"{},]+', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


class ColumnType(NamedTuple):
    """The type of a column. `modifier` is a domain's type modifier, and `element` the type of an array's elements."""

    base: int
    modifier: int = -1
    element: int = 0


_NUMERIC: Final = 1700


def _boolean(value: bytes) -> bool:
    return value == b"t"


def _float(value: bytes) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else value.decode()


def _bytes(value: bytes) -> str:
    return base64.b64encode(bytes.fromhex(value[2:].decode())).decode()


def _local(value: bytes) -> str:
    return _timestamp(value.decode())


def _timestamp(text: str) -> str:
    return text.replace(" ", "T", 1) if text[:1].isdigit() else text


def _instant(value: bytes) -> str:
    time, zone, era = value.decode().partition("+00")
    return f"{time.replace(' ', 'T', 1)}Z{era}" if zone else time


_KINDS: Final[Mapping[int, tuple[PlainKind, Convert]]] = {
    16: (PlainKind.BOOLEAN, _boolean),
    17: (PlainKind.STRING, _bytes),
    20: (PlainKind.BIGINT, int),
    21: (PlainKind.SMALLINT, int),
    23: (PlainKind.INT, int),
    26: (PlainKind.BIGINT, int),
    700: (PlainKind.FLOAT, _float),
    701: (PlainKind.DOUBLE, _float),
    1082: (PlainKind.DATE, bytes.decode),
    1114: (PlainKind.TIMESTAMP_NTZ, _local),
    1184: (PlainKind.TIMESTAMP, _instant),
}
_TEXT: Final[tuple[PlainKind, Convert]] = (PlainKind.STRING, bytes.decode)


class ColumnTypes:
    """The types of columns by OID. Types other than the known scalar ones are looked up in the database."""

    def __init__(self) -> None:
        self._known: dict[int, ColumnType] = {}

    def unknown(self, numbers: Iterable[int]) -> list[int]:
        """Return the OIDs of types that must be looked up in the database."""
        return sorted({each for each in numbers if each not in _KINDS and each not in self._known})

    def add(self, number: int, found: ColumnType) -> None:
        self._known[number] = found

    def converter(self, number: int) -> Convert:
        """Return the function that converts the texts of a type to values."""
        kind = self._of(number)
        if kind.element:
            element = self.converter(kind.element)
            return lambda value: parse_array(value.decode(), element)
        return _KINDS.get(kind.base, _TEXT)[1]

    def field(self, name: str, number: int, modifier: int) -> TypeField:
        """Return the message field for the values of a column."""
        return TypeField(name, self._kind(number, modifier))

    def _kind(self, number: int, modifier: int) -> Kind:
        kind = self._of(number)
        modifier = kind.modifier if modifier < 0 else modifier
        if kind.element:
            return ArrayKind(self._kind(kind.element, modifier))
        if kind.base == _NUMERIC and modifier >= _HEADER:
            precision, scale = (modifier - _HEADER) >> 16 & 0xFFFF, (modifier - _HEADER) & 0x7FF
            if 0 <= scale <= precision <= 38:
                return DecimalKind(precision, scale)
        return _KINDS.get(kind.base, _TEXT)[0]

    def _of(self, number: int) -> ColumnType:
        return self._known.get(number) or ColumnType(number)


def parse_array(text: str, element: Convert) -> list[Any]:
    """Return the elements of an array. Arrays of several dimensions are lists of lists."""
    tokens = iter(_TOKENS.findall(text[text.index("{") :]))
    next(tokens)
    return list(_elements(tokens, element))


def _elements(tokens: Iterator[str], element: Convert) -> Iterator[Any]:
    for token in tokens:
        if token == "}":
            return
        if token == "{":
            yield list(_elements(tokens, element))
        elif token.startswith('"'):
            yield element(_ESCAPE.sub(r"\1", token[1:-1]).encode())
        elif token != ",":
            yield None if token == "NULL" else element(token.encode())
