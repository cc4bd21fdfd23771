"""The check of content before publication: columns of rows, and JSON messages, against a type's fields."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from coranto.errors import InvalidInput
from coranto.names import shown
from coranto.types.kinds import (
    INTEGERS,
    ArrayKind,
    DecimalKind,
    Kind,
    MapKind,
    PlainKind,
    StructKind,
    TypeField,
    format_kind,
    widens,
)

_BITS: Final = dict(zip(INTEGERS, (8, 16, 32, 64), strict=True))
_CLOCK: Final = r"[T ](?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_LOCAL: Final = re.compile(rf"(\d{{4}}-\d\d-\d\d){_CLOCK}", re.ASCII)
_ZONED: Final = re.compile(rf"(\d{{4}}-\d\d-\d\d){_CLOCK}(?:Z|[+-](?:0\d|1[0-7]):[0-5]\d)", re.ASCII)
_NUMBER: Final = re.compile(r"-?\d{1,80}(?:\.\d{1,80})?(?:E[+-]?\d{1,2})?", re.ASCII)
"""Texts of decimals, as pydantic writes them."""
_WORDS: Final = ("NaN", "Infinity", "-Infinity")
_LARGEST_FLOAT: Final = 3.4028234663852886e38


# ------------------------------------------------------------------------------------------------------------ columns


def require_columns(columns: Sequence[TypeField], fields: Sequence[TypeField]) -> None:
    """Raise InvalidInput, with all problems, unless rows of these columns are messages of these fields.

    A column must have the type of its field or a narrower one. Fields that are not nullable must have a column. The
    caller checks it for nulls: columns are often nullable without containing any.
    """
    if found := list(_unfit_columns(columns, fields, "")):
        raise InvalidInput("; ".join(found), field="columns")


def _unfit_columns(columns: Sequence[TypeField], fields: Sequence[TypeField], place: str) -> Iterator[str]:
    present = {field.name: field for field in fields}
    seen: set[str] = set()
    for column in columns:
        where = f"{place}.{column.name}" if place else column.name
        field = present.pop(column.name, None)
        if column.name in seen:
            yield f"{where} occurs more than once: remove the duplicates"
        elif field is None:
            names = ", ".join(each.name for each in fields)
            yield f"{where} is not a field of the type, which has {names}: omit it, or register a version that has it"
        else:
            yield from _unfit_kind(column.kind, field.kind, where)
        seen.add(column.name)
    for field in present.values():
        if not field.nullable:
            yield f"{f'{place}.{field.name}' if place else field.name} is NOT NULL, and there is no such column: add it"


def _unfit_kind(column: Kind, field: Kind, place: str) -> Iterator[str]:
    match column, field:
        case StructKind(mine), StructKind(theirs):
            yield from _unfit_columns(mine, theirs, place)
        case ArrayKind(mine), ArrayKind(theirs):
            yield from _unfit_kind(mine, theirs, f"{place}[]")
        case MapKind(key, mine), MapKind(other_key, theirs) if key == other_key:
            yield from _unfit_kind(mine, theirs, f"{place}{{}}")
        case _ if column != field and not widens(column, field):
            yield f"{place} is {format_kind(column)}, and its field {format_kind(field)}: cast it"


# ----------------------------------------------------------------------------------------------------------- messages


def require_message(message: Mapping[str, object], fields: Sequence[TypeField], without: Sequence[str] = ()) -> None:
    """Raise InvalidInput unless a JSON message fits fields: its values parse into them, and no required one is missing.

    `without` is the path of the message's UUID, which is not one of the fields.
    """
    if found := next(_unfit_values(message, fields, "", tuple(without)), None):
        raise InvalidInput(found, field="message")


def _unfit_values(
    message: Mapping[str, object], fields: Sequence[TypeField], place: str, without: tuple[str, ...] = ()
) -> Iterator[str]:
    present = {field.name: field for field in fields}
    for name, value in message.items():
        where = f"{place}.{name}" if place else str(name)
        field, leads_to_uuid = present.pop(name, None), bool(without) and name == without[0]
        if field is None:
            if not leads_to_uuid:
                yield f"{shown(where)} is not a field of the type: leave it out, or register a version that has it"
        elif value is None:
            if not field.nullable:
                yield f"{where} is NOT NULL, and null: give it"
        else:
            yield from _unfit_value(value, field.kind, where, without[1:] if leads_to_uuid else ())
    for field in present.values():
        if not field.nullable:
            yield f"{f'{place}.{field.name}' if place else field.name} is NOT NULL, and missing: give it"


def _unfit_value(value: object, kind: Kind, place: str, without: tuple[str, ...] = ()) -> Iterator[str]:
    match kind:
        case StructKind(fields) if isinstance(value, Mapping):
            yield from _unfit_values(value, fields, place, without)
        case ArrayKind(element) if isinstance(value, list | tuple):
            for number, each in enumerate(value):
                if each is not None:
                    yield from _unfit_value(each, element, f"{place}[{number}]")
        case MapKind(_, inner) if isinstance(value, Mapping):
            for name, each in value.items():
                if not isinstance(name, str):
                    yield f"{place} has the key {shown(str(name))}, which is not text"
                elif each is not None:
                    yield from _unfit_value(each, inner, f"{place}.{name}")
        case DecimalKind() if _is_decimal(value, kind):
            return
        case PlainKind() if _is_plain(value, kind):
            return
        case _:
            yield f"{place} is {shown(str(value))} ({type(value).__name__}), and no {format_kind(kind)}"


def _is_plain(value: object, kind: PlainKind) -> bool:
    if kind is PlainKind.BOOLEAN:
        return isinstance(value, bool)
    if kind in _BITS:
        limit = 1 << (_BITS[kind] - 1)
        return isinstance(value, int) and not isinstance(value, bool) and -limit <= value < limit
    if kind in (PlainKind.FLOAT, PlainKind.DOUBLE):
        if isinstance(value, str):
            return value in _WORDS
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        largest = _LARGEST_FLOAT if kind is PlainKind.FLOAT else math.inf
        try:
            return math.isfinite(float(value)) and abs(float(value)) <= largest
        except OverflowError:
            return False
    if not isinstance(value, str):
        return False
    if kind is PlainKind.STRING:
        return True
    if kind is PlainKind.DATE:
        return _DAY.fullmatch(value) is not None and _is_day(value)
    form = _ZONED if kind is PlainKind.TIMESTAMP else _LOCAL
    found = form.fullmatch(value)
    return found is not None and _is_day(found[1])


def _is_day(text: str) -> bool:
    try:
        dt.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _is_decimal(value: object, kind: DecimalKind) -> bool:
    """Return True if a number, or its text, has no more digits than the type on either side of the point."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = decimal.Decimal(value)
    if isinstance(value, bool) or not isinstance(value, int | float | decimal.Decimal):
        return False
    exact = decimal.Decimal(repr(value)) if isinstance(value, float) else decimal.Decimal(value)
    if not exact.is_finite() or not exact:
        return exact.is_finite()
    _, digits, exponent = exact.normalize(decimal.Context(prec=1000)).as_tuple()
    assert isinstance(exponent, int)
    return -exponent <= kind.scale and len(digits) + exponent <= kind.precision - kind.scale
