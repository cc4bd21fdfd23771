"""Blocks of JSON lines, with the lines that Spark's file reader treats specially: blank lines and byte order marks.

`spark.read.json` skips lines that are empty or whitespace, and ignores the byte order mark at the beginning of a file.
A journal may contain appended files, so any line may begin with a mark. `JsonLinesDecoder` does the same for single
messages. Needs pyarrow (the `consumers` extra).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages.columnar import Mask
from coranto.messages.columnar_lines import LineColumns, read_json_lines
from coranto.messages.framing import MARK, SPACE, JsonLines

_SPACE_BYTE: Final = ord(" ")
"""The largest byte of whitespace."""


@dataclass(frozen=True, slots=True)
class JsonBlock:
    """The lines of a block."""

    lines: LineColumns
    unreadable: Mask | None
    """The lines whose UUID cannot be read; None if there are none."""
    blank: Mask | None
    """The lines that are not messages; None if there are none."""
    content: Any
    """An Arrow binary array of the lines with their newlines, and without byte order marks."""


def read_block(framing: JsonLines, journal: str, block: bytes, offset: int) -> JsonBlock:
    """Return the lines of a block that begins at `offset` and ends with a newline.

    Raises CorruptMessage for the first line whose UUID cannot be read, unless the framing is tolerant.
    """
    tolerant = framing
    if not framing.tolerant:
        tolerant = copy.copy(framing)
        tolerant.tolerant = True
    lines = read_json_lines(tolerant, journal, block, offset)
    content, count, lacking = lines.content, len(lines.starts), set(lines.unreadable)
    unreadable, blank, marked = (np.zeros(count, dtype=np.bool_) for _ in range(3))
    texts = []
    for row in _doubtful(framing, lines):
        line = content[lines.starts[row] : lines.ends[row]]
        text = line.removeprefix(MARK)
        if not text.strip(SPACE):
            blank[row] = True
            continue
        problem = "its UUID cannot be read"
        if len(text) < len(line):
            marked[row] = True
            texts.append(text + b"\n")
            try:
                lines.uuids.put(row, framing.uuid_of(text))
                continue
            except InvalidInput as error:
                problem = error.message
        elif row not in lacking:
            continue
        elif not framing.tolerant:
            begin = int(lines.offsets(0)[row])
            read_json_lines(framing, journal, block[begin:], offset + begin)  # This raises the error of the line.
        if not framing.tolerant:
            raise CorruptMessage(journal, int(lines.offsets(offset)[row]), problem)
        unreadable[row] = True
    buffers = [None, pa.py_buffer(lines.value_offsets()), pa.py_buffer(content)]
    whole = pa.Array.from_buffers(pa.binary(), count, buffers)
    if texts:
        whole = pc.replace_with_mask(whole, pa.array(marked), pa.array(texts, pa.binary()))
    return JsonBlock(lines, unreadable if unreadable.any() else None, blank if blank.any() else None, whole)


def _doubtful(framing: JsonLines, lines: LineColumns) -> Iterable[int]:
    """Return the lines that may be special according to their first byte, or whose UUID cannot be read."""
    if not framing.has_objects or not len(lines.starts):
        return ()
    first = np.frombuffer(lines.content, dtype=np.uint8)[lines.starts]
    doubtful: Mask = (first <= _SPACE_BYTE) | (first == MARK[0])
    doubtful[list(lines.unreadable)] = True
    return np.flatnonzero(doubtful).tolist()
