"""Division of lines that hold more than one message because an append ended without a newline.

The next append continues the same line. The line then consists of the end of the first append, the *torn piece*, and
the first message of the next append. `divide` splits it only where the content proves the boundary, so every reader
gets the same result:

* If the line consists of two or more whole objects, each object is a message.
* Otherwise, if the line ends with a whole object that has a UUID, that object is a message, and the bytes before it are
  torn.
* Otherwise the line is not divided, because messages cannot be distinguished from parts of messages.

The last object is found by one scan from the end of the line. Only lines that are not a single object are divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

MAX_DIVIDED_BYTES: Final = 4 << 20
"""The maximum length in bytes of a line that is divided: scanning the braces of a longer line would take seconds."""

_SPACES: Final = b" \t\r\n"
_TOKEN: Final = re.compile(rb'["{}]')
_BACKSLASHES: Final = re.compile(rb"\\*")


class LinePiece(NamedTuple):
    """The part [begin, end) of a line: a message, or a torn piece."""

    begin: int
    end: int
    is_torn: bool


def divide(line: bytes, is_object: Callable[[bytes], bool], has_uuid: Callable[[bytes], bool]) -> list[LinePiece]:
    """Return the adjacent pieces of a line that is not a single object; empty if it is not divided.

    `is_object` returns True for the text of one whole object, `has_uuid` for an object with a UUID.
    """
    if len(line) > MAX_DIVIDED_BYTES or not line.rstrip(_SPACES).endswith(b"}"):
        return []
    backwards = line[::-1]
    begins: list[int] = []
    end = at = len(line)  # The objects found so far begin at `at`.
    while (begin := _object_begin(backwards, len(line) - at)) >= 0 and is_object(line[begin:at]):
        begins.append(begin)
        at = begin
    if not begins:
        return []
    if len(begins) > 1 and not line[:at].strip(_SPACES):
        borders = [0, *reversed(begins[:-1]), end]
        return [LinePiece(*border, False) for border in pairwise(borders)]
    last = begins[0]
    if last and has_uuid(line[last:]):
        return [LinePiece(0, last, True), LinePiece(last, end, False)]
    return []


def _object_begin(backwards: bytes, at: int) -> int:
    """Return the offset in the line of the object that ends at `at`, ignoring spaces; -1 if there is none.

    `backwards` is the reversed line, and `at` is a position in `backwards`.
    """
    depth = 0
    while at < len(backwards) and backwards[at] in _SPACES:
        at += 1
    if backwards[at : at + 1] != b"}":
        return -1
    while (token := _TOKEN.search(backwards, at)) is not None:
        at = token.end()
        if token[0] == b"}":
            depth += 1
        elif token[0] == b"{":
            depth -= 1
            if not depth:
                return len(backwards) - at
        else:
            at = _text_begin(backwards, at)
            if at < 0:
                return -1
    return -1


def _text_begin(backwards: bytes, at: int) -> int:
    """Return the position after the opening quote of the string whose closing quote is before `at`; -1 without one."""
    while (quote := backwards.find(b'"', at)) >= 0:
        escapes = _BACKSLASHES.match(backwards, quote + 1)
        at = escapes.end() if escapes is not None else quote + 1
        if (at - quote) % 2:  # An even number of backslashes.
            return quote + 1
    return -1
