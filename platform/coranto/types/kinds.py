"""The types of messages' fields, their texts, and the widening of types.

A TIMESTAMP is an instant, a TIMESTAMP_NTZ a date and time without a zone. `format_kind` and `format_fields` write the
canonical spelling, which `parsing` reads back to an equal value. `widens` is the only definition of wider types.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from coranto.errors import InvalidInput
from coranto.names import shown

MAX_DEPTH: Final = 50
"""The maximum nesting depth of types."""
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
    """Decimal numbers of `precision` digits, `scale` of them after the decimal point."""

    precision: int
    scale: int

    def __post_init__(self) -> None:
        if not 1 <= self.precision <= MAX_PRECISION or not 0 <= self.scale <= self.precision:
            raise InvalidInput(
                f"DECIMAL({self.precision}, {self.scale}) is not valid: give a precision from 1 to "
                f"{MAX_PRECISION}, and a scale from 0 to that"
            )


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """Lists of values. Elements may be null."""

    element: Kind


@dataclass(frozen=True, slots=True)
class MapKind:
    """Values by key. Values may be null, keys may not."""

    key: Kind
    value: Kind


@dataclass(frozen=True, slots=True)
class StructKind:
    """Nested fields."""

    fields: tuple[TypeField, ...]


Kind: TypeAlias = PlainKind | DecimalKind | ArrayKind | MapKind | StructKind


@dataclass(frozen=True, slots=True)
class TypeField:
    """A field of messages, or of a nested struct. Each published message must have the fields that are not nullable."""

    name: str
    kind: Kind
    nullable: bool = True


INTEGERS: Final = (PlainKind.TINYINT, PlainKind.SMALLINT, PlainKind.INT, PlainKind.BIGINT)
"""The integer types, narrowest first."""
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
    """Yield all types of fields, including nested types, with their places such as `lines[].item`."""
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
            raise InvalidInput(f"{shown(where)} cannot name a field: give printable characters", field="fields")
        if (same := known.get(field.name.casefold())) is not None:
            raise InvalidInput(
                f"{shown(where)} and {shown(same)} differ in case at most, and columns know no case: rename one",
                field="fields",
            )
        known[field.name.casefold()] = field.name
        require_sound_kind(field.kind, where, depth + 1)


def require_sound_kind(kind: Kind, place: str, depth: int) -> None:
    """Raise InvalidInput for a type at a place, like `require_sound`."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"{place}: types are nested more than {MAX_DEPTH} deep; flatten them", field="fields")
    match kind:
        case ArrayKind(element):
            require_sound_kind(element, f"{place}[]", depth + 1)
        case MapKind(key, value):
            if not isinstance(key, PlainKind | DecimalKind):
                raise InvalidInput(f"{place} has keys of {format_kind(key)}: keys are values without parts")
            require_sound_kind(value, f"{place}{{}}", depth + 1)
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
