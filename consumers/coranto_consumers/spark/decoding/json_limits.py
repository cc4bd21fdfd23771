"""Spark's limits for values and lines of JSON. pyarrow and Python have other limits."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from coranto.messages.columnar import Mask
from coranto.messages.json_text import Number

MAX_DIGITS: Final = 1000
"""The most digits of a number, including its exponent."""
MAX_DEPTH: Final = 1000
"""The deepest nesting of objects and lists."""

_STRIDE: Final = MAX_DIGITS // 2
_OF_NUMBERS: Final[NDArray[np.bool_]] = np.zeros(256, dtype=np.bool_)
_OF_NUMBERS[list(b"0123456789.eE+-")] = True
# Possessive, so that the time is linear in the length of a line.
_RUNS: Final = re.compile(rb"[0-9.eE+-]++")
_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def may_be_beyond(content: Any) -> Mask:
    """Return the mask of lines, in an Arrow binary array, that may exceed the limits of digits or depth."""
    mask: Mask = np.zeros(len(content), dtype=np.bool_)
    _, borders, data = content.buffers()
    places = np.frombuffer(borders, dtype=np.int32)[content.offset : content.offset + len(content) + 1]
    # A number of more than MAX_DIGITS contains two successive samples.
    of_numbers = _OF_NUMBERS[np.frombuffer(data, dtype=np.uint8)[places[0] : places[-1] : _STRIDE]]
    within = np.flatnonzero(of_numbers[:-1] & of_numbers[1:]) * _STRIDE + places[0]
    rows = np.searchsorted(places[1:], within, side="right")
    for row in set(rows.tolist()):
        mask[row] = max(map(len, _RUNS.findall(content[row].as_py())), default=0) > MAX_DIGITS
    long = np.flatnonzero(pc.binary_length(content).to_numpy() > 2 * MAX_DEPTH)
    if len(long):
        lines = content.take(pa.array(long))
        opened = pc.add(pc.count_substring(lines, "["), pc.count_substring(lines, "{")).to_numpy()
        mask[long[opened > MAX_DEPTH]] = True
    return mask


def is_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(text):
        first = token[0][0]
        depth += first in "[{"
        depth -= first in "]}"
        if depth > MAX_DEPTH:
            return True
    return False


def has_long_number(value: object, text: str) -> bool:
    """Return True if a JSON value is or contains a number that is too long. `text` is its JSON text."""
    if len(text) <= MAX_DIGITS:
        return False
    left = [value]
    while left:
        match left.pop():
            case Number() as number:
                if sum(map(str.isdigit, number)) > MAX_DIGITS:
                    return True
            case dict() as found:
                left.extend(found.values())
            case list() as found:
                left.extend(found)
    return False
