"""Conversion of Protobuf messages to the JSON values of message types, and of their descriptors to fields.

Numbers stay numbers. Fields without presence have their defaults. Enums (by name), bytes (in base64) and durations are
STRING, a wrapper is its value, and times are truncated to microseconds. Struct, Value and Any have Protobuf's own JSON
form, which no type describes.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from coranto.errors import InvalidInput
from coranto.ingest.rows import plain
from coranto.types.kinds import ArrayKind, DecimalKind, Kind, MapKind, PlainKind, StructKind, TypeField

_F: Final = FieldDescriptor
_KINDS: Final[dict[int, Kind]] = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), PlainKind.INT),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), PlainKind.BIGINT),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32), PlainKind.BIGINT),
    **dict.fromkeys((_F.TYPE_UINT64, _F.TYPE_FIXED64), DecimalKind(20, 0)),
    _F.TYPE_FLOAT: PlainKind.FLOAT,
    _F.TYPE_DOUBLE: PlainKind.DOUBLE,
    _F.TYPE_BOOL: PlainKind.BOOLEAN,
    **dict.fromkeys((_F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_ENUM), PlainKind.STRING),
}
_PACKAGE: Final = "google.protobuf."
_TIMESTAMP: Final = f"{_PACKAGE}Timestamp"
_TEXTS: Final = frozenset(f"{_PACKAGE}{name}" for name in ("Duration", "FieldMask"))
_WRAPPERS: Final = frozenset(
    f"{_PACKAGE}{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
_EPOCH: Final = dt.datetime(1970, 1, 1)


def json_of(message: Any) -> dict[str, Any]:
    """Return the fields of a message, except for unset fields with presence.

    Raises ValueError and TypeError for values that JSON cannot express.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if (entry := _entry(field)) is not None:
            of = entry.fields_by_name["value"]
            found[field.name] = {
                str(key).lower() if isinstance(key, bool) else str(key): _single(value[key], of) for key in value
            }
        elif field.is_repeated:
            found[field.name] = [_single(each, field) for each in value]
        else:
            found[field.name] = _single(value, field)
    return found


def _single(value: Any, field: FieldDescriptor) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    if field.message_type is None:
        return plain(value)
    name = field.message_type.full_name
    if name == _TIMESTAMP:
        try:
            return f"{(_EPOCH + dt.timedelta(seconds=value.seconds, microseconds=value.nanos // 1000)).isoformat()}Z"
        except OverflowError as error:
            raise ValueError(f"{field.name} is a time that is not in the years 1 to 9999") from error
    if name in _WRAPPERS:
        return plain(value.value)
    if name.startswith(_PACKAGE):
        return json_format.MessageToDict(value, preserving_proto_field_name=True)
    return json_of(value)


def _entry(field: FieldDescriptor) -> Descriptor | None:
    """Return the descriptor of a map's entries; None for a field that is not a map."""
    entry = field.message_type
    return entry if entry is not None and entry.GetOptions().map_entry else None


def json_fields(owner: Descriptor, place: str = "", within: tuple[str, ...] = ()) -> tuple[TypeField, ...]:
    """Return fields for the results of `json_of`. Raises InvalidInput for a message that fields cannot represent."""
    if owner.full_name in within:
        raise InvalidInput(f"{place} is of {owner.full_name}, which contains itself: columns cannot express that")
    if not owner.fields:
        raise InvalidInput(f"{place or owner.full_name} has no fields")
    within = (*within, owner.full_name)
    found = []
    for field in owner.fields:
        where = f"{place}.{field.name}" if place else field.name
        if (entry := _entry(field)) is not None:
            kind: Kind = MapKind(PlainKind.STRING, _kind(entry.fields_by_name["value"], f"{where}{{}}", within))
        elif field.is_repeated:
            kind = ArrayKind(_kind(field, f"{where}[]", within))
        else:
            kind = _kind(field, where, within)
        found.append(TypeField(field.name, kind, field.has_presence and not field.is_required))
    return tuple(found)


def _kind(field: FieldDescriptor, place: str, within: tuple[str, ...]) -> Kind:
    owner = field.message_type
    if owner is None:
        return _KINDS[field.type]
    if owner.full_name == _TIMESTAMP:
        return PlainKind.TIMESTAMP
    if owner.full_name in _TEXTS:
        return PlainKind.STRING
    if owner.full_name in _WRAPPERS:
        return _KINDS[owner.fields_by_name["value"].type]
    if owner.full_name.startswith(_PACKAGE):
        raise InvalidInput(f"{place} is a {owner.full_name}, which has no fixed form")
    return StructKind(json_fields(owner, place, within))
