"""Fixed framing: binary payloads, each preceded by a magic word and its length.

A frame is the bytes `66 33 93 36`, the payload's length as a little-endian unsigned 32-bit number, and the payload.
If the magic word is missing where a frame should begin, or the length is too large, the reader reports the offset and
continues at the next magic word. One newline at the very end of the content is tolerated.

An append may end inside a frame. The length of this *torn* frame then covers frames of later appends and usually ends
inside one of them. A frame that contains frames is therefore torn in two cases: the last inner frame extends past its
end, and no frame begins at that end; or both end at the same offset, and the outer payload is not a message. Reading
continues at the first inner frame. A torn frame is detected when content of its full length has arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar
from uuid import UUID

from coranto.errors import CorruptMessage, InvalidInput, TornMessage
from coranto.messages.framing import Envelope, IncompleteTail
from coranto.messages.uuids import ZERO_UUID, UuidParts

M = TypeVar("M")

MAGIC: Final = b"\x66\x33\x93\x36"

DEFAULT_PAYLOAD_BYTES: Final = 256 << 20
"""The maximum length of a payload in bytes. A larger length is a corrupt header: a reader must not buffer 4 GiB."""

_HEADER: Final = struct.Struct("<4sI")


def encode_frame(payload: bytes) -> bytes:
    """Return the frame of a payload."""
    return _HEADER.pack(MAGIC, len(payload)) + payload


def frame_end(content: bytes, begin: int) -> int:
    """Return the end of the frame that begins at `begin`; -1 if no whole frame begins there."""
    if begin + _HEADER.size > len(content):
        return -1
    magic, length = _HEADER.unpack_from(content, begin)
    end = begin + _HEADER.size + int(length)
    return end if magic == MAGIC and end <= len(content) else -1


class PayloadCodec(Protocol[M]):
    """Encodes a message and its UUID as a payload, and decodes them; `payloads.py` provides codecs.

    A codec that keeps no UUIDs opts its messages out of exactly-once processing: they are delivered at least once.
    """

    def encode(self, message: M | None, uuid: UUID) -> bytes:
        """Return the payload of `message` with `uuid`. None means a message that holds only the UUID."""
        ...

    def decode(self, payload: bytes) -> M:
        """Return the message of a payload. Raises InvalidInput."""
        ...

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        """Return the parts of the payload's UUID, or None if it has no UUID. Raises InvalidInput."""
        ...


class FixedFrame(Generic[M]):
    """The `Framing` of binary payloads."""

    def __init__(
        self,
        codec: PayloadCodec[M],
        content_type: str = "application/x-protobuf-fixed",
        *,
        max_payload_bytes: int = DEFAULT_PAYLOAD_BYTES,
    ) -> None:
        self._codec = codec
        self.content_type = content_type
        self.max_payload_bytes = max_payload_bytes

    def marshal(self, message: M, uuid: str | UUID) -> bytes:
        return self.frame(self._codec.encode(message, _as_uuid(uuid)))

    def frame(self, payload: bytes) -> bytes:
        """Return the frame of a payload. Raises InvalidInput when the payload is too long."""
        if len(payload) > self.max_payload_bytes:
            raise InvalidInput(f"a payload of {len(payload)} bytes is longer than the {self.max_payload_bytes} allowed")
        return _HEADER.pack(MAGIC, len(payload)) + payload  # `encode_frame` inlined, to save a call for each message.

    def acknowledgement(self, uuid: str | UUID) -> bytes:
        payload = self._codec.encode(None, _as_uuid(uuid))
        # Readers would treat an acknowledgement without a UUID as a message.
        return encode_frame(payload) if self.uuid_of(payload).clock else b""

    def unmarshal(self, content: bytes) -> M:
        return self._codec.decode(content)

    def uuid_of(self, payload: bytes) -> UuidParts:
        """Return the parts of a payload's UUID; all zero for a payload without a UUID. Raises InvalidInput."""
        return self._codec.uuid_parts(payload) or ZERO_UUID

    def decoder(self, journal: str, offset: int) -> FixedFrameDecoder[M]:
        return FixedFrameDecoder(self, journal, offset)


class FixedFrameDecoder(Generic[M]):
    """The `Decoder` of `FixedFrame`."""

    def __init__(self, framing: FixedFrame[M], journal: str, offset: int) -> None:
        self._framing = framing
        self._journal = journal
        self._offset = offset
        self._buffer = bytearray()  # Content from `_offset` on.

    @property
    def offset(self) -> int:
        return self._offset

    def feed(self, content: bytes, offset: int | None = None) -> Iterator[Envelope[M]]:
        expected = self._offset + len(self._buffer)
        if offset is not None and offset != expected:
            yield from self._take_frames()
            if offset < expected:
                raise InvalidInput(f"content of {self._journal} at offset {offset} was fed before, up to {expected}")
            tail = self.finish()
            self._offset, self._buffer = offset, bytearray(content)
            if tail is not None:
                raise CorruptMessage(
                    self._journal, tail.offset, f"the frame's rest is missing: content continues at offset {offset}"
                )
        else:
            self._buffer += content
        yield from self._take_frames()

    def finish(self) -> IncompleteTail | None:
        if not self._buffer or self._buffer == b"\n":
            return None
        return IncompleteTail(self._journal, self._offset, len(self._buffer))

    def _take_frames(self) -> Iterator[Envelope[M]]:
        while len(self._buffer) >= _HEADER.size:
            magic, length = _HEADER.unpack_from(self._buffer)
            if magic != MAGIC or length > self._framing.max_payload_bytes:
                raise self._resynchronise()
            size = _HEADER.size + length
            if len(self._buffer) < size:
                return
            following = self._frame_within(size)
            if following is None:
                return
            if following:
                begin = self._offset
                del self._buffer[:following]
                self._offset += following
                raise TornMessage(self._journal, begin, self._offset)
            payload = bytes(memoryview(self._buffer)[_HEADER.size : size])
            del self._buffer[:size]
            begin = self._offset
            self._offset = end = begin + size
            try:
                producer, clock, flags = self._framing.uuid_of(payload)
            except InvalidInput as error:
                raise CorruptMessage(self._journal, begin, error.message) from error
            yield Envelope(self._journal, begin, end, producer, clock, flags, payload, self._framing)

    def _frame_within(self, size: int) -> int | None:
        """Return the position of the next frame if the first frame, of `size` bytes, is torn; 0 if it is whole.

        Returns None if more content is needed to decide.
        """
        buffer, at = self._buffer, _HEADER.size
        while (first := buffer.find(MAGIC, at, size)) >= 0:
            at = first
            while at < size:  # Follow the frames that begin at `first`.
                if len(buffer) < at + _HEADER.size:
                    return None
                magic, length = _HEADER.unpack_from(buffer, at)
                if magic != MAGIC or length > self._framing.max_payload_bytes:
                    break
                at += _HEADER.size + length
            else:
                if at == size:
                    return 0 if self._is_message(bytes(buffer[_HEADER.size : size])) else first
                if len(buffer) < size + len(MAGIC):
                    return None
                return 0 if buffer.startswith(MAGIC, size) else first
            at = max(at, first + 1)
        return 0

    def _is_message(self, payload: bytes) -> bool:
        try:
            self._framing.uuid_of(payload)
            self._framing.unmarshal(payload)
        except InvalidInput:
            return False
        return True

    def _resynchronise(self) -> CorruptMessage:
        """Drop content up to the next magic word, or up to trailing bytes that may begin a magic word."""
        begin = self._offset
        found = self._buffer.find(MAGIC, 1)
        if found < 0:
            found = len(self._buffer) - (len(MAGIC) - 1)
        del self._buffer[:found]
        self._offset += found
        return CorruptMessage(self._journal, begin, f"no frame begins here; {found} bytes were skipped")


def _as_uuid(value: str | UUID) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)
