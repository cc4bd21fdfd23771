"""Division of lines that hold more than one message, since an append ended without a newline.

The next append continued its line. So the line consists of the append's rest, the *torn piece*, and of the first
message of the next append. `divide` finds the border where the content proves it, and always gives the same result:

* If the line is nothing but two or more whole objects, each of them is a message.
* Otherwise, if an object that ends the line is whole and has a UUID, it is a message, and what lies before is torn.
* Otherwise the line is not divided: nothing tells a message from a part of one.

The object that ends a line is found from its end, in one pass. Only lines that are not one object are divided.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

MAX_DIVIDED_BYTES: Final = 4 << 20
"""The longest line in bytes that is divided: to look at each brace of a longer one would take seconds."""

_SPACES: Final = b" \t\r\n"
_TOKEN: Final = re.compile(rb'["{}]')
_BACKSLASHES: Final = re.compile(rb"\\*")


class LinePiece(NamedTuple):
    """The part [begin, end) of a line: a message, or torn."""

    begin: int
    end: int
    is_torn: bool


def divide(line: bytes, is_object: Callable[[bytes], bool], has_uuid: Callable[[bytes], bool]) -> list[LinePiece]:
    """Return the adjacent pieces of a line that is not one object; empty if it is not divided.

    `is_object` is true for a text of one whole object, and `has_uuid` for such an object with a UUID.
    """
    if len(line) > MAX_DIVIDED_BYTES or not line.rstrip(_SPACES).endswith(b"}"):
        return []
    backwards = line[::-1]
    begins: list[int] = []
    end = at = len(line)  # The objects that were found begin at `at`.
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
    """Return where the object begins that ends at `at`, counted from the line's end, but for spaces; -1 without one.

    The place that is returned is counted from the line's beginning, whose last byte comes first in `backwards`.
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
    """Return the place behind the quote that begins the text which ends before `at`; -1 without one."""
    while (quote := backwards.find(b'"', at)) >= 0:
        escapes = _BACKSLASHES.match(backwards, quote + 1)
        at = escapes.end() if escapes is not None else quote + 1
        if (at - quote) % 2:  # An even number of backslashes.
            return quote + 1
    return -1
