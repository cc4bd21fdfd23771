"""Reading the UUIDs of many JSON lines at once.

`read_json_lines` splits journal content into lines and reads the UUID of each. If the UUID is at the beginning of the
line, where `JsonLines` writes it, this takes no Python object per line. Other lines are parsed one by one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.columnar import Int64s, Mask, UInt16s, UInt64s, producer_number
from coranto.messages.framing import JsonLines

UUID_CHARACTERS: Final = 36

_INVALID: Final = 0xFF
_NIBBLES: Final = np.full(256, _INVALID, dtype=np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
_NIBBLES[np.frombuffer(b"ABCDEF", dtype=np.uint8)] = np.arange(10, 16)
_DASHES: Final = np.array([8, 13, 18, 23])
_DIGITS: Final = np.array([at for at in range(UUID_CHARACTERS) if at not in (8, 13, 18, 23)])
_BLOCK: Final = 1 << 14  # Rows that are parsed together: a block's bytes fit in the processor's cache.


class UuidColumns(NamedTuple):
    """The parts of many UUIDs."""

    producers: UInt64s
    clocks: UInt64s
    flags: UInt16s


class LineColumns(NamedTuple):
    """The complete lines of a piece of content. Line i is `content[starts[i]:ends[i]]`, without its newline."""

    starts: Int64s
    ends: Int64s
    uuids: UuidColumns
    consumed: int
    """The length of these lines in bytes. The content behind it is the beginning of a line."""
    unreadable: tuple[int, ...] = ()
    """The lines whose UUID cannot be read, for a tolerant framing. Their parts are zero."""

    def offsets(self, begin_offset: int) -> Int64s:
        """Return the journal offsets at which the lines begin, for content from `begin_offset` on."""
        return self.starts + begin_offset


def read_json_lines(framing: JsonLines, journal: str, content: bytes, begin_offset: int) -> LineColumns:
    """Return the complete lines of `content`, which is at `begin_offset` of `journal`. A line must begin there.

    Raises CorruptMessage for the first line whose UUID cannot be read, unless the framing is tolerant.
    """
    characters = np.frombuffer(content, dtype=np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    starts = np.empty_like(ends)
    starts[:1] = 0
    starts[1:] = ends[:-1] + 1

    prefix = np.frombuffer(framing.uuid_prefix, dtype=np.uint8)
    head = len(prefix) + UUID_CHARACTERS + 1
    count = len(starts)
    columns = UuidColumns(
        np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint16)
    )
    if not framing.uuid_prefix:
        return LineColumns(starts, ends, columns, int(ends[-1]) + 1 if count else 0)
    by_hand = ends - starts < head
    candidates = np.flatnonzero(~by_hand)
    if len(candidates):
        windows = sliding_window_view(characters, head)
        for block in range(0, len(candidates), _BLOCK):
            rows = candidates[block : block + _BLOCK]
            heads = windows[starts[rows]]
            usual = (heads[:, : len(prefix)] == prefix).all(axis=1) & (heads[:, -1] == ord('"'))
            parsed, valid = _parse(heads[:, len(prefix) : -1])
            columns.producers[rows] = parsed.producers
            columns.clocks[rows] = parsed.clocks
            columns.flags[rows] = parsed.flags
            by_hand[rows] = ~(usual & valid)

    unreadable = []
    for row in np.flatnonzero(by_hand).tolist():
        try:
            producer, clock, flags = framing.uuid_of(content[starts[row] : ends[row]])
        except InvalidInput as error:
            if framing.tolerant:
                unreadable.append(row)
                columns.producers[row] = columns.clocks[row] = columns.flags[row] = 0
                continue
            raise CorruptMessage(journal, begin_offset + int(starts[row]), error.message) from error
        columns.producers[row] = producer_number(producer)
        columns.clocks[row] = clock
        columns.flags[row] = flags
    return LineColumns(starts, ends, columns, int(ends[-1]) + 1 if count else 0, tuple(unreadable))


def _parse(texts: NDArray[np.uint8]) -> tuple[UuidColumns, Mask]:
    """Return the parts of UUID texts, and the mask of valid ones. The parts of invalid ones mean nothing."""
    nibbles = _NIBBLES[texts[:, _DIGITS]]
    valid: Mask = (nibbles != _INVALID).all(axis=1) & (texts[:, _DASHES] == ord("-")).all(axis=1)
    packed = (nibbles[:, ::2] << 4) | nibbles[:, 1::2]
    words = np.ascontiguousarray(packed).view(">u8").astype(np.uint64)
    high, low = words[:, 0], words[:, 1]
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
