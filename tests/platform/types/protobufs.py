"""Descriptors of protobuf messages for tests."""

from __future__ import annotations

from google.protobuf import descriptor_pb2, timestamp_pb2

F = descriptor_pb2.FieldDescriptorProto


def shop(*fields: tuple[object, ...], syntax: str = "proto3", extra: bool = False) -> bytes:
    """Return descriptors of `shop.Order`: fields by number, name, type, and optional label or type name."""
    found = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(found.file.add())
    file = found.file.add(name="shop.proto", package="shop", syntax=syntax, dependency=[timestamp_pb2.DESCRIPTOR.name])
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="PLAIN", number=0)
    line = file.message_type.add(name="Line")
    line.field.add(name="item", number=1, type=F.TYPE_STRING, label=F.LABEL_OPTIONAL)
    line.field.add(name="count", number=2, type=F.TYPE_INT32, label=F.LABEL_OPTIONAL)
    order = file.message_type.add(name="Order")
    order.field.add(name="uuid", number=1, type=F.TYPE_BYTES, label=F.LABEL_OPTIONAL)
    for number, name, kind_number, *more in fields:
        label = next((each for each in more if isinstance(each, int)), F.LABEL_OPTIONAL)
        type_name = next((each for each in more if isinstance(each, str)), None)
        order.field.add(name=name, number=number, type=kind_number, label=label, type_name=type_name)
    if extra:
        other = found.file.add(name="other.proto", package="other", syntax="proto3")
        other.message_type.add(name="Unused")
        file.source_code_info.location.add(leading_comments="a comment")
    return found.SerializeToString()
