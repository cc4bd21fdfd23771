"""Fields of protobuf messages as fields of message types, and the compatibility of messages on the wire.

=====================================  ===============================================================================
a field                                is
=====================================  ===============================================================================
int32, sint32, sfixed32                INT, BIGINT
int64, uint32 and the like; uint64     BIGINT; a uint64 of 2**63 or more does not fit
float; double                          FLOAT, DOUBLE; DOUBLE
bool, string, bytes                    BOOLEAN, STRING, BINARY
enum                                   STRING (the name, or the number of a value without one), INT
google.protobuf.Timestamp              TIMESTAMP
a message; repeated; map               STRUCT of some of its fields; ARRAY; MAP
=====================================  ===============================================================================

The first type is the default, which `fields_of` returns.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from coranto.errors import InvalidInput
from coranto.messages.payloads import ProtobufPayload
from coranto.types.kinds import ArrayKind, Kind, MapKind, PlainKind, StructKind, TypeField, format_kind

_F: Final = FieldDescriptor
_INTS: Final = (PlainKind.INT, PlainKind.BIGINT)
SCALARS: Final[dict[int, tuple[PlainKind, ...]]] = {
    **dict.fromkeys((_F.TYPE_INT32, _F.TYPE_SINT32, _F.TYPE_SFIXED32), _INTS),
    **dict.fromkeys((_F.TYPE_INT64, _F.TYPE_SINT64, _F.TYPE_SFIXED64), (PlainKind.BIGINT,)),
    **dict.fromkeys((_F.TYPE_UINT32, _F.TYPE_FIXED32, _F.TYPE_UINT64, _F.TYPE_FIXED64), (PlainKind.BIGINT,)),
    _F.TYPE_FLOAT: (PlainKind.FLOAT, PlainKind.DOUBLE),
    _F.TYPE_DOUBLE: (PlainKind.DOUBLE,),
    _F.TYPE_BOOL: (PlainKind.BOOLEAN,),
    _F.TYPE_STRING: (PlainKind.STRING,),
    _F.TYPE_BYTES: (PlainKind.BINARY,),
    _F.TYPE_ENUM: (PlainKind.STRING, PlainKind.INT),
}
"""The types of fields that are neither messages, repeated nor maps."""
TIMESTAMP: Final = "google.protobuf.Timestamp"
_ALSO_READS: Final = {
    _F.TYPE_INT32: (_F.TYPE_ENUM,),
    _F.TYPE_INT64: (_F.TYPE_INT32, _F.TYPE_UINT32, _F.TYPE_ENUM),
    _F.TYPE_UINT64: (_F.TYPE_UINT32,),
    _F.TYPE_SINT64: (_F.TYPE_SINT32,),
}
"""For types of a reader's field, the other types whose encoded values it reads correctly."""
MAX_DERIVED: Final = 10_000
"""The maximum number of fields of a message, including nested messages, if a definition does not name them."""


@functools.lru_cache(maxsize=64)
def message_class(descriptors: bytes, message: str) -> Any:
    """Return the class of a message in descriptors. Raises InvalidInput if there is no such message."""
    pool = descriptor_pool.DescriptorPool()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
        known = message_factory.GetMessages(files, pool=pool)
    except (DecodeError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInput(
            f"not a set of file descriptors: {error}; write it by protoc --include_imports --descriptor_set_out",
            field="descriptorSet",
        ) from error
    try:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(message))
    except KeyError as error:
        raise InvalidInput(
            f"there is no {message} among the descriptors; there are {', '.join(sorted(known))}, and those within them",
            field="messageType",
        ) from error


def needed_descriptors(descriptors: bytes, message: str) -> bytes:
    """Return the files of descriptors that a message needs, without comments. Equal descriptors have equal bytes.

    Raises InvalidInput.
    """
    wanted = message_class(descriptors, message).DESCRIPTOR.file.name
    files = {each.name: each for each in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file}
    ordered: dict[str, descriptor_pb2.FileDescriptorProto] = {}
    waiting = [wanted]
    while waiting:
        name = waiting[-1]
        needed = [each for each in files[name].dependency if each in files and each not in ordered]
        if needed:
            waiting += reversed(needed)
            continue
        waiting.pop()
        files[name].ClearField("source_code_info")
        ordered.setdefault(name, files[name])
    return descriptor_pb2.FileDescriptorSet(file=ordered.values()).SerializeToString(deterministic=True)


def fields_of(kind: Any, uuid_field: str | None) -> tuple[TypeField, ...]:
    """Return the fields of a message class without the UUID field.

    Raises InvalidInput for a message that contains itself, and for a message with too many fields: a few messages that
    each contain the next one several times can have more fields than fit into memory.
    """
    fields = _derived(kind.DESCRIPTOR, (), itertools.count(1))
    return tuple(field for field in fields if field.name != uuid_field)


def _derived(owner: Descriptor, within: tuple[str, ...], count: Iterator[int]) -> tuple[TypeField, ...]:
    if owner.full_name in within:
        raise InvalidInput(
            f"{owner.full_name} contains itself, which columns cannot express: name the fields", field="fields"
        )
    if not owner.fields:
        raise InvalidInput(f"{owner.full_name} has no fields: name the fields that you want", field="fields")
    return tuple(
        TypeField(each.name, _derived_kind(each, (*within, owner.full_name), count), not each.is_required)
        for each in owner.fields
    )


def _derived_kind(field: FieldDescriptor, within: tuple[str, ...], count: Iterator[int]) -> Kind:
    if next(count) > MAX_DERIVED:
        raise InvalidInput(
            f"{within[0]} has more than {MAX_DERIVED} fields, including messages within it: name the fields "
            "that you want",
            field="fields",
        )
    if (entry := map_entry(field)) is not None:
        return MapKind(_derived_single(entry[0], within, count), _derived_single(entry[1], within, count))
    single = _derived_single(field, within, count)
    return ArrayKind(single) if field.is_repeated else single


def _derived_single(field: FieldDescriptor, within: tuple[str, ...], count: Iterator[int]) -> Kind:
    if field.message_type is None:
        return SCALARS[field.type][0]
    if field.message_type.full_name == TIMESTAMP:
        return PlainKind.TIMESTAMP
    return StructKind(_derived(field.message_type, within, count))


def map_entry(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor] | None:
    """Return the fields of the keys and values of a map, or None for a field that is not a map."""
    entry = field.message_type
    if entry is None or not entry.GetOptions().map_entry:
        return None
    return entry.fields_by_name["key"], entry.fields_by_name["value"]


def require_holds(kind: Any, fields: Sequence[TypeField], uuid_field: str | None) -> None:
    """Raise InvalidInput for fields that a message class does not have, and for a field that cannot hold a UUID."""
    ProtobufPayload(kind, uuid_field)
    _require_fields(kind.DESCRIPTOR, fields)


def _require_fields(owner: Descriptor, fields: Sequence[TypeField]) -> None:
    for field in fields:
        found = owner.fields_by_name.get(field.name)
        if found is None:
            names = ", ".join(each.name for each in owner.fields)
            raise InvalidInput(f"{owner.full_name} has no field {field.name!r}; it has {names}")
        _require_kind(found, field.kind)


def _require_kind(field: FieldDescriptor, kind: Kind) -> None:
    if (entry := map_entry(field)) is not None:
        if not isinstance(kind, MapKind):
            raise _wrong(field, kind, "a map")
        _require_single(entry[0], kind.key)
        _require_single(entry[1], kind.value)
    elif field.is_repeated:
        if not isinstance(kind, ArrayKind):
            raise _wrong(field, kind, "repeated")
        _require_single(field, kind.element)
    else:
        _require_single(field, kind)


def _require_single(field: FieldDescriptor, kind: Kind) -> None:
    if field.message_type is None:
        fitting = SCALARS.get(field.type, ())
        if kind not in fitting:
            raise _wrong(field, kind, " or ".join(each.value for each in fitting) or "of no such type")
    elif isinstance(kind, StructKind):
        _require_fields(field.message_type, kind.fields)
    elif field.message_type.full_name != TIMESTAMP or kind is not PlainKind.TIMESTAMP:
        raise _wrong(field, kind, f"a message {field.message_type.full_name}")


def _wrong(field: FieldDescriptor, kind: Kind, actual: str) -> InvalidInput:
    return InvalidInput(f"the field {field.full_name} is {actual}, and no {format_kind(kind)}")


def wire_changes(reader: Any, written: Any) -> Iterator[tuple[str, str]]:
    """Yield (place, problem) for each field of a reader's class that would misread messages of the class `written`.

    Without problems, a number is the same field in both classes: it has the same name and type, and is repeated in both
    or in neither. Fields of a reader's `oneof` exclude each other in the messages, too. A number of an enum is the same
    value.
    """
    waiting = [(reader.DESCRIPTOR, written.DESCRIPTOR, "")]
    seen: set[tuple[str, str]] = set()
    while waiting:
        mine, theirs, place = waiting.pop()
        if (pair := (mine.full_name, theirs.full_name)) in seen:
            continue
        seen.add(pair)
        yield from _lost_in_oneofs(mine, theirs, place)
        for field in mine.fields:
            where = f"{place}.{field.name}" if place else field.name
            same = theirs.fields_by_number.get(field.number)
            yield from _misread(field, same, theirs, where)
            if same is not None and field.message_type is not None and same.message_type is not None:
                waiting.append((field.message_type, same.message_type, where))


def _misread(
    field: FieldDescriptor, same: FieldDescriptor | None, written: Descriptor, place: str
) -> Iterator[tuple[str, str]]:
    named = written.fields_by_name.get(field.name)
    if named is not None and named.number != field.number:
        yield place, f"has the number {field.number}, and {named.number} in the messages"
    if field.is_required and (same is None or not same.is_required):
        yield place, "is required, and messages may lack it"
    if same is None:
        return
    if named is None and same.name != field.name:
        yield place, f"has the number {field.number}, which is {same.name} in the messages"
    if field.is_repeated != same.is_repeated:
        yield place, f"is repeated on one side only (number {field.number})"
    elif (map_entry(field) is None) != (map_entry(same) is None):
        yield place, f"is a map on one side only (number {field.number})"
    elif field.enum_type is not None and same.enum_type is not None:
        yield from ((place, problem) for problem in _misread_values(field.enum_type, same.enum_type))
    elif field.type != same.type and not _reads(field, same.type):
        yield place, f"has the type {_type_name(field)}, and {_type_name(same)} in the messages"


def _reads(field: FieldDescriptor, written: int) -> bool:
    """Return True if a reader's field correctly reads the encoded values of another type."""
    if field.enum_type is not None and not field.enum_type.is_closed:
        return written == _F.TYPE_INT32
    return written in _ALSO_READS.get(field.type, ())


def _lost_in_oneofs(reader: Descriptor, written: Descriptor, place: str) -> Iterator[tuple[str, str]]:
    """Yield the reader's oneofs with fields that messages may set together. The reader keeps only the last of these."""
    for oneof in reader.oneofs:
        known = [same for each in oneof.fields if (same := written.fields_by_number.get(each.number)) is not None]
        groups = [each.containing_oneof.full_name if each.containing_oneof else each.full_name for each in known]
        if len({*groups}) > 1:
            names = ", ".join(each.name for each in known)
            yield (
                f"{place}.{oneof.name}" if place else oneof.name,
                f"is a oneof, and messages may have several of its fields together ({names})",
            )


def _misread_values(reader: EnumDescriptor, written: EnumDescriptor) -> Iterator[str]:
    """Yield the problems of a reader's enum with numbers of another enum. A number may have several names."""
    mine, theirs = _names_of(reader), _names_of(written)
    for name, value in reader.values_by_name.items():
        other = written.values_by_name.get(name)
        if other is not None and other.number != value.number:
            yield f"has the value {name} with the number {value.number}, and {other.number} in the messages"
    for number, names in theirs.items():
        if number in mine and not set(mine[number]) & set(names):
            yield f"has the value {mine[number][0]} with the number {number}, which is {names[0]} in the messages"
        elif number not in mine and reader.is_closed:
            yield f"lacks the value {names[0]} of the messages, and a closed enum reads it as not set"


def _names_of(enum: EnumDescriptor) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for value in enum.values:
        found.setdefault(value.number, []).append(value.name)
    return found


def _type_name(field: FieldDescriptor) -> str:
    name = descriptor_pb2.FieldDescriptorProto.Type.Name(descriptor_pb2.FieldDescriptorProto.Type.ValueType(field.type))
    return name.removeprefix("TYPE_").lower()
