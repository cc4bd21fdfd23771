"""Parsing JSON lines into columns, without touching messages one by one.

The framing `coranto.messages.JsonLines` says what a line means. Here the same is computed for whole blocks: newlines
are found by numpy, lines become an Arrow array by slicing, and UUIDs are gathered from where writers put them: in front
(ours do), or at the end of the line. A line whose UUID is in neither place is left to the framing, so that the outcome
is always the framing's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.framing import JsonLines
from numpy.typing import NDArray

_UUID_LENGTH = 36
_DASHES = [8, 13, 18, 23]
_HEX_COLUMNS = [column for column in range(_UUID_LENGTH) if column not in _DASHES]
_NOT_HEX = 0xFF


def _hex_values() -> NDArray[np.uint8]:
    table = np.full(256, _NOT_HEX, dtype=np.uint8)
    for value, digit in enumerate("0123456789abcdef"):
        table[ord(digit)] = table[ord(digit.upper())] = value
    return table


_HEX = _hex_values()


@dataclass(frozen=True, slots=True)
class Lines:
    """Messages of one journal, in order, as columns of equal length."""

    journal: str
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    """Offset just beyond the line's newline."""
    producers: NDArray[np.uint64]
    """Producer ids, their six bytes as a big-endian number."""
    clocks: NDArray[np.uint64]
    flags: NDArray[np.int32]
    values: Any
    """Arrow binary array of the lines, without their newlines."""

    def __len__(self) -> int:
        return len(self.begins)


class LineParser:
    """Parses blocks of whole lines of a framing."""

    def __init__(self, framing: JsonLines | None = None) -> None:
        self._framing = framing or JsonLines()
        prefix = self._framing.uuid_prefix
        # What other writers make of the same: Python's json.dumps puts a space behind colons.
        spaced = prefix.replace(b":", b": ")
        keys = self._framing.pointer.count("/")
        self._in_front = [prefix, spaced]
        self._at_end = [(head[1:], b'"' + b"}" * keys) for head in (prefix, spaced)]

    def parse(self, journal: str, offset: int, content: bytes) -> Lines:
        """The lines of `content`, which begins at journal `offset` and ends with a newline (or is empty).

        Raises CorruptMessage for a line that is not a message.
        """
        buffer = np.frombuffer(content, dtype=np.uint8)
        newlines = np.flatnonzero(buffer == 0x0A)
        starts = np.empty(len(newlines), dtype=np.int64)
        if len(newlines):
            starts[0] = 0
            starts[1:] = newlines[:-1] + 1
        borders = np.concatenate([starts, newlines[-1:] + 1]).astype(np.int32)
        whole = pa.Array.from_buffers(pa.binary(), len(newlines), [None, pa.py_buffer(borders), pa.py_buffer(content)])
        values = pc.binary_slice(whole, 0, -1) if len(newlines) else pa.array([], pa.binary())
        packed, found = self._find(buffer, starts, newlines)
        for index in np.flatnonzero(~found):
            try:
                parts = self._framing.uuid_of(values[int(index)].as_py())
            except InvalidInput as error:
                raise CorruptMessage(journal, offset + int(starts[index]), error.message) from error
            packed.set(int(index), parts.producer, parts.clock, parts.flags)
        return Lines(
            journal, starts + offset, newlines + (offset + 1), packed.producers, packed.clocks, packed.flags, values
        )

    def _find(
        self, buffer: NDArray[np.uint8], starts: NDArray[np.int64], newlines: NDArray[np.int64]
    ) -> tuple[_Uuids, NDArray[np.bool_]]:
        """UUIDs of lines that have them where they can be seen, and which lines those are."""
        uuids = _Uuids(len(starts))
        found = np.zeros(len(starts), dtype=np.bool_)

        def look(begins: NDArray[np.int64], before: bytes, after: bytes, where: NDArray[np.bool_]) -> None:
            open_ = np.flatnonzero(~found & where)
            if not len(open_):
                return
            width = len(before) + _UUID_LENGTH + len(after)
            fits = (begins[open_] >= starts[open_]) & (begins[open_] + width <= newlines[open_])
            rows = open_[fits]
            if not len(rows):
                return
            window = _windows(buffer, begins[rows], width)
            good = (window[:, : len(before)] == np.frombuffer(before, np.uint8)).all(axis=1)
            good &= (window[:, len(before) + _UUID_LENGTH :] == np.frombuffer(after, np.uint8)).all(axis=1)
            text = window[:, len(before) : len(before) + _UUID_LENGTH]
            good &= uuids.decode(rows, text, good)
            found[rows[good]] = True

        everywhere = np.ones(len(starts), dtype=np.bool_)
        for prefix in self._in_front:
            look(starts, prefix, b'"', everywhere)
        for opening, closing in self._at_end:
            begins = newlines - (len(opening) + _UUID_LENGTH + len(closing))
            # Behind a backslash the quote is part of a longer key, not the begin of one.
            starts_key = (begins > starts) & (buffer[np.maximum(begins - 1, 0)] != ord("\\"))
            look(begins, opening, closing, starts_key)
        return uuids, found


class _Uuids:
    """Columns of UUID parts."""

    def __init__(self, length: int) -> None:
        self.producers = np.zeros(length, dtype=np.uint64)
        self.clocks = np.zeros(length, dtype=np.uint64)
        self.flags = np.zeros(length, dtype=np.int32)

    def set(self, index: int, producer: bytes, clock: int, flags: int) -> None:
        self.producers[index] = int.from_bytes(producer, "big")
        self.clocks[index] = clock
        self.flags[index] = flags

    def decode(self, rows: NDArray[np.int64], text: NDArray[np.uint8], wanted: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Decode the wanted ones of UUID texts (one per row) into place; which of all are version 1 UUIDs."""
        digits = _HEX[text[:, _HEX_COLUMNS]]
        good: NDArray[np.bool_] = wanted & (digits != _NOT_HEX).all(axis=1) & (text[:, _DASHES] == ord("-")).all(axis=1)
        packed = np.zeros((len(rows), 18), dtype=np.uint8)
        packed[:, :10] = digits[:, 0:20:2] << 4 | digits[:, 1:20:2]
        # Two zero bytes in front of the node make a number of eight.
        packed[:, 12:] = digits[:, 20:32:2] << 4 | digits[:, 21:32:2]
        low = packed[:, 0:4].copy().view(">u4")[:, 0].astype(np.uint64)
        mid = packed[:, 4:6].copy().view(">u2")[:, 0].astype(np.uint64)
        high = packed[:, 6:8].copy().view(">u2")[:, 0].astype(np.uint64)
        sequence = packed[:, 8:10].copy().view(">u2")[:, 0].astype(np.uint64)
        node = packed[:, 10:18].copy().view(">u8")[:, 0].astype(np.uint64)
        good &= (high >> 12 == 1) & (sequence >> 14 == 2)
        clocks = low << 4 | mid << 36 | (high & 0xFFF) << 52 | (sequence >> 10 & 0xF)
        chosen = rows[good]
        self.producers[chosen] = node[good]
        self.clocks[chosen] = clocks[good]
        self.flags[chosen] = (sequence & 0x3FF).astype(np.int32)[good]
        return good


def _windows(buffer: NDArray[np.uint8], begins: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """A row of `width` bytes from each of `begins`."""
    overlapping = np.ndarray((len(buffer) - width + 1,), dtype=f"V{width}", buffer=buffer.data, strides=(1,))
    return overlapping[begins].view(np.uint8).reshape(len(begins), width)


def producer_bytes(producers: NDArray[np.uint64]) -> Any:
    """Producer ids as an Arrow binary array of six bytes each."""
    wide = producers.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 2:]
    data = np.ascontiguousarray(wide)
    borders = np.arange(0, 6 * len(producers) + 1, 6, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(producers), [None, pa.py_buffer(borders), pa.py_buffer(data)])
