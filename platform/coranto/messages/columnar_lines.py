"""Reading the UUIDs of many JSON lines together.

`read_json_lines` splits journal content into lines and reads the UUID of each. If the UUID is at the beginning of the
line, where `JsonLines` writes it, this takes no Python object per line. Other lines are parsed one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coranto.errors import CorruptMessage, InvalidInput, TornMessage
from coranto.messages.columnar import Int32s, Int64s, Mask, UInt16s, UInt64s, producer_number
from coranto.messages.framing import JsonLines
from coranto.messages.torn_lines import LinePiece
from coranto.messages.uuids import ZERO_UUID, UuidParts

UUID_CHARACTERS: Final = 36

_BLOCK: Final = 1 << 12  # Rows that are parsed together: their words fit in the CPU cache.
_WORDS: Final = 5
"""The number of eight-byte words that hold a UUID's text, the quote after it, and three more characters."""
_ALONE: Final = np.uint64(int.from_bytes(b'"},"', "little"))
"""The characters after a UUID that is the only field of its object, if another field follows the object."""

_U8, _U24, _U32, _U48 = (np.uint64(bits) for bits in (8, 24, 32, 48))
_U8_MASK: Final = np.uint64(0xFF)
_U32_MASK: Final = np.uint64(0xFFFFFFFF)
_ONES: Final = np.uint64(0x0101010101010101)
_NIBBLES: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_DASHES: Final = tuple(
    (np.uint64(int.from_bytes(text.replace(b"-", b"\xff"), "little")), np.uint64(int.from_bytes(text, "little")))
    for text in (b"-\0\0\0\0-\0\0", b"\0\0-\0\0\0\0-")
)
"""For the second and the third word of a UUID's text, the mask of its dashes and the masked value."""


class UuidColumns(NamedTuple):
    """The parts of many UUIDs."""

    producers: UInt64s
    clocks: UInt64s
    flags: UInt16s

    def put(self, row: int, parts: UuidParts) -> None:
        """Replace the parts of one UUID."""
        self.producers[row] = producer_number(parts.producer)
        self.clocks[row] = parts.clock
        self.flags[row] = parts.flags


class LineColumns(NamedTuple):
    """The complete lines of a piece of content. Line i is `content[starts[i]:ends[i]]`, without its newline."""

    content: bytes
    """The given content or, if lines were divided (torn_lines.py), a copy with a newline after each piece."""
    starts: Int64s
    ends: Int64s
    uuids: UuidColumns
    consumed: int
    """The length of these lines in the given content. The rest of the content is an incomplete line."""
    unreadable: tuple[int, ...] = ()
    """The lines whose UUID cannot be read, for a tolerant framing. The parts of their UUIDs are zero."""
    headed: Mask | None = None
    """The lines that begin as `JsonLines` writes them, with an object that holds only the UUID
    (`JsonLines.head_bytes`), and have other fields. None if UUIDs are not in such an object."""

    added: Int64s | None = None
    """For each line, the number of newlines added to the given content before it. None if none were added."""

    def offsets(self, begin_offset: int) -> Int64s:
        """Return the journal offsets of the lines' beginnings, for content from `begin_offset` on."""
        starts = self.starts + begin_offset
        return starts if self.added is None else starts - self.added

    def end_offsets(self, begin_offset: int) -> Int64s:
        """Return the journal offsets of the lines' ends, including the newlines of the given content."""
        if self.added is None:
            return self.ends + (begin_offset + 1)
        return np.append(self.offsets(begin_offset)[1:], begin_offset + self.consumed)

    def value_offsets(self) -> Int32s:
        """Return the beginnings of the lines in `content`, and the end of the last line with its newline."""
        end = self.ends[-1:] + 1 if len(self.ends) else [0]
        return np.concatenate([self.starts, end]).astype(np.int32)


def read_json_lines(framing: JsonLines, journal: str, content: bytes, begin_offset: int) -> LineColumns:
    """Return the complete lines of `content`, which is at `begin_offset` of `journal`. A line must begin there.

    Raises CorruptMessage for the first line whose UUID cannot be read, unless the framing is tolerant.
    """
    characters = np.frombuffer(content, dtype=np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1

    prefix = framing.uuid_prefix
    head = len(prefix) + UUID_CHARACTERS + 1
    count = len(starts)
    columns = UuidColumns(
        np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint16)
    )
    if not prefix:
        return LineColumns(content, starts, ends, columns, int(ends[-1]) + 1 if count else 0)
    usual: Mask = np.zeros(count, dtype=np.bool_)
    headed: Mask = np.zeros(count, dtype=np.bool_)
    # A line may be shorter than the inspected bytes, as long as the content continues after it.
    fitting = np.flatnonzero((ends - starts >= head) & (starts <= len(content) - len(prefix) - 8 * _WORDS))
    if len(fitting):
        prefixes = np.ndarray((len(content) - len(prefix) + 1,), f"S{len(prefix)}", content, strides=(1,))
        texts = np.ndarray((len(content) - 8 * _WORDS + 1,), f"V{8 * _WORDS}", content, strides=(1,))
        for block in range(0, len(fitting), _BLOCK):
            rows = slice(block, block + _BLOCK) if len(fitting) == count else fitting[block : block + _BLOCK]
            begins = starts[rows]
            words = texts[begins + len(prefix)].view("<u8").reshape(-1, _WORDS)
            parsed, valid = _parse(words)
            columns.producers[rows] = parsed.producers
            columns.clocks[rows] = parsed.clocks
            columns.flags[rows] = parsed.flags
            usual[rows] = valid & (prefixes[begins] == prefix)
            headed[rows] = words[:, -1] >> _U32 == _ALONE

    consumed = int(ends[-1]) + 1 if count else 0
    doubtful = ~usual
    if content.count(framing.uuid_field, 0, consumed) > count - int(doubtful.sum()):
        doubtful[_rows_with_two(framing.uuid_field, content, starts, consumed)] = True
    unreadable: list[int] = []
    divided: dict[int, list[_ReadPiece]] = {}
    for row in np.flatnonzero(doubtful).tolist():
        line, begin = content[starts[row] : ends[row]], begin_offset + int(starts[row])
        parts, problem = ZERO_UUID, ""
        try:
            parts = framing.uuid_of(line)
            pieces = framing.divide_if_torn(line)
        except InvalidInput as error:
            pieces, problem = framing.divide(line), error.message
        if pieces:
            divided[row] = [_read_piece(framing, journal, line, piece, begin) for piece in pieces]
        elif problem:
            if not framing.tolerant:
                raise CorruptMessage(journal, begin, problem)
            unreadable.append(row)
        columns.put(row, parts)
    found = headed & usual if len(framing.path) == 2 else None
    lines = LineColumns(content, starts, ends, columns, consumed, tuple(unreadable), found)
    return _with_pieces(lines, divided) if divided else lines


class _ReadPiece(NamedTuple):
    """The part [begin, end) of a line that was divided, and its UUID."""

    begin: int
    end: int
    parts: UuidParts
    is_readable: bool


def _read_piece(framing: JsonLines, journal: str, line: bytes, piece: LinePiece, begin: int) -> _ReadPiece:
    """Read the UUID of a piece of a line that begins at the offset `begin`. Raises CorruptMessage."""
    problem: CorruptMessage = TornMessage(journal, begin + piece.begin, begin + piece.end)
    if not piece.is_torn:
        try:
            return _ReadPiece(piece.begin, piece.end, framing.uuid_of(line[piece.begin : piece.end]), True)
        except InvalidInput as error:
            problem = CorruptMessage(journal, begin + piece.begin, error.message)
    if not framing.tolerant:
        raise problem
    return _ReadPiece(piece.begin, piece.end, ZERO_UUID, False)


def _rows_with_two(text: bytes, content: bytes, starts: Int64s, consumed: int) -> Int64s:
    """Return the lines that contain the text more than once."""
    places = np.fromiter((each.start() for each in re.finditer(re.escape(text), content[:consumed])), np.int64)
    rows, counts = np.unique(np.searchsorted(starts, places, side="right") - 1, return_counts=True)
    return rows[counts > 1]


def _with_pieces(lines: LineColumns, divided: Mapping[int, Sequence[_ReadPiece]]) -> LineColumns:
    """Return the lines, with the divided lines replaced by their pieces."""
    counts = np.ones(len(lines.starts), dtype=np.int64)
    counts[list(divided)] = [len(pieces) for pieces in divided.values()]
    source = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    starts, ends = lines.starts[source], lines.ends[source]
    uuids = UuidColumns(lines.uuids.producers[source], lines.uuids.clocks[source], lines.uuids.flags[source])
    headed = None if lines.headed is None else lines.headed[source]
    behind = np.zeros(len(source), dtype=np.int64)  # The newlines that are added after a line.
    unreadable = firsts[list(lines.unreadable)].tolist()
    parts: list[bytes] = []
    copied = 0
    for row, pieces in divided.items():
        base = int(lines.starts[row])
        for number, piece in enumerate(pieces, int(firsts[row])):
            starts[number] = base + piece.begin
            if piece is not pieces[-1]:
                ends[number], behind[number] = base + piece.end, 1
                parts += lines.content[copied : base + piece.end], b"\n"
                copied = base + piece.end
            if headed is not None:
                headed[number] = False
            if not piece.is_readable:
                unreadable.append(number)
            uuids.put(number, piece.parts)
    content = b"".join([*parts, lines.content[copied:]])
    added = np.cumsum(behind) - behind
    return LineColumns(
        content, starts + added, ends + added, uuids, lines.consumed, tuple(sorted(unreadable)), headed, added
    )


def _parse(texts: NDArray[np.uint64]) -> tuple[UuidColumns, Mask]:
    """Return the parts of UUID texts in lower case, and the mask of valid texts with a quote after them.

    Each row holds a text as little-endian words. The parts of invalid texts are undefined.
    """
    first, second, third, fourth, last = texts.T
    (second_mask, second_dashes), (third_mask, third_dashes) = _DASHES
    valid: Mask = (second & second_mask == second_dashes) & (third & third_mask == third_dashes)
    valid &= (last >> _U32) & _U8_MASK == ord('"')
    digits = np.empty((4, len(texts)), dtype=np.uint64)
    digits[0] = first
    digits[1] = ((second >> _U8) & _U32_MASK) | ((second >> _U48) << _U32) | (third << _U48)
    digits[2] = ((third >> _U24) & _U32_MASK) | (fourth << _U32)
    digits[3] = (fourth >> _U32) | (last << _U32)
    numbers, are_digits = _numbers(digits)
    valid &= are_digits.all(axis=0)
    high, low = (numbers[0] << _U32) | numbers[1], (numbers[2] << _U32) | numbers[3]
    is_zero = (high | low) == 0
    valid &= (((high >> np.uint64(12)) & np.uint64(0xF)) == 1) & ((low >> np.uint64(62)) == 2) | is_zero
    clocks = (
        (high >> np.uint64(32)) << np.uint64(4)
        | ((high >> np.uint64(16)) & np.uint64(0xFFFF)) << np.uint64(36)
        | (high & np.uint64(0xFFF)) << np.uint64(52)
        | (low >> np.uint64(58)) & np.uint64(0xF)
    )
    flags = ((low >> np.uint64(48)) & np.uint64(0x3FF)).astype(np.uint16)
    return UuidColumns(low & np.uint64((1 << 48) - 1), clocks, flags), valid


def _numbers(digits: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Mask]:
    """Decode words of eight hexadecimal digits in lower case: return the numbers, and the mask of valid words."""
    letters = (digits >> np.uint64(6)) & _ONES  # 1 in the bytes of letters, 0 in the bytes of digits.
    low = digits & _NIBBLES
    values = low + letters * np.uint64(9)
    # A digit is 0x3_ and has a value up to 9, a letter in lower case is 0x6_ and has a value from 10 to 15.
    are_digits: Mask = (digits ^ low) == (letters + _ONES) * np.uint64(0x30)
    are_digits &= ((values + _ONES * np.uint64(6)) & (_ONES << np.uint64(4))) == letters << np.uint64(4)
    are_digits &= values & (_ONES << np.uint64(4)) == 0
    values = ((values << np.uint64(4)) | (values >> _U8)) & np.uint64(0x00FF00FF00FF00FF)
    values = ((values << _U8) | (values >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    return ((values << np.uint64(16)) | (values >> _U32)) & _U32_MASK, are_digits
