"""Messages on the wire and in etcd are only extended: each field keeps its name, number and type permanently.

`wire_fields.txt` has a line for each field, enumeration value and method that ever existed. Brokers, clients and stored
specs of other versions rely on them, so the code has every line. New ones are added to the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from coranto.wire import append_stream_pb2, consumer_pb2, frames_pb2, heads_pb2, protocol_pb2, recoverylog_pb2

FILES: list[FileDescriptor] = [
    each.DESCRIPTOR for each in (protocol_pb2, heads_pb2, frames_pb2, append_stream_pb2, consumer_pb2, recoverylog_pb2)
]
KEPT = Path(__file__).with_name("wire_fields.txt")
TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def fields(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        kind = TYPES[field.type]
        if field.message_type is not None:
            kind = field.message_type.full_name
        if field.enum_type is not None:
            kind = field.enum_type.full_name
        repeated = "repeated " if field.is_repeated else ""
        yield f"{message.full_name}.{field.name} = {field.number}: {repeated}{kind}"
    for enum in message.enum_types:
        yield from values(enum)
    for nested in message.nested_types:
        yield from fields(nested)


def values(enum: EnumDescriptor) -> Iterator[str]:
    yield from (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)


def present() -> Iterator[str]:
    for file in FILES:
        for message in file.message_types_by_name.values():
            yield from fields(message)
        for enum in file.enum_types_by_name.values():
            yield from values(enum)
        for service in file.services_by_name.values():
            for method in service.methods:
                types = f"{method.input_type.full_name}, {method.output_type.full_name}"
                yield f"{service.full_name}/{method.name}: {types}"


def test_no_field_of_the_wire_was_ever_changed_or_removed() -> None:
    kept = KEPT.read_text().splitlines()
    now = list(present())
    assert len(kept) > 300
    assert not [line for line in kept if line not in set(now)], "other versions rely on these"
    assert not [line for line in now if line not in set(kept)], "these are new: add them to wire_fields.txt"
