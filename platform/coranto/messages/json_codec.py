"""JSON as Python's `json` module reads and writes it, by a faster library where that makes no difference.

msgspec decodes no text that `json` refuses, and gives the same values. Texts that it refuses (`NaN`, single surrogates,
numbers beyond floats, other encodings) is left to `json`.

It encodes values that `json` refuses, such as times and bytes, and writes numbers that are none as null. So it gets
plain values only. It writes exponents of floats in other words (`1e16`, `json` has `1e+16`), which are the same number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import msgspec

_encode_quickly: Final = msgspec.json.Encoder().encode
_decode_quickly: Final = msgspec.json.Decoder().decode
_encode: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_decode: Final = json.JSONDecoder().decode
_SIMPLE: Final = frozenset((str, int, bool, type(None)))
_NAMES: Final = frozenset((str,))


def encode_json(value: object) -> bytes:
    """Return a value as JSON, without spaces. Raises TypeError, ValueError or RecursionError if there is none."""
    try:
        if type(value) is dict and _is_plain(value):
            return _encode_quickly(value)
    except RecursionError:
        pass  # The other encoder says so as well.
    return _encode(value).encode()


def decode_json(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError or RecursionError for anything else."""
    try:
        return _decode_quickly(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Content that begins like this is not UTF-16 or UTF-32, which `json.loads` would check for.
        is_utf8 = content[:1] == b"{" and content[1:2] != b"\0"
        return _decode(content.decode("utf-8", "surrogatepass")) if is_utf8 else json.loads(content)


def _is_plain(value: dict[Any, Any]) -> bool:
    """Return True if both encoders write an object with the same values."""
    return set(map(type, value)) <= _NAMES and _are_plain(value.values())


def _are_plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind in _SIMPLE:
            continue
        if kind is float:
            if value - value != 0:  # Infinite, or no number.
                return False
        elif kind is dict:
            if not _is_plain(value):
                return False
        elif (kind is not list and kind is not tuple) or not _are_plain(value):
            return False
    return True
