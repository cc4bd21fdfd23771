"""Message types of pydantic models, dataclasses and typed dicts, whose messages `TypedLines` and `ModelRows` write.

Fields have the names of the written JSON. A field that may be None is nullable. Values that pydantic writes as text
(UUIDs, enums of texts, times of day, decimals without a number of digits) are a STRING; an aware datetime is a
TIMESTAMP, a naive one (`pydantic.NaiveDatetime`) a TIMESTAMP_NTZ.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import pydantic
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines
from coranto.types.definitions import CsvForm, JsonForm, MessageType
from coranto.types.kinds import ArrayKind, DecimalKind, Kind, MapKind, PlainKind, StructKind, TypeField

_PLAIN: Final[Mapping[Any, PlainKind]] = {
    bool: PlainKind.BOOLEAN,
    int: PlainKind.BIGINT,
    float: PlainKind.DOUBLE,
    str: PlainKind.STRING,
    bytes: PlainKind.STRING,
    UUID: PlainKind.STRING,
    dt.datetime: PlainKind.TIMESTAMP,
    dt.date: PlainKind.DATE,
    dt.time: PlainKind.STRING,
    dt.timedelta: PlainKind.STRING,
    decimal.Decimal: PlainKind.STRING,
    pydantic.AwareDatetime: PlainKind.TIMESTAMP,
    pydantic.NaiveDatetime: PlainKind.TIMESTAMP_NTZ,
}
_LISTS: Final = (list, tuple, set, frozenset, Sequence, Set)
_MAPS: Final = (dict, Mapping)


def type_of_model(
    kind: type[Any], name: str = "", form: JsonForm | CsvForm | None = None, description: str = ""
) -> MessageType:
    """Return the message type of a model. By default, `name` is the class's name, and `form` is lines of JSON.

    A field at the place of the UUID is not part of the type. Raises InvalidInput for a field without a matching type.
    """
    form = form if form is not None else JsonForm()
    path = JsonLines(form.uuid_pointer).path if isinstance(form, JsonForm) else ()
    return MessageType(name or kind.__name__, form, _without(tuple(_fields_of(kind, ())), path), description)


def _without(fields: tuple[TypeField, ...], path: Sequence[str]) -> tuple[TypeField, ...]:
    """Return the fields without the field at a path, and without structs that would then be empty."""
    found = []
    for field in fields:
        if path and field.name == path[0]:
            if len(path) == 1:
                continue
            if isinstance(field.kind, StructKind):
                if not (inner := _without(field.kind.fields, path[1:])):
                    continue
                field = dataclasses.replace(field, kind=StructKind(inner))
        found.append(field)
    return tuple(found)


def _fields_of(kind: type[Any], within: tuple[type[Any], ...]) -> Iterator[TypeField]:
    if kind in within:
        raise InvalidInput(f"{kind.__name__} contains itself, which columns cannot express: define its type by a file")
    for name, hint, metadata in _hints_of(kind):
        found, nullable = _typed(hint, tuple(metadata), name, (*within, kind))
        yield TypeField(name, found, nullable)


def _hints_of(kind: type[Any]) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Yield the names that a class has in JSON, the types of its fields, and their annotations."""
    if not isinstance(kind, type):
        raise InvalidInput(f"{kind} is not a model, dataclass or typed dict")
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            if field.exclude:  # It is never written.
                continue
            yield field.serialization_alias or field.alias or name, field.annotation, field.metadata
        for name, computed in kind.model_computed_fields.items():
            yield computed.alias or name, computed.return_type, ()
        return
    hints = get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        hints = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    elif not typing.is_typeddict(kind):
        raise InvalidInput(f"{kind.__name__} is not a model, dataclass or typed dict")
    optional: frozenset[str] = getattr(kind, "__optional_keys__", frozenset())
    for name, hint in hints.items():
        yield name, (hint | None) if name in optional else hint, ()


def _typed(hint: Any, metadata: tuple[Any, ...], place: str, within: tuple[type[Any], ...]) -> tuple[Kind, bool]:
    """Return the type of a field, and True if it may be None."""
    origin = get_origin(hint)
    if origin in (typing.Required, typing.NotRequired):
        kind, nullable = _typed(get_args(hint)[0], metadata, place, within)
        return kind, nullable or origin is typing.NotRequired
    if origin is Annotated:
        inner, *more = get_args(hint)
        within_field = [part for each in more if isinstance(each, FieldInfo) for part in each.metadata]
        return _typed(inner, (*metadata, *more, *within_field), place, within)
    if origin in (Union, types.UnionType):
        others = [each for each in get_args(hint) if each is not type(None)]
        kinds = {_typed(each, metadata, place, within)[0] for each in others}
        if len(kinds) != 1:
            raise InvalidInput(f"{place} is {hint}, which is more than one type: define its type by a file")
        return kinds.pop(), len(others) < len(get_args(hint))
    return _kind(hint, origin, metadata, place, within), False


def _kind(hint: Any, origin: Any, metadata: tuple[Any, ...], place: str, within: tuple[type[Any], ...]) -> Kind:
    if origin is Literal:
        kinds = {_kind(type(each), None, (), place, within) for each in get_args(hint)}
        if len(kinds) == 1:
            return kinds.pop()
    elif origin in _LISTS:
        parts = [each for each in get_args(hint) if each is not Ellipsis]
        kinds = {_typed(each, (), f"{place}[]", within)[0] for each in parts}
        if len(kinds) == 1:
            return ArrayKind(kinds.pop())
    elif origin in _MAPS:
        key, value = get_args(hint)
        _typed(key, (), f"{place} (key)", within)
        return MapKind(PlainKind.STRING, _typed(value, (), f"{place}{{}}", within)[0])  # Keys of JSON are texts.
    elif isinstance(hint, type):
        return _kind_of_class(hint, metadata, place, within)
    elif hint in _PLAIN:
        return _PLAIN[hint]
    raise InvalidInput(f"{place} is {hint}, which has no type here: define its type by a file")


def _kind_of_class(hint: type[Any], metadata: tuple[Any, ...], place: str, within: tuple[type[Any], ...]) -> Kind:
    if issubclass(hint, decimal.Decimal):
        digits = _digits(metadata)
        return DecimalKind(*digits) if digits is not None else PlainKind.STRING
    if issubclass(hint, enum.Enum):
        kinds = {_kind(type(each.value), None, (), place, within) for each in hint}
        if len(kinds) == 1:
            return kinds.pop()
    if hint in _PLAIN:
        return _PLAIN[hint]
    if issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return StructKind(tuple(_fields_of(hint, within)))
    plain = next((kind for known, kind in _PLAIN.items() if issubclass(hint, known)), None)
    if plain is None:
        raise InvalidInput(f"{place} is {hint.__name__}, which has no type here: define its type by a file")
    return plain


def _digits(metadata: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return the maximum digits and decimal places of a decimal, or None unless both are set."""
    found = {
        name: getattr(each, name)
        for each in metadata
        for name in ("max_digits", "decimal_places")
        if getattr(each, name, None) is not None
    }
    return (found["max_digits"], found["decimal_places"]) if len(found) == 2 else None
