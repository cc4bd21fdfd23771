"""Stamping of whole columns of messages with UUIDs: from texts of JSON objects to the lines of a journal.

The lines are those that `json_text.JsonTexts` writes, one by one, with the clocks of a `ProducerClock`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coranto.errors import InvalidInput
from coranto.messages.columnar import Mask, UInt64s
from coranto.messages.framing import JsonLines
from coranto.messages.json_text import JsonTexts, is_plain
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, format_uuid

_TEXT_BYTES: Final = 36
_DIGITS: Final = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_PLACES: Final = np.array([at for at in range(_TEXT_BYTES) if at not in (8, 13, 18, 23)])


def stamped_lines(
    texts: Any, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags, *, checked: bool = False
) -> Any:
    """Return an Arrow binary array with the line of each text.

    `texts` is an Arrow array of texts of JSON objects, of which none is null. Their clocks are `first_clock` and those
    that follow it, CLOCK_TICK apart. With `checked`, each text is known to be an object without spaces around it, with
    no newline in it and no value where the UUID comes. Raises InvalidInput for a text that is no JSON object.
    """
    if not framing.path:
        raise InvalidInput("lines without a place for UUIDs cannot be stamped; give the framing a pointer")
    clocks = np.uint64(first_clock) + np.arange(len(texts), dtype=np.uint64) * np.uint64(CLOCK_TICK)
    head = framing.acknowledgement("")[:-2]  # Without the object's end and the newline.
    begin, close = framing.uuid_prefix, head[len(framing.uuid_prefix) :]
    content = texts.cast(pa.binary())
    lead = pc.if_else(pc.equal(content, b"{}"), pa.scalar(close, pa.binary()), pa.scalar(close + b",", pa.binary()))
    lines = pc.binary_join_element_wise(
        pa.scalar(begin, pa.binary()),
        uuid_texts(producer, clocks, flags),
        lead,
        pc.binary_replace_slice(content, 0, 1, b""),
        pa.scalar(b"\n", pa.binary()),
        pa.scalar(b"", pa.binary()),
    )
    if checked:
        return lines
    values = texts.to_pylist()
    odd: Mask = np.fromiter((not is_plain(text, framing.path[0]) for text in values), np.bool_, len(values))
    if not odd.any():
        return lines
    one_by_one = JsonTexts(framing)
    replaced = [
        one_by_one.marshal(values[row], format_uuid(producer, int(clocks[row]), flags))
        for row in np.flatnonzero(odd).tolist()
    ]
    return pc.replace_with_mask(lines, pa.array(odd), pa.array(replaced, pa.binary()))


def uuid_texts(producer: ProducerId, clocks: UInt64s, flags: Flags, *, before: bytes = b"", behind: bytes = b"") -> Any:
    """Return an Arrow binary array with the texts of the UUIDs of one producer's messages (see `uuids`).

    Each has the bytes `before` and `behind` around it.
    """
    packed = np.empty((len(clocks), 16), dtype=np.uint8)
    ticks = clocks >> np.uint64(4)
    low = (ticks & np.uint64(0xFFFFFFFF)).astype(">u4")
    middle = ((ticks >> np.uint64(32)) & np.uint64(0xFFFF)).astype(">u2")
    high = ((clocks >> np.uint64(52)) | np.uint64(0x1000)).astype(">u2")
    sequence = ((clocks & np.uint64(0xF)) << np.uint64(10) | np.uint64(flags | 0x8000)).astype(">u2")
    begin = 0
    for part in (low, middle, high, sequence):
        packed[:, begin : begin + part.itemsize] = part.view(np.uint8).reshape(-1, part.itemsize)
        begin += part.itemsize
    packed[:, begin:] = np.frombuffer(producer, dtype=np.uint8)
    width = len(before) + _TEXT_BYTES + len(behind)
    text: NDArray[np.uint8] = np.empty((len(clocks), width), dtype=np.uint8)
    text[:] = np.frombuffer(before + b"-" * _TEXT_BYTES + behind, dtype=np.uint8)
    nibbles = np.empty((len(clocks), 32), dtype=np.uint8)
    nibbles[:, ::2], nibbles[:, 1::2] = packed >> 4, packed & 0xF
    text[:, len(before) + _PLACES] = _DIGITS[nibbles]
    borders = np.arange(0, width * len(clocks) + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(clocks), [None, pa.py_buffer(borders), pa.py_buffer(text)])
