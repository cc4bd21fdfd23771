"""Records of an input: lines or fixed frames, and optional keys before them."""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Iterator
from typing import BinaryIO, Final

from coranto.errors import InvalidInput
from coranto.messages.fixed_frame import MAGIC

MAX_RECORD_BYTES: Final = 64 << 20
_HEADER_BYTES: Final = len(MAGIC) + 4


class RecordFraming(enum.StrEnum):
    """The framing of records in the input."""

    NONE = "none"
    LINES = "lines"
    FIXED = "fixed"


def read_records(source: BinaryIO, framing: RecordFraming) -> Iterator[bytes]:
    """Yield the records of the input, each with its framing (newline or header), as journals hold them.

    Raises InvalidInput if the input ends within a record, if a record is not a frame, or if it is longer than
    `MAX_RECORD_BYTES`.
    """
    number = 0
    while record := _read_line(source, number) if framing is RecordFraming.LINES else _read_frame(source, number):
        yield record
        number += 1


def _read_line(source: BinaryIO, number: int) -> bytes:
    line = source.readline(MAX_RECORD_BYTES + 1)
    if len(line) > MAX_RECORD_BYTES:
        raise _error(number, f"the line is longer than {MAX_RECORD_BYTES} bytes")
    if line and not line.endswith(b"\n"):
        raise _error(number, "the input ends within a line; end the last line with a newline")
    return line


def _read_frame(source: BinaryIO, number: int) -> bytes:
    header = source.read(_HEADER_BYTES)
    if not header:
        return b""
    if not header.startswith(MAGIC):
        raise _error(number, f"{header[: len(MAGIC)].hex(' ')} is not where a frame begins, with {MAGIC.hex(' ')}")
    length = int.from_bytes(header[len(MAGIC) :], "little")
    if length > MAX_RECORD_BYTES:
        raise _error(number, f"the frame says that it has {length} bytes, more than {MAX_RECORD_BYTES}")
    payload = source.read(length)
    if len(header) < _HEADER_BYTES or len(payload) < length:
        raise _error(number, "the input ends within a frame")
    return header + payload


def with_keys(records: Iterator[bytes], framing: RecordFraming, *, is_base64: bool) -> Iterator[tuple[bytes, bytes]]:
    """Yield pairs of a key and its record, which follows it in the input. Raises InvalidInput."""
    for number, raw in enumerate(records):
        key = raw.rstrip(b"\r\n") if framing is RecordFraming.LINES else raw[_HEADER_BYTES:]
        if is_base64:
            try:
                key = base64.b64decode(key, validate=True)
            except binascii.Error as error:
                raise _error(2 * number, f"the key {key!r} is not base64: {error}") from error
        record = next(records, None)
        if record is None:
            raise _error(2 * number, f"no record follows the key {key!r}")
        yield key, record


def _error(number: int, problem: str) -> InvalidInput:
    return InvalidInput(f"record {number + 1} of the input: {problem}")
