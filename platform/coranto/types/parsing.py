"""Parser of texts of fields and types, spelled as in Spark and SQL, to the values of `kinds`.

::

    fields  = field, …
    field   = name type [NOT NULL]
    type    = BOOLEAN | TINYINT | SMALLINT | INT | BIGINT | FLOAT | DOUBLE | DECIMAL(precision, scale)
            | STRING | BINARY | DATE | TIMESTAMP | TIMESTAMP_NTZ
            | ARRAY<type> | MAP<type, type> | STRUCT<name: type [NOT NULL], …>

Keywords are case-insensitive; names are not. A name with characters other than letters, digits and `_` is in backticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from coranto.errors import InvalidInput
from coranto.names import shown
from coranto.types.kinds import (
    MAX_DEPTH,
    ArrayKind,
    DecimalKind,
    Kind,
    MapKind,
    PlainKind,
    StructKind,
    TypeField,
    require_sound,
    require_sound_kind,
)

MAX_TEXT: Final = 1 << 20
"""The maximum length of a list of fields in characters."""
_ALIASES: Final = {
    **{kind.value: kind for kind in PlainKind},
    "BYTE": PlainKind.TINYINT,
    "SHORT": PlainKind.SMALLINT,
    "INTEGER": PlainKind.INT,
    "LONG": PlainKind.BIGINT,
    "REAL": PlainKind.FLOAT,
    "TIMESTAMP_LTZ": PlainKind.TIMESTAMP,
}
_DECIMALS: Final = ("DECIMAL", "DEC", "NUMERIC")
_NESTED: Final = ("ARRAY", "MAP", "STRUCT")
_TOKEN: Final = re.compile(r"\s*+(?:(?P<word>\w++)|`(?P<quoted>(?:[^`]|``)++)`|(?P<symbol>[<>(),:]))")


def parse_fields(text: str) -> tuple[TypeField, ...]:
    """Return the fields of a text such as `id BIGINT NOT NULL, name STRING`. Raises InvalidInput."""
    parser = _Parser(text, "a list of fields")
    fields = parser.fields(colon=False)
    parser.end("a comma")
    require_sound(fields)
    return fields


def parse_type(text: str) -> tuple[Kind, bool]:
    """Return the type of a text such as `BIGINT NOT NULL`, and True if it is nullable. Raises InvalidInput."""
    parser = _Parser(text, "a type")
    kind, nullable = parser.kind(), parser.nullable()
    parser.end(*(["NOT NULL"] if nullable else []))
    require_sound_kind(kind, "the type", 1)
    return kind, nullable


class _Token(NamedTuple):
    text: str
    is_name: bool
    is_quoted: bool
    at: int


class _Parser:
    """A recursive descent parser. `wanted` describes the text in errors."""

    def __init__(self, text: str, wanted: str) -> None:
        if len(text) > MAX_TEXT:
            raise InvalidInput(f"the text has {len(text)} characters; it may have {MAX_TEXT}", field="fields")
        self._text = text
        self._wanted = wanted
        self._tokens = list(_tokens(text))
        self._next = 0
        self._depth = 0

    def fields(self, *, colon: bool) -> tuple[TypeField, ...]:
        found = [self._field(colon)]
        while self._takes(","):
            found.append(self._field(colon))
        return tuple(found)

    def _field(self, colon: bool) -> TypeField:
        token = self._peek()
        if token is None or not token.is_name:
            raise self._wrong("the name of a field")
        self._next += 1
        if colon:
            self._takes(":")  # Optional, as in Spark.
        return TypeField(token.text, self.kind(), self.nullable())

    def kind(self) -> Kind:
        token = self._peek()
        word = token.text.upper() if token is not None and token.is_name and not token.is_quoted else ""
        if word not in _ALIASES and word not in _DECIMALS and word not in _NESTED:
            raise self._wrong(f"one of {', '.join([*(kind.value for kind in PlainKind), _DECIMALS[0], *_NESTED])}")
        self._next += 1
        if word in _ALIASES:
            return _ALIASES[word]
        if word in _DECIMALS:
            return self._decimal()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidInput(f"types are nested more than {MAX_DEPTH} deep; flatten them", field="fields")
        self._expect("<")
        found: Kind
        if word == "ARRAY":
            found = ArrayKind(self.kind())
        elif word == "MAP":
            key = self.kind()
            self._expect(",")
            found = MapKind(key, self.kind())
        else:
            found = StructKind(self.fields(colon=True))
        self._expect(">")
        self._depth -= 1
        return found

    def _decimal(self) -> DecimalKind:
        if not self._takes("("):
            return DecimalKind(10, 0)
        precision, scale = self._number(), 0
        if self._takes(","):
            scale = self._number()
        self._expect(")")
        return DecimalKind(precision, scale)

    def _number(self) -> int:
        token = self._peek()
        if token is None or not token.text.isascii() or not token.text.isdigit() or len(token.text) > 3:
            raise self._wrong("a number of digits")
        self._next += 1
        return int(token.text)

    def nullable(self) -> bool:
        if not self._takes("NOT"):
            return True
        self._expect("NULL")
        return False

    def end(self, *others: str) -> None:
        if self._peek() is not None:
            raise self._wrong(" or ".join([*others, "the end"]))

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _takes(self, wanted: str) -> bool:
        token = self._peek()
        found = token is not None and not token.is_quoted and token.text.upper() == wanted
        self._next += found
        return found

    def _expect(self, wanted: str) -> None:
        if not self._takes(wanted):
            raise self._wrong(wanted)

    def _wrong(self, wanted: str) -> InvalidInput:
        token = self._peek()
        found = "it ends" if token is None else f"there is {shown(self._text[token.at :][:60])}"
        return InvalidInput(f"{shown(self._text)} is not {self._wanted}: {wanted} is expected where {found}")


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise InvalidInput(f"{shown(text)} has {shown(text[at:].lstrip()[:20])}, which is not part of a type")
        quoted = match["quoted"]
        found = quoted.replace("``", "`") if quoted is not None else match["word"] or match["symbol"]
        yield _Token(found, match["symbol"] is None, quoted is not None, match.end() - len(match[0].lstrip()))
        at = match.end()
