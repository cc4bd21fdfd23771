"""The encoding of events in a segment's journal.

An event is a message of one of the framings of `coranto.messages`, so consumers, Spark and other Gazette clients read
streams as they read any journal. A plain event is OUTSIDE_TXN. A transaction on one routing key consists of its events
as CONTINUE_TXN, followed by a *transaction end*: an ACK_TXN message that also names the writer and the transaction's
sequence. A writer that retries the transaction uses this to find its offsets. All these messages are one append.

A message's size must be known before its UUID is. So an event is encoded once with a blank UUID (`encode`) and stamped
with its UUID just before it is sent (`stamp`). The length does not depend on the UUID or the sequence.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from uuid import UUID

from coranto.errors import InvalidInput
from coranto.labels import JSON_LINES
from coranto.messages.fixed_frame import DEFAULT_PAYLOAD_BYTES, FixedFrame
from coranto.messages.framing import Envelope, Framing, JsonLines, JsonObject
from coranto.messages.uuids import (
    CLOCK_TICK,
    Flags,
    ProducerId,
    UuidParts,
    build_uuid,
    parse_uuid_bytes,
    uuid_runs,
)

E = TypeVar("E")

MAX_SEQUENCE: Final = (1 << 63) - 1
MAX_WRITER_ID_BYTES: Final = 256

_BLANK_TEXT: Final = str(UUID(int=0))
_BLANK_BYTES: Final = bytes(16)


class TransactionEnd(NamedTuple):
    """The writer and the sequence in a transaction end."""

    writer: str
    sequence: int


class EventFormat(Framing[E], Protocol[E]):
    """A framing whose messages can be stamped, and that has transaction ends."""

    def encode(self, event: E) -> bytes:
        """Return the event's bytes with a blank UUID. Raises InvalidInput for an event that cannot be encoded."""
        ...

    def stamp(self, encoded: bytes, uuid: UUID) -> bytes:
        """Return the bytes from `encode` with this UUID in them. The length stays the same."""
        ...

    def transaction_end(self, uuid: UUID, writer: str, sequence: int) -> bytes:
        """Return an acknowledgement that names the writer and the sequence. Its length depends on the writer only."""
        ...

    def end_of(self, envelope: Envelope[E]) -> TransactionEnd | None:
        """Return the transaction end in a message; None for other messages, including plain acknowledgements."""
        ...


def validate_writer_id(writer: str) -> str:
    """Return `writer` if it is a valid writer id: 1 to 256 bytes of UTF-8. Raises InvalidInput."""
    try:
        size = len(writer.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{writer!r} is not valid Unicode text", field="writer_id") from error
    if not 1 <= size <= MAX_WRITER_ID_BYTES:
        raise InvalidInput(f"a writer id has 1 to {MAX_WRITER_ID_BYTES} bytes (UTF-8), not {size}", field="writer_id")
    return writer


class JsonEvents(JsonLines):
    """Events that are JSON objects, one per line, with their UUIDs at `/_meta/uuid`.

    A transaction end is `{"_meta":{"uuid":…,"writer":…,"sequence":…}}`. Its sequence has 16 hexadecimal digits.
    """

    def __init__(self) -> None:
        super().__init__("/_meta/uuid")

    def __repr__(self) -> str:
        return "JsonEvents()"

    def encode(self, event: JsonObject) -> bytes:
        return self.marshal(event, _BLANK_TEXT)

    def stamp(self, encoded: bytes, uuid: UUID) -> bytes:
        # Lines from `marshal` begin with the UUID.
        at = len(self.uuid_prefix)
        return b"%b%b%b" % (encoded[:at], str(uuid).encode(), encoded[at + len(_BLANK_TEXT) :])

    def transaction_end(self, uuid: UUID, writer: str, sequence: int) -> bytes:
        meta = {"writer": writer, "sequence": f"{sequence:016x}"}
        return self.marshal({"_meta": meta}, uuid)

    def end_of(self, envelope: Envelope[JsonObject]) -> TransactionEnd | None:
        if envelope.flags != Flags.ACK_TXN:
            return None
        try:
            meta = json.loads(envelope.content)["_meta"]
            return TransactionEnd(_text(meta["writer"]), int(_text(meta["sequence"]), 16))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None  # An acknowledgement by another kind of producer.


def stamped(
    format: EventFormat[Any], events: Sequence[bytes], producer: ProducerId, first_clock: int, flags: int
) -> bytes:
    """Stamp events from `encode` with consecutive clocks, and join them."""
    if type(format) is JsonEvents:
        prefix, pieces = format.uuid_prefix, list[bytes]()
        behind = len(prefix) + len(_BLANK_TEXT)
        tails = iter([each[behind:] for each in events])
        for digits, rest in uuid_runs(producer, first_clock, len(events), flags):
            run = [prefix, b"", rest, b""] * len(digits)
            run[1::4], run[3::4] = digits, islice(tails, len(digits))
            pieces += run
        return b"".join(pieces)
    return b"".join(
        format.stamp(event, build_uuid(producer, first_clock + number * CLOCK_TICK, flags))
        for number, event in enumerate(events)
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


_END: Final = struct.Struct("<Q")
_UUID_BYTES: Final = 16


class _BytesCodec:
    """The codec of payloads: 16 bytes of UUID, then the event, or a transaction end's sequence and writer."""

    def encode(self, message: bytes | None, uuid: UUID) -> bytes:
        return uuid.bytes + (message or b"")

    def decode(self, payload: bytes) -> bytes:
        self.uuid_parts(payload)
        return payload[_UUID_BYTES:]

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        if len(payload) < _UUID_BYTES:
            raise InvalidInput(f"a payload of {len(payload)} bytes is too short to hold a UUID")
        return parse_uuid_bytes(payload[:_UUID_BYTES])


class BytesEvents(FixedFrame[bytes]):
    """Events that are bytes, in fixed frames: each payload is the UUID's 16 bytes, then the event.

    In a transaction end, the UUID is followed by the sequence (8 bytes, little-endian) and the writer id in UTF-8.
    """

    def __init__(self, *, max_payload_bytes: int = DEFAULT_PAYLOAD_BYTES) -> None:
        super().__init__(_BytesCodec(), max_payload_bytes=max_payload_bytes)

    def __repr__(self) -> str:
        return "BytesEvents()"

    def encode(self, event: bytes) -> bytes:
        if not isinstance(event, bytes):
            raise InvalidInput(f"an event must be bytes, not {type(event).__name__}")
        return self.frame(_BLANK_BYTES + event)

    def stamp(self, encoded: bytes, uuid: UUID) -> bytes:
        return b"%b%b%b" % (encoded[:8], uuid.bytes, encoded[8 + _UUID_BYTES :])

    def transaction_end(self, uuid: UUID, writer: str, sequence: int) -> bytes:
        return self.marshal(_END.pack(sequence) + writer.encode(), uuid)

    def end_of(self, envelope: Envelope[bytes]) -> TransactionEnd | None:
        if envelope.flags != Flags.ACK_TXN or len(envelope.content) <= _UUID_BYTES + _END.size:
            return None
        (sequence,) = _END.unpack_from(envelope.content, _UUID_BYTES)
        try:
            return TransactionEnd(envelope.content[_UUID_BYTES + _END.size :].decode(), sequence)
        except UnicodeDecodeError:
            return None


def format_of(content_type: str) -> JsonEvents | BytesEvents:
    """Return the built-in event format for a content type of journals. Raises InvalidInput if there is none."""
    if content_type in ("", JSON_LINES):
        return JsonEvents()
    if content_type == BytesEvents().content_type:
        return BytesEvents()
    raise InvalidInput(f"{content_type} is not the content type of a built-in event format; pass a custom format")
