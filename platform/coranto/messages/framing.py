"""Framings: the encoding of messages as a journal's bytes.

A framing marshals a message together with its UUID. Its decoders turn journal content back into `Envelope`s: a
message's payload, its offsets in the journal, and the parts of its UUID. Decoders take content in chunks of any size
and do no I/O. They decode a payload only when `Envelope.message` is read, because most readers first need to know
whether the message is committed.

`JsonLines` writes one JSON object per line. `TypedLines` (models.py) converts such lines to pydantic models and similar
types. `FixedFrame` (fixed_frame.py) writes binary payloads after a small header. `CsvRows` (csv_rows.py) writes rows
of CSV.
"""

from __future__ import annotations

import codecs
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar
from uuid import UUID

from coranto.errors import CorruptMessage, InvalidInput, TornMessage
from coranto.messages.json_codec import decode_json, encode_json
from coranto.messages.torn_lines import LinePiece, divide
from coranto.messages.uuids import ZERO_UUID, ProducerId, UuidParts, format_uuid, parse_uuid_text

M = TypeVar("M")

JsonObject: TypeAlias = Mapping[str, Any]
"""A JSON message: a JSON object as `json.loads` returns it."""

DEFAULT_UUID_POINTER: Final = "/_meta/uuid"
DEFAULT_LINE_BYTES: Final = 256 << 20
"""The maximum length of a line in bytes. A longer line is corrupt: readers must not buffer endless content."""
MARK: Final = codecs.BOM_UTF8
"""The byte order mark, which editors put at the beginning of a file."""
SPACE: Final = b" \t\r\n"
"""The whitespace characters of JSON."""


class Envelope(NamedTuple, Generic[M]):
    """One message in a journal, at the bytes [begin, end), framing included."""

    journal: str
    begin: int
    end: int
    producer: ProducerId
    clock: int
    flags: int
    content: bytes
    """The payload, without its framing (for JSON lines: the line without its newline)."""
    framing: Framing[M]

    @property
    def uuid(self) -> str:
        """The message's UUID in its text form; meaningless when `clock` is 0."""
        return format_uuid(self.producer, self.clock, self.flags)

    @property
    def message(self) -> M:
        """The payload, decoded at each access. Raises CorruptMessage."""
        try:
            return self.framing.unmarshal(self.content)
        except InvalidInput as error:
            raise CorruptMessage(self.journal, self.begin, error.message) from error


class IncompleteTail(NamedTuple):
    """An incomplete message at the end of content: its first `length` bytes, which begin at `offset`."""

    journal: str
    offset: int
    length: int


class ContentChunk(Protocol):
    """Contiguous journal content, as the client's readers return it."""

    @property
    def offset(self) -> int: ...

    @property
    def content(self) -> bytes: ...


class Decoder(Protocol[M]):
    """Turns the content of one journal, fed in order, into envelopes."""

    @property
    def offset(self) -> int:
        """The offset of the first byte that is not yet part of a returned message."""
        ...

    def feed(self, content: bytes, offset: int | None = None) -> Iterator[Envelope[M]]:
        """Yield the messages that `content` completes. Exhaust the iterator before the next call.

        `offset` is the offset of `content`, for readers that may skip a gap. By default `content` follows the content
        of the previous call. Raises CorruptMessage after yielding the messages before the corrupt one. The decoder's
        position is then after the corrupt message, and `feed(b"")` continues there.
        """
        ...

    def finish(self) -> IncompleteTail | None:
        """Return the incomplete message at the end of the content fed so far, or None."""
        ...


class Framing(Protocol[M]):
    """The encoding of messages of type M in a journal."""

    @property
    def content_type(self) -> str:
        """The value of the journal's content-type label."""
        ...

    def marshal(self, message: M, uuid: str | UUID) -> bytes:
        """Return the message's bytes in a journal, with `uuid`. Raises InvalidInput when it cannot be encoded."""
        ...

    def acknowledgement(self, uuid: str | UUID) -> bytes:
        """Return the bytes of a message that holds only a UUID; empty if messages cannot hold a UUID."""
        ...

    def unmarshal(self, content: bytes) -> M:
        """Decode a payload. Raises InvalidInput."""
        ...

    def decoder(self, journal: str, offset: int) -> Decoder[M]:
        """Return a decoder for content of `journal` that begins at `offset`."""
        ...


def iter_messages(
    framing: Framing[M],
    journal: str,
    chunks: Iterable[bytes | ContentChunk],
    begin_offset: int,
    on_tail: Callable[[IncompleteTail], None] | None = None,
) -> Iterator[Envelope[M]]:
    """Yield the envelopes of consecutive content from `begin_offset`, where a message must begin.

    An incomplete message at the end of the content is not yielded, but reported to `on_tail`. Raises
    CorruptMessage.
    """
    decoder = framing.decoder(journal, begin_offset)
    for chunk in chunks:
        if isinstance(chunk, bytes):
            yield from decoder.feed(chunk)
        else:
            yield from decoder.feed(chunk.content, chunk.offset)
    tail = decoder.finish()
    if tail is not None and on_tail is not None:
        on_tail(tail)


class JsonLines:
    """The `Framing` of one JSON object per line, with its UUID at a JSON pointer.

    Marshalled messages begin with the UUID, so that readers find it without parsing the line. Readers accept it
    anywhere in the line. A line without a UUID is corrupt if `require_uuid` is set. Otherwise it is delivered at least
    once, as is a line with the zero UUID (see `uuids`). A line is corrupt when it is not JSON, when its UUID is
    malformed, or when it is longer than `max_line_bytes`. A `tolerant` framing treats lines with an unreadable UUID as
    lines without a UUID, and columnar readers mark them. A line that consists of a torn piece and a message is divided
    (torn_lines.py); the torn piece is corrupt.

    As in Spark's JSON reader, a line that is empty or whitespace is not a message, and a byte order mark at the
    beginning of a line is ignored.

    Without a pointer (None) messages have no place for a UUID. All of them are delivered at least once, and there are
    no acknowledgements: readers treat each message as committed, even if it was published in a transaction. No line is
    divided.
    """

    content_type: Final = "application/x-ndjson"
    has_objects = True
    """False if lines may hold any text, including empty text."""

    def __init__(
        self,
        pointer: str | None = DEFAULT_UUID_POINTER,
        *,
        require_uuid: bool = False,
        max_line_bytes: int = DEFAULT_LINE_BYTES,
        tolerant: bool = False,
    ) -> None:
        if pointer is None and require_uuid:
            raise InvalidInput("a UUID is required but has no place; give its JSON pointer, such as /_meta/uuid")
        self.pointer = pointer
        self.require_uuid = require_uuid
        self.max_line_bytes = max_line_bytes
        self.tolerant = tolerant
        self.path = () if pointer is None else _parse_pointer(pointer)
        """The object keys that lead to the UUID; empty without a pointer."""
        self._open = "".join(f"{{{json.dumps(token)}:" for token in self.path) + '"' if self.path else ""
        self._close = '"' + "}" * (len(self.path) - 1) if self.path else ""
        self.uuid_prefix: bytes = self._open.encode()
        """The bytes of a line before its UUID; empty when lines have no UUIDs."""
        self.uuid_field: bytes = self.uuid_prefix[1:]
        """The bytes before a UUID anywhere in a message. A line that contains them twice may be torn."""
        self.head_bytes = len(self._open) - 1 + 36 + len(self._close) + 1 if self.path else 0
        """The length of a marshalled line's first field, which holds the UUID, with the comma after it."""

    def __repr__(self) -> str:
        return f"JsonLines({self.pointer!r}, require_uuid={self.require_uuid})"

    def marshal(self, message: JsonObject, uuid: str | UUID) -> bytes:
        """Return the line of `message` with `uuid` at the pointer. `message` is not changed. Raises InvalidInput."""
        try:
            if not self.path:
                line = encode_json(message)
                if line[:1] != b"{":
                    raise InvalidInput(f"a message must be a JSON object, not {type(message).__name__}; pass a dict")
            elif self.path[0] not in message:
                body = encode_json(message)
                if body[:1] != b"{":
                    raise InvalidInput(f"a message must be a JSON object, not {type(message).__name__}; pass a dict")
                head = f"{self._open}{uuid}{self._close}".encode()
                line = head + b"}" if body == b"{}" else b"%b,%b" % (head, body[1:])
            else:
                line = encode_json(self._place(message, self.path, f"{uuid}"))
            return line + b"\n"
        except InvalidInput:
            raise
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidInput(f"message cannot be written as JSON: {error}") from error

    def acknowledgement(self, uuid: str | UUID) -> bytes:
        return f"{self._open}{uuid}{self._close}}}\n".encode() if self.path else b""

    def unmarshal(self, content: bytes) -> JsonObject:
        try:
            decoded = decode_json(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"not a line of JSON: {error}") from error
        if not isinstance(decoded, dict):
            raise InvalidInput(f"a JSON object was expected, not {type(decoded).__name__}")
        return decoded

    def decoder(self, journal: str, offset: int) -> JsonLinesDecoder[JsonObject]:
        return JsonLinesDecoder(self, self, journal, offset)

    def uuid_of(self, line: bytes) -> UuidParts:
        """Return the parts of a line's UUID; all zero for a line without a UUID. Raises InvalidInput."""
        prefix = self.uuid_prefix
        if not prefix:
            return ZERO_UUID
        if line.startswith(prefix):
            start = len(prefix)
            # If the closing quote follows the 36 characters, no character is escaped.
            if line[start + 36 : start + 37] == b'"':
                return parse_uuid_text(line[start : start + 36])
        value: object = self.unmarshal(line)
        for token in self.path:
            if not isinstance(value, dict):
                raise InvalidInput(f"the parent of {token!r} in {self.pointer} is not an object")
            value = value.get(token)
            if value is None:
                if self.require_uuid:
                    raise InvalidInput(
                        f"there is no UUID at {self.pointer}; publish with a publisher, or read uncommitted"
                    )
                return ZERO_UUID
        if not isinstance(value, str):
            raise InvalidInput(f"the value at {self.pointer} is not a string but {reprlib.repr(value)}")
        return parse_uuid_text(value.encode("utf-8", "replace"))

    def divide(self, line: bytes) -> list[LinePiece]:
        """Return the pieces of a line that is not a single object; empty if it is not divided (torn_lines.py)."""
        return divide(line, self._is_object, self._has_uuid) if self.path else []

    def divide_if_torn(self, line: bytes) -> list[LinePiece]:
        """Return the pieces of a line whose UUID was read; usually empty. Without the prefix, it was fully parsed."""
        may_be_torn = line.startswith(self.uuid_prefix) and line.find(self.uuid_field, 2) > 0
        return self.divide(line) if may_be_torn and not self._is_object(line) else []

    def _is_object(self, text: bytes) -> bool:
        try:
            self.unmarshal(text)
        except InvalidInput:
            return False
        return True

    def _has_uuid(self, text: bytes) -> bool:
        try:
            return self.uuid_of(text).clock > 0
        except InvalidInput:
            return False

    def _place(self, parent: object, path: tuple[str, ...], uuid: str) -> dict[str, object]:
        """Return a copy of `parent` with the UUID at `path`. The keys of the path come first."""
        if not isinstance(parent, Mapping):
            raise InvalidInput(f"the parent of {path[0]!r} in {self.pointer} must be an object, not {parent!r}")
        token, rest = path[0], path[1:]
        child: object = uuid
        if rest:
            below = parent.get(token)
            child = self._place({} if below is None else below, rest, uuid)
        return {token: child, **{key: value for key, value in parent.items() if key != token}}


class JsonLinesDecoder(Generic[M]):
    """The `Decoder` of `JsonLines`, and of framings that convert the same lines to other types."""

    def __init__(self, framing: Framing[M], lines: JsonLines, journal: str, offset: int) -> None:
        self._framing = framing
        self._format = lines
        self._max_bytes = lines.max_line_bytes
        self._journal = journal
        self._offset = offset
        self._partial: list[bytes] = []  # Content of an incomplete line.
        self._partial_bytes = 0
        self._is_skipping = False  # The incomplete line is too long: the rest of the line is skipped.
        self._fed = offset
        self._lines: list[bytes] = []  # Complete lines not yet returned, in reverse order.
        self._pieces: list[tuple[bytes, bool]] = []  # Pieces of the current line, in reverse order; True for torn.

    @property
    def offset(self) -> int:
        return self._offset

    def feed(self, content: bytes, offset: int | None = None) -> Iterator[Envelope[M]]:
        cut_off = None
        if offset is not None and offset != self._fed:
            yield from self._take_lines()
            cut_off = self._jump(offset)
        self._fed += len(content)
        if self._is_skipping:
            content = self._after_skipped(content)
        lines = content.split(b"\n")
        last = lines.pop()
        if lines:
            if self._partial:
                self._partial.append(lines[0])
                lines[0] = b"".join(self._partial)
                self._partial, self._partial_bytes = [], 0
            lines.reverse()
            self._lines = lines + self._lines
        if last:
            self._partial.append(last)
            self._partial_bytes += len(last)
        if cut_off is not None:
            raise CorruptMessage(
                self._journal, cut_off.offset, f"the rest of the line is missing: content continues at offset {offset}"
            )
        yield from self._take_lines()
        if self._partial_bytes > self._max_bytes:
            begin = self._offset
            self._partial, self._partial_bytes, self._is_skipping = [], 0, True
            self._offset = self._fed
            raise CorruptMessage(self._journal, begin, f"a line that has not ended after {self._max_bytes} bytes")

    def finish(self) -> IncompleteTail | None:
        length = self._partial_bytes
        return IncompleteTail(self._journal, self._fed - length, length) if length else None

    def _after_skipped(self, content: bytes) -> bytes:
        """Return the content after the skipped line; empty while that line continues."""
        newline = content.find(b"\n") + 1
        rest = content[newline:] if newline else b""
        self._offset = self._fed - len(rest)
        self._is_skipping = not newline
        return rest

    def _take_lines(self) -> Iterator[Envelope[M]]:
        pending, journal, framing, lines = self._lines, self._journal, self._framing, self._format
        field = lines.uuid_field
        while self._pieces or pending:
            if self._pieces:
                yield self._take_piece()
                continue
            line = pending.pop()
            begin = self._offset
            if line.startswith(MARK):
                line = line.removeprefix(MARK)
                self._offset += len(MARK)
            if line[:1] <= b" " and not line.strip(SPACE) and lines.has_objects:
                self._offset += len(line) + 1
                continue
            try:
                producer, clock, flags = lines.uuid_of(line)
            except InvalidInput as error:
                if not self._divided(line, lines.divide(line)):
                    self._offset += len(line) + 1
                    yield self._corrupt(CorruptMessage(journal, begin, error.message), line)
                continue
            if field and line.find(field, 2) > 0 and self._divided(line, lines.divide_if_torn(line)):
                continue
            self._offset = end = self._offset + len(line) + 1
            yield Envelope(journal, begin, end, producer, clock, flags, line, framing)

    def _divided(self, line: bytes, pieces: list[LinePiece]) -> bool:
        """Store the pieces of a line. Return False if there are none."""
        self._pieces = [(line[each.begin : each.end], each.is_torn) for each in reversed(pieces)]
        return bool(pieces)

    def _take_piece(self) -> Envelope[M]:
        piece, is_torn = self._pieces.pop()
        begin = self._offset
        self._offset = end = begin + len(piece) + (not self._pieces)  # A newline follows the last piece.
        if is_torn:
            return self._corrupt(TornMessage(self._journal, begin, end), piece)
        try:
            producer, clock, flags = self._format.uuid_of(piece)
        except InvalidInput as error:
            return self._corrupt(CorruptMessage(self._journal, begin, error.message), piece)
        return Envelope(self._journal, begin, end, producer, clock, flags, piece, self._framing)

    def _corrupt(self, error: CorruptMessage, content: bytes) -> Envelope[M]:
        """Return an envelope without a UUID for unreadable content. Raises the error unless the framing is tolerant."""
        if not self._format.tolerant:
            raise error
        return Envelope(self._journal, error.offset, self._offset, *ZERO_UUID, content, self._framing)

    def _jump(self, offset: int) -> IncompleteTail | None:
        """Continue at `offset`. Return the line that is cut off by the jump, if any."""
        if offset < self._fed:
            raise InvalidInput(f"content of {self._journal} at offset {offset} was fed before, up to {self._fed}")
        tail = self.finish()
        self._partial, self._partial_bytes, self._is_skipping = [], 0, False
        self._offset = self._fed = offset
        return tail


def _parse_pointer(pointer: str) -> tuple[str, ...]:
    """Return the object keys of a JSON pointer (RFC 6901)."""
    if not pointer.startswith("/") or pointer == "/":
        raise InvalidInput(f"{pointer!r} is not a JSON pointer to a key, like /_meta/uuid")
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in pointer[1:].split("/"))
