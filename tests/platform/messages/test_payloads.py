"""Payloads that are protobuf messages or custom classes."""

from __future__ import annotations

import pytest
from google.protobuf import struct_pb2

from coranto.errors import InvalidInput
from coranto.messages.payloads import OwnPayload, ProtobufPayload
from coranto.messages.uuids import ProducerId, UuidParts, parse_uuid
from coranto.wire import consumer_pb2
from coranto.wire import protocol_pb2 as pb
from tests.platform.messages.typed import UUID_1, Opaque


def test_the_uuid_of_a_protobuf_message_may_be_nested_bytes() -> None:
    codec = ProtobufPayload(consumer_pb2.Checkpoint.Source.ProducerEntry, "id")
    payload = codec.encode(None, UUID_1)
    assert codec.decode(payload).id == UUID_1.bytes
    assert codec.uuid_parts(payload) == parse_uuid(UUID_1)
    deeper = ProtobufPayload(struct_pb2.Value, "string_value")
    assert deeper.uuid_parts(deeper.encode(None, UUID_1)) == parse_uuid(UUID_1)


@pytest.mark.parametrize("path", ["missing", "header", "header.missing", "journal.name", "offset"])
def test_a_field_that_cannot_hold_a_uuid_is_refused(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"protocol.AppendRequest has no "):
        ProtobufPayload(pb.AppendRequest, path)


def test_a_nested_field_holds_the_uuid() -> None:
    codec = ProtobufPayload(pb.ReplicateRequest, "header.process_id.suffix")
    request = pb.ReplicateRequest(content=b"abc")
    payload = codec.encode(request, UUID_1)
    assert not request.HasField("header")
    assert codec.decode(payload).header.process_id.suffix == str(UUID_1)
    assert codec.uuid_parts(payload) == parse_uuid(UUID_1)
    assert codec.uuid_parts(request.SerializeToString()) == UuidParts(ProducerId(bytes(6)), 0, 0)


def test_custom_classes_store_the_uuid_themselves() -> None:
    codec = OwnPayload(Opaque)
    message = Opaque("text")
    payload = codec.encode(message, UUID_1)
    assert message.uuid == UUID_1
    assert codec.decode(payload).get_uuid() == UUID_1
    with pytest.raises(InvalidInput, match="not a Opaque: too short"):
        codec.decode(b"")
