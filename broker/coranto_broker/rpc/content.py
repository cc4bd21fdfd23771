"""Read messages that contain only content, without protobuf.

Nearly all bytes that a broker receives arrive in such messages. Protobuf copies the content when it parses a message,
and again on each access. A `ContentMessage` refers to the bytes that were received. Any message that is not exactly one
content field is left to protobuf, so that every message means the same as in protobuf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from coranto.effects import Bytes
from coranto.wire import protocol_pb2 as pb

COPIED_BYTES: Final = 4096
"""Content of fewer bytes is copied, which costs less than a reference."""

_LONGEST_VARINT: Final = 4
_APPEND_TAG: Final = pb.AppendRequest.CONTENT_FIELD_NUMBER << 3 | 2
_REPLICATE_TAG: Final = pb.ReplicateRequest.CONTENT_FIELD_NUMBER << 3 | 2
_DELTA_TAG: Final = pb.ReplicateRequest.CONTENT_DELTA_FIELD_NUMBER << 3


class ContentMessage:
    """The content of one message of an append or a replication. `content_delta` is 0 in appends.

    An append request of zero bytes is content of zero bytes.
    """

    __slots__ = ("content", "content_delta")

    def __init__(self, content: Bytes, content_delta: int = 0) -> None:
        self.content = content
        self.content_delta = content_delta


AppendMessage = pb.AppendRequest | ContentMessage
ReplicateMessage = pb.ReplicateRequest | ContentMessage


def append_reader(parse: Callable[[bytes], pb.AppendRequest]) -> Callable[[bytes], AppendMessage]:
    """Return a deserializer of append requests. It calls `parse` for messages with other fields than content."""
    nothing = ContentMessage(b"")

    def read(data: bytes) -> AppendMessage:
        if not data:
            return nothing
        if data[0] == _APPEND_TAG and 2 < (length := len(data)) < COPIED_BYTES:
            first, second = data[1], data[2]
            if first < 0x80:
                if first == length - 2:
                    return ContentMessage(data[2:])
            elif second < 0x80 and (first & 0x7F | second << 7) == length - 3:
                return ContentMessage(data[3:])
        begin, end = _field(data, _APPEND_TAG)
        return ContentMessage(_slice(data, begin, end)) if end == len(data) else parse(data)

    return read


def replicate_reader(parse: Callable[[bytes], pb.ReplicateRequest]) -> Callable[[bytes], ReplicateMessage]:
    """Return a deserializer of replication requests.

    It calls `parse` for messages with other fields than content and its delta, and for messages without content.
    """

    def read(data: bytes) -> ReplicateMessage:
        begin, end = _field(data, _REPLICATE_TAG)
        if begin == end:
            return parse(data)
        if end == len(data):
            return ContentMessage(_slice(data, begin, end))
        if end < len(data) and data[end] == _DELTA_TAG:
            delta, past = _varint(data, end + 1, 9)  # Only negative numbers need ten bytes.
            if past == len(data):
                return ContentMessage(_slice(data, begin, end), delta)
        return parse(data)

    return read


def _slice(data: bytes, begin: int, end: int) -> Bytes:
    return data[begin:end] if end - begin < COPIED_BYTES else memoryview(data)[begin:end]


def _field(data: bytes, tag: int) -> tuple[int, int]:
    """Return the range [begin, end) of the first field's content, or (0, 0) if its tag is not `tag`.

    `end` is beyond the message if the message is truncated.
    """
    if not data or data[0] != tag:
        return 0, 0
    length, begin = _varint(data, 1, _LONGEST_VARINT)
    return (begin, begin + length) if begin else (0, 0)


def _varint(data: bytes, position: int, longest: int) -> tuple[int, int]:
    """Return the number at `position` and the position after it; (0, 0) if there is none of at most `longest` bytes."""
    value = shift = 0
    for byte in data[position : position + longest]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return 0, 0
