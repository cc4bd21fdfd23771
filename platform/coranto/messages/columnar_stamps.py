"""Stamping of whole columns of messages with UUIDs: from texts of JSON objects to the lines of a journal.

The lines are the same as those that `json_text.JsonTexts` writes one by one, with the clocks of a `ProducerClock`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coranto.errors import InvalidInput
from coranto.messages.columnar import UInt64s
from coranto.messages.columnar_texts import odd_texts
from coranto.messages.framing import JsonLines
from coranto.messages.json_text import JsonTexts
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, format_uuid

_HEX: Final = np.array([int.from_bytes(f"{byte:02x}".encode(), "little") for byte in range(256)], dtype="<u2")
"""The two digits of each byte."""


def stamped_lines(
    texts: Any, framing: JsonLines, producer: ProducerId, first_clock: int, flags: Flags, *, checked: bool = False
) -> Any:
    """Return an Arrow binary array with the line of each text.

    `texts` is an Arrow array of texts of JSON objects, without nulls. Their clocks are `first_clock` and the
    following ones, CLOCK_TICK apart. With `checked`, each text is known to be an object without spaces around it, with
    no newline in it and no value at the UUID's place. Raises InvalidInput for a text that is not a JSON object.
    """
    if not framing.path:
        raise InvalidInput("lines without a place for UUIDs cannot be stamped; give the framing a pointer")
    clocks = np.uint64(first_clock) + np.arange(len(texts), dtype=np.uint64) * np.uint64(CLOCK_TICK)
    close = framing.acknowledgement("")[len(framing.uuid_prefix) : -2]  # Without the object's end and the newline.
    content = texts.cast(pa.binary())
    lines = pc.binary_join_element_wise(
        uuid_texts(producer, clocks, flags, before=framing.uuid_prefix, after=close),
        _after_brace(content),
        pa.scalar(b"\n", pa.binary()),
        pa.scalar(b"", pa.binary()),
    )
    if checked:
        return lines
    odd = odd_texts(texts, framing.path[0])
    if not odd.any():
        return lines
    one_by_one = JsonTexts(framing)
    replaced = [
        one_by_one.marshal(texts[row].as_py(), format_uuid(producer, int(clocks[row]), flags))
        for row in np.flatnonzero(odd).tolist()
    ]
    return pc.replace_with_mask(lines, pa.array(odd), pa.array(replaced, pa.binary()))


def _after_brace(content: Any) -> Any:
    """Return objects with a comma in place of their opening brace, to follow the field of the UUID."""
    rest = pc.binary_replace_slice(content, 0, 1, b",")
    if pc.any(empty := pc.equal(content, b"{}")).as_py():
        return pc.if_else(empty, pa.scalar(b"}", pa.binary()), rest)
    return rest


def uuid_texts(producer: ProducerId, clocks: UInt64s, flags: Flags, *, before: bytes = b"", after: bytes = b"") -> Any:
    """Return an Arrow binary array with the texts of the UUIDs of one producer's messages (see `uuids`).

    Each text is between the bytes `before` and `after`.
    """
    words: UInt64s = clocks >> np.uint64(4) << np.uint64(32)  # The low bits of the timestamp come first.
    words |= clocks >> np.uint64(20) & np.uint64(0xFFFF0000)
    words |= clocks >> np.uint64(52) | np.uint64(0x1000)
    sequence = (clocks & np.uint64(0xF)) << np.uint64(10) | np.uint64(flags | 0x8000)
    digits = _digits(words.astype(">u8"))
    template = before + f"00000000-0000-0000-0000-{producer.hex()}".encode() + after
    begin, width = len(before), len(template)
    text: NDArray[np.uint8] = np.empty((len(clocks), width), dtype=np.uint8)
    text[:] = np.frombuffer(template, dtype=np.uint8)
    text[:, begin : begin + 8] = digits[:, :8]
    text[:, begin + 9 : begin + 13] = digits[:, 8:12]
    text[:, begin + 14 : begin + 18] = digits[:, 12:]
    text[:, begin + 19 : begin + 23] = _digits(sequence.astype(">u2"))
    offsets = np.arange(0, width * len(clocks) + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(clocks), [None, pa.py_buffer(offsets), pa.py_buffer(text)])


def _digits(numbers: NDArray[Any]) -> NDArray[np.uint8]:
    """Return a row of hexadecimal digits for each number. The numbers are big-endian."""
    return _HEX[numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)].view(np.uint8)
