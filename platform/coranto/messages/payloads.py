"""Codecs for messages in fixed frames: protobuf messages, and user classes that hold a UUID.

`FixedFrame` (fixed_frame.py) leaves the payload to a `PayloadCodec`. This module has the codecs for protobuf and for
any class that implements `Message`; `arrow_payload.py` has the codec for Arrow record batches. `ProtobufJson` writes
protobuf messages as JSON lines instead (see `models.TypedLines`).
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import UUID

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.message import Message as ProtobufMessage

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines, JsonObject
from coranto.messages.uuids import ZERO_UUID, UuidParts, parse_uuid, parse_uuid_bytes, parse_uuid_text


class Message(Protocol):
    """The interface of user-defined message classes, which hold a UUID and serialise themselves.

    A class that cannot hold a UUID opts out: `set_uuid` does nothing, and `get_uuid` returns None. Its messages are
    then delivered at least once.
    """

    def set_uuid(self, uuid: UUID) -> None:
        """Set the message's UUID; an existing one is replaced."""
        ...

    def get_uuid(self) -> UUID | None:
        """Return the message's UUID, or None."""
        ...

    def to_bytes(self) -> bytes:
        """Serialise the message with its UUID. Raises ValueError when that is not possible."""
        ...

    @classmethod
    def from_bytes(cls, payload: bytes) -> Self:
        """Return the message that `to_bytes` serialised. Raises ValueError for any other bytes."""
        ...

    @classmethod
    def acknowledgement(cls) -> Self:
        """Return an empty message that can hold a UUID."""
        ...


M = TypeVar("M", bound=Message)
P = TypeVar("P", bound=ProtobufMessage)


class OwnPayload(Generic[M]):
    """The `PayloadCodec` of a class that implements `Message`."""

    def __init__(self, kind: type[M]) -> None:
        self._kind = kind

    def encode(self, message: M | None, uuid: UUID) -> bytes:
        """Encode a message (see `PayloadCodec.encode`). This sets the UUID of the given message."""
        written = self._kind.acknowledgement() if message is None else message
        written.set_uuid(uuid)
        try:
            return written.to_bytes()
        except ValueError as error:
            raise InvalidInput(f"message cannot be written: {error}") from error

    def decode(self, payload: bytes) -> M:
        try:
            return self._kind.from_bytes(payload)
        except ValueError as error:
            raise InvalidInput(f"not a {self._kind.__name__}: {error}") from error

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        uuid = self.decode(payload).get_uuid()
        return None if uuid is None else parse_uuid(uuid)


class ProtobufPayload(Generic[P]):
    """The `PayloadCodec` of a protobuf message that holds its UUID in a field: sixteen `bytes`, or a `string`.

    `uuid_field` may be a path into nested messages ("meta.uuid"). With None the type has no place for a UUID, and its
    messages are delivered at least once. Publishing does not change the caller's message.
    """

    def __init__(self, kind: type[P], uuid_field: str | None = "uuid") -> None:
        self._kind = kind
        self._path = () if uuid_field is None else tuple(uuid_field.split("."))
        self._is_text = bool(self._path) and _is_text(kind, self._path)

    def encode(self, message: P | None, uuid: UUID) -> bytes:
        written = self._kind()
        if message is not None:
            try:
                written.CopyFrom(message)
            except TypeError as error:
                raise InvalidInput(f"message cannot be written: {error}") from error
        if self._path:
            parent: Any = written
            for name in self._path[:-1]:
                parent = getattr(parent, name)
            setattr(parent, self._path[-1], str(uuid) if self._is_text else uuid.bytes)
        try:
            return written.SerializeToString()
        except EncodeError as error:
            raise InvalidInput(f"message cannot be written: {error}") from error

    def decode(self, payload: bytes) -> P:
        try:
            return self._kind.FromString(payload)
        except DecodeError as error:
            raise InvalidInput(f"not a {self._kind.DESCRIPTOR.full_name}: {error}") from error

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        if not self._path:
            return None
        value: Any = self.decode(payload)
        for name in self._path:
            value = getattr(value, name)
        if not value:
            return ZERO_UUID
        return parse_uuid_text(value.encode()) if self._is_text else parse_uuid_bytes(value)


class ProtobufJson(Generic[P]):
    """The `JsonType` (models.py) of a protobuf message: protobuf's own JSON, with field names as declared.

    Reading skips keys that the message type does not know, such as the keys of the UUID.
    """

    def __init__(self, kind: type[P]) -> None:
        self._kind = kind

    def to_json(self, message: P) -> JsonObject:
        return json_format.MessageToDict(message, preserving_proto_field_name=True)

    def from_json(self, line: bytes, lines: JsonLines) -> P:
        message = self._kind()
        try:
            json_format.ParseDict(dict(lines.unmarshal(line)), message, ignore_unknown_fields=True)
        except json_format.ParseError as error:
            raise InvalidInput(f"not a {self._kind.DESCRIPTOR.full_name}: {error}") from error
        return message


def _is_text(kind: type[ProtobufMessage], path: tuple[str, ...]) -> bool:
    """Return True if the field at a path is a string, False if it is bytes. Raises InvalidInput for any other."""
    where = ".".join(path)
    descriptor = kind.DESCRIPTOR
    for name in path[:-1]:
        field = descriptor.fields_by_name.get(name)
        if field is None or field.message_type is None or field.is_repeated:
            raise InvalidInput(
                f"{kind.DESCRIPTOR.full_name} has no message in its field {name!r}, on the way to {where}"
            )
        descriptor = field.message_type
    field = descriptor.fields_by_name.get(path[-1])
    if (
        field is None
        or field.is_repeated
        or field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    ):
        raise InvalidInput(
            f"{kind.DESCRIPTOR.full_name} has no field {where} of bytes or a string to hold a UUID: name another one, "
            "or None for messages without a UUID"
        )
    return field.type == FieldDescriptor.TYPE_STRING
