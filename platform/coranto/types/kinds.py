"""The types of messages' fields, as values and as texts: a small language that is spelled as in Spark and SQL.

::

    fields  = field, …
    field   = name type [NOT NULL]
    type    = BOOLEAN | TINYINT | SMALLINT | INT | BIGINT | FLOAT | DOUBLE | DECIMAL(precision, scale)
            | STRING | BINARY | DATE | TIMESTAMP | TIMESTAMP_NTZ
            | ARRAY<type> | MAP<type, type> | STRUCT<name: type [NOT NULL], …>

Case does not matter, but in names. A name with other characters than letters, digits and `_` stands in backticks.
A TIMESTAMP is an instant, a TIMESTAMP_NTZ a date and time without a zone. `format_kind` and `format_fields` write the
one spelling that the parser reads back to an equal value.

`widens` is the one rule of which types hold all values of another one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from coranto.errors import InvalidInput
from coranto.names import shown

MAX_TEXT: Final = 1 << 20
"""The most characters of a list of fields."""
MAX_DEPTH: Final = 50
"""The most types within types."""
MAX_PRECISION: Final = 38


class PlainKind(enum.Enum):
    """A type without parameters. Its value is its spelling."""

    BOOLEAN = "BOOLEAN"
    TINYINT = "TINYINT"
    SMALLINT = "SMALLINT"
    INT = "INT"
    BIGINT = "BIGINT"
    FLOAT = "FLOAT"
    DOUBLE = "DOUBLE"
    STRING = "STRING"
    BINARY = "BINARY"
    DATE = "DATE"
    TIMESTAMP = "TIMESTAMP"
    TIMESTAMP_NTZ = "TIMESTAMP_NTZ"


@dataclass(frozen=True, slots=True)
class DecimalKind:
    """Decimal numbers of `precision` digits, of which `scale` are behind the point."""

    precision: int
    scale: int

    def __post_init__(self) -> None:
        if not 1 <= self.precision <= MAX_PRECISION or not 0 <= self.scale <= self.precision:
            raise InvalidInput(
                f"DECIMAL({self.precision}, {self.scale}) has no such digits: give a precision from 1 to "
                f"{MAX_PRECISION}, and a scale from 0 to that"
            )


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """Lists of values. Elements may be null."""

    element: Kind


@dataclass(frozen=True, slots=True)
class MapKind:
    """Values by key. Values may be null, keys not."""

    key: Kind
    value: Kind


@dataclass(frozen=True, slots=True)
class StructKind:
    """Nested fields."""

    fields: tuple[TypeField, ...]


Kind: TypeAlias = PlainKind | DecimalKind | ArrayKind | MapKind | StructKind


@dataclass(frozen=True, slots=True)
class TypeField:
    """A field of messages, or of a nested struct. One that is not nullable is in each message that is published."""

    name: str
    kind: Kind
    nullable: bool = True


INTEGERS: Final = (PlainKind.TINYINT, PlainKind.SMALLINT, PlainKind.INT, PlainKind.BIGINT)
"""The whole numbers, the narrowest first."""
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
_TOKEN: Final = re.compile(r"\s*(?:(?P<word>\w+)|`(?P<quoted>(?:[^`]|``)+)`|(?P<symbol>[<>(),:]))")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_WIDER: Final = {
    **{narrow: frozenset(INTEGERS[at + 1 :]) for at, narrow in enumerate(INTEGERS)},
    PlainKind.FLOAT: frozenset({PlainKind.DOUBLE}),
}
_EXACT_IN_DOUBLE: Final = (PlainKind.TINYINT, PlainKind.SMALLINT, PlainKind.INT)


def widens(narrow: Kind, wide: Kind) -> bool:
    """Return True if `wide` is another type without fields that holds each value of `narrow` exactly."""
    if isinstance(narrow, PlainKind):
        return wide in _WIDER.get(narrow, ()) or (wide is PlainKind.DOUBLE and narrow in _EXACT_IN_DOUBLE)
    if isinstance(narrow, DecimalKind) and isinstance(wide, DecimalKind):
        whole = wide.precision - wide.scale >= narrow.precision - narrow.scale
        return whole and wide.scale >= narrow.scale and wide != narrow
    return False


def kinds_in(fields: Sequence[TypeField], place: str = "") -> Iterator[tuple[str, Kind]]:
    """Yield all types of fields with their places, such as `lines[].item`, those within others included."""
    for field in fields:
        yield from _within(field.kind, f"{place}.{field.name}" if place else field.name)


def _within(kind: Kind, place: str) -> Iterator[tuple[str, Kind]]:
    yield place, kind
    match kind:
        case ArrayKind(element):
            yield from _within(element, f"{place}[]")
        case MapKind(_, value):
            yield from _within(value, f"{place}{{}}")
        case StructKind(fields):
            yield from kinds_in(fields, place)


def require_sound(fields: Sequence[TypeField], place: str = "", depth: int = 0) -> None:
    """Raise InvalidInput for fields without a name, names that differ in case only, and types nested too deeply."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{place}: types are nested more than {MAX_DEPTH} deep; flatten them", field="fields")
    known: dict[str, str] = {}
    for field in fields:
        where = f"{place}.{field.name}" if place else field.name
        if not field.name or not field.name.isprintable():
            raise InvalidInput(f"{shown(where)} is no name of a field: give printable characters", field="fields")
        if (same := known.get(field.name.casefold())) is not None:
            raise InvalidInput(
                f"{shown(where)} and {shown(same)} differ in case at most, and columns know no case: rename one",
                field="fields",
            )
        known[field.name.casefold()] = field.name
        _require_sound_kind(field.kind, where, depth + 1)


def _require_sound_kind(kind: Kind, place: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{place}: types are nested more than {MAX_DEPTH} deep; flatten them", field="fields")
    match kind:
        case ArrayKind(element):
            _require_sound_kind(element, f"{place}[]", depth + 1)
        case MapKind(key, value):
            if not isinstance(key, PlainKind | DecimalKind):
                raise InvalidInput(f"{place} has keys of {format_kind(key)}: keys are values without parts")
            _require_sound_kind(value, f"{place}{{}}", depth + 1)
        case StructKind(fields):
            if not fields:
                raise InvalidInput(f"{place} is a STRUCT without fields: give it one, or leave it out", field="fields")
            require_sound(fields, place, depth)


# ----------------------------------------------------------------------------------------------------------- writing


def format_kind(kind: Kind) -> str:
    """Return the text of a type."""
    match kind:
        case DecimalKind(precision, scale):
            return f"DECIMAL({precision}, {scale})"
        case ArrayKind(element):
            return f"ARRAY<{format_kind(element)}>"
        case MapKind(key, value):
            return f"MAP<{format_kind(key)}, {format_kind(value)}>"
        case StructKind(fields):
            return f"STRUCT<{', '.join(f'{_quoted(each.name)}: {format_type(each)}' for each in fields)}>"
    return kind.value


def format_type(field: TypeField) -> str:
    """Return the text of a field's type, with NOT NULL where it is not nullable."""
    return format_kind(field.kind) + ("" if field.nullable else " NOT NULL")


def format_fields(fields: Sequence[TypeField]) -> str:
    """Return the text of a list of fields."""
    return ", ".join(f"{_quoted(field.name)} {format_type(field)}" for field in fields)


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"


# ----------------------------------------------------------------------------------------------------------- parsing


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
    _require_sound_kind(kind, "the type", 1)
    return kind, nullable


class _Token(NamedTuple):
    text: str
    is_name: bool
    is_quoted: bool
    at: int


class _Parser:
    """A parser by recursive descent. `wanted` is what the text has to be."""

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
            self._takes(":")  # Spark leaves it out, too.
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
            raise InvalidInput(f"{shown(text)} has {shown(text[at:].lstrip()[:20])}, which is no part of a type")
        quoted = match["quoted"]
        found = quoted.replace("``", "`") if quoted is not None else match["word"] or match["symbol"]
        yield _Token(found, match["symbol"] is None, quoted is not None, match.end() - len(match[0].lstrip()))
        at = match.end()
