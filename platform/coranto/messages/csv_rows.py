"""CSV framing: one row (RFC 4180) per message, its UUID in one of the columns.

Rows are UTF-8 and end with a newline. Fields that hold a comma, a quote or a line end are quoted. Every row of a
journal has the same columns. A `RowType` converts the columns other than the UUID: `TextRows` keeps them as texts,
`NamedRows` converts them to dicts, and `coranto.messages.models.ModelRows` to pydantic models and dataclasses.

As in Spark's CSV reader, a line that is empty or whitespace is not a row, and a byte order mark at the beginning of a
row is ignored, because a journal may contain appended files.

A malformed row is corrupt, and reading continues after the next newline. An append that ended without a newline leaves
a row that the next append continues. If UUIDs are in the first column, reading continues at the next whole row with a
UUID in that line, and only the part before that row is corrupt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar
from uuid import UUID

from coranto.errors import CorruptMessage, InvalidInput, TornMessage
from coranto.messages.framing import MARK, Envelope, IncompleteTail
from coranto.messages.torn_lines import MAX_DIVIDED_BYTES
from coranto.messages.uuids import ZERO_UUID, UuidParts, parse_uuid_text

M = TypeVar("M")

DEFAULT_ROW_BYTES: Final = 16 << 20
"""The maximum length of a row in bytes. A longer row is corrupt: an unclosed quote, or content without newlines."""

# All quantifiers are possessive or atomic, so that no content causes backtracking.
_FIELD: Final = rb'(?:"(?:[^"]++|"")*+"|[^",\r\n]*+)'
_ROW: Final = re.compile(rb"(" + _FIELD + rb"(?:," + _FIELD + rb")*+)\r?\n")
_OPEN_FIELD: Final = rb'(?:"(?:[^"]++|"")*+"?+|[^",\r\n]*+)'
_BEGIN_OF_ROW: Final = re.compile(_OPEN_FIELD + rb"(?:," + _OPEN_FIELD + rb")*+\r?")
_FIELDS: Final = re.compile(rb'(?:^|,)(?:"((?:[^"]++|"")*+)"|([^",]*+))')
_UUID: Final = re.compile(rb'"?[0-9a-f]{8}-[0-9a-f]{4}-1[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(?=["\r\n,])')
_MAX_CANDIDATES: Final = 64
"""The maximum number of UUIDs in a malformed row to try as the next row: each try may scan the whole line."""
_NEEDS_QUOTES: Final = re.compile(r'[",\r\n]|^[\0- \ufeff]')
"""Matches fields that need quotes, including those that would make the beginning of a row look blank or marked."""
_SPACE: Final = bytes(range(ord(" ") + 1))
"""The characters that Spark trims."""


class RowType(Protocol[M]):
    """Converts messages to the columns of a row and back, except for the UUID column."""

    @property
    def width(self) -> int:
        """The number of columns."""
        ...

    def to_row(self, message: M) -> Sequence[str]:
        """Return the texts of a message's columns. Raises InvalidInput."""
        ...

    def from_row(self, row: Sequence[str]) -> M:
        """Return the message of a row of `width` texts. Raises InvalidInput."""
        ...


class TextRows:
    """Rows without conversion: a message is a sequence of `width` texts."""

    def __init__(self, width: int) -> None:
        self.width = width

    def to_row(self, message: Sequence[str]) -> Sequence[str]:
        if isinstance(message, str):
            raise InvalidInput("a row is a sequence of texts, not one text; put it into a list")
        return message

    def from_row(self, row: Sequence[str]) -> Sequence[str]:
        return row


class NamedRows:
    """Rows as dicts from column names to texts."""

    def __init__(self, names: Sequence[str]) -> None:
        if len(set(names)) != len(names):
            raise InvalidInput(f"columns must have different names, not {', '.join(names)}")
        self.names = tuple(names)
        self.width = len(self.names)

    def to_row(self, message: Mapping[str, str]) -> Sequence[str]:
        if message.keys() != set(self.names):
            raise InvalidInput(f"the columns are {', '.join(self.names)}; the message has {', '.join(message)}")
        return [message[name] for name in self.names]

    def from_row(self, row: Sequence[str]) -> Mapping[str, str]:
        return dict(zip(self.names, row, strict=True))


class CsvRows(Generic[M]):
    """The `Framing` of CSV.

    `uuid_column` is the column of the UUID: by default the first, as in Gazette's own records. Rows with an empty UUID
    are delivered at least once. With `uuid_column=None` rows have no UUID, and all are delivered at least once.
    """

    content_type: Final = "text/csv"

    def __init__(
        self, rows: RowType[M], *, uuid_column: int | None = 0, max_row_bytes: int = DEFAULT_ROW_BYTES
    ) -> None:
        if rows.width < 1 and uuid_column is None:
            raise InvalidInput("a row needs a column; name at least one")
        if uuid_column is not None and not 0 <= uuid_column <= rows.width:
            raise InvalidInput(f"the UUID cannot be column {uuid_column} among {rows.width} others")
        self.rows = rows
        self.uuid_column = uuid_column
        self.max_row_bytes = max_row_bytes
        self.width = rows.width + (uuid_column is not None)
        """The number of columns, the UUID's included."""

    def marshal(self, message: M, uuid: str | UUID) -> bytes:
        row = list(self.rows.to_row(message))
        if len(row) != self.rows.width:
            raise InvalidInput(f"a row has {self.rows.width} columns besides its UUID, not {len(row)}")
        if self.uuid_column is not None:
            row.insert(self.uuid_column, str(uuid))
        try:
            line = ",".join(f'"{_quoted(field)}"' if _NEEDS_QUOTES.search(field) else field for field in row)
            return f"{line}\n".encode() if line else b'""\n'
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInput(f"message cannot be written as CSV: {error}") from error

    def acknowledgement(self, uuid: str | UUID) -> bytes:
        if self.uuid_column is None:
            return b""
        row = [""] * self.width
        row[self.uuid_column] = str(uuid)
        return f"{','.join(row)}\n".encode()

    def unmarshal(self, content: bytes) -> M:
        try:
            row = [field.decode() for field in _fields(content)]
        except UnicodeDecodeError as error:
            raise InvalidInput(f"not a row of UTF-8: {error}") from error
        if len(row) != self.width:
            raise InvalidInput(f"a row of {self.width} columns was expected, not of {len(row)}")
        if self.uuid_column is not None:
            del row[self.uuid_column]
        return self.rows.from_row(row)

    def uuid_of(self, row: bytes) -> UuidParts:
        """Return the parts of a row's UUID; all zero for a row without a UUID. Raises InvalidInput."""
        column = self.uuid_column
        if column is None:
            return ZERO_UUID
        fields = _fields(row)
        if len(fields) != self.width:
            raise InvalidInput(f"a row of {self.width} columns was expected, not of {len(fields)}")
        return parse_uuid_text(fields[column]) if fields[column] else ZERO_UUID

    def decoder(self, journal: str, offset: int) -> CsvDecoder[M]:
        return CsvDecoder(self, journal, offset)


class CsvDecoder(Generic[M]):
    """The `Decoder` of `CsvRows`."""

    def __init__(self, framing: CsvRows[M], journal: str, offset: int) -> None:
        self._framing = framing
        self._journal = journal
        self._offset = offset
        self._content = b""  # From `_offset` on.
        self._is_skipping = False  # The incomplete row is too long: the rest of its line is skipped.

    @property
    def offset(self) -> int:
        return self._offset

    def feed(self, content: bytes, offset: int | None = None) -> Iterator[Envelope[M]]:
        expected = self._offset + len(self._content)
        if offset is not None and offset != expected:
            yield from self._take_rows()
            if offset < expected:
                raise InvalidInput(f"content of {self._journal} at offset {offset} was fed before, up to {expected}")
            tail = self.finish()
            self._offset, self._content, self._is_skipping = offset, content, False
            if tail is not None:
                raise CorruptMessage(
                    self._journal, tail.offset, f"the rest of the row is missing: content continues at offset {offset}"
                )
        else:
            self._content += self._after_skipped(content) if self._is_skipping else content
        yield from self._take_rows()
        if len(self._content) > self._framing.max_row_bytes:
            begin = self._offset
            self._offset, self._content, self._is_skipping = begin + len(self._content), b"", True
            raise CorruptMessage(
                self._journal, begin, f"a row that has not ended after {self._framing.max_row_bytes} bytes"
            )

    def _after_skipped(self, content: bytes) -> bytes:
        """Return the content after the skipped line; empty while that line continues."""
        newline = content.find(b"\n") + 1
        rest = content[newline:] if newline else b""
        self._offset += len(content) - len(rest)
        self._is_skipping = not newline
        return rest

    def finish(self) -> IncompleteTail | None:
        length = len(self._content)
        return IncompleteTail(self._journal, self._offset, length) if length else None

    def _take_rows(self) -> Iterator[Envelope[M]]:
        content, base, at = self._content, self._offset, 0
        row: bytes | None
        framing, journal = self._framing, self._journal
        try:
            while (newline := content.find(b"\n", at)) >= 0:
                begin, at = at, newline + 1
                start = begin
                while content.startswith(MARK, start):
                    start += len(MARK)
                if content.find(b'"', start, newline) < 0:
                    row = content[start:newline].removesuffix(b"\r")
                    if row[:1] <= b" " and not row.strip(_SPACE):
                        continue  # A blank line is not a row.
                else:
                    matched = _ROW.match(content, start)
                    if matched is not None:
                        row, at = matched[1], matched.end()
                    elif len(content) - begin <= framing.max_row_bytes and _BEGIN_OF_ROW.fullmatch(content, start):
                        at = begin
                        return
                    else:
                        row = None
                try:
                    if row is None:
                        raise InvalidInput("not a row of CSV: its quotes do not match, or do not enclose a field")
                    producer, clock, flags = framing.uuid_of(row)
                except InvalidInput as error:
                    following = self._next_row(content, begin + 1, newline)
                    if following is None:
                        at = begin
                        return
                    at = following or at
                    if following:
                        raise TornMessage(journal, base + begin, base + at) from error
                    raise CorruptMessage(journal, base + begin, error.message) from error
                self._offset = base + at
                yield Envelope(journal, base + begin, base + at, producer, clock, flags, row, framing)
        finally:
            self._content, self._offset = content[at:], base + at

    def _next_row(self, content: bytes, begin: int, newline: int) -> int | None:
        """Return the position of a whole row with a UUID after a torn row of the same line; 0 if there is none.

        Returns None if more content is needed to decide.
        """
        framing = self._framing
        if framing.uuid_column != 0 or newline - begin > MAX_DIVIDED_BYTES:
            return 0
        for candidate in islice(_UUID.finditer(content, begin, newline + 1), _MAX_CANDIDATES):
            at = candidate.start()
            matched = _ROW.match(content, at)
            if matched is None:
                if len(content) - at <= framing.max_row_bytes and _BEGIN_OF_ROW.fullmatch(content, at):
                    return None
                continue
            try:
                if framing.uuid_of(matched[1]).clock:
                    return at
            except InvalidInput:
                continue
        return 0


def _quoted(field: str) -> str:
    return field.replace('"', '""')


def _fields(row: bytes) -> list[bytes]:
    """Split a well-formed row into its fields."""
    if b'"' not in row:
        return row.split(b",")
    return [quoted.replace(b'""', b'"') or plain for quoted, plain in _FIELDS.findall(row)]
