"""JSON as Python's `json` module reads and writes it, with the faster msgspec where the results are equal.

Decoding: msgspec rejects every text that `json` rejects, and returns the same values. Texts that only msgspec rejects
(`NaN`, lone surrogates, numbers beyond the range of floats, other encodings) are decoded by `json`.

Encoding: msgspec accepts values that `json` rejects, such as times and bytes, and writes NaN and infinities as null. It
therefore gets plain values only. It writes exponents of floats differently (`1e16` instead of `1e+16`); the numbers are
equal.
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
    """Return a value as JSON, without spaces. Raises TypeError, ValueError or RecursionError if that is impossible."""
    try:
        if type(value) is dict and _is_plain(value):
            return _encode_quickly(value)
    except RecursionError:
        pass  # `_encode` raises it, too.
    return _encode(value).encode()


def decode_json(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError or RecursionError if it cannot be decoded."""
    try:
        return _decode_quickly(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # Content that begins like this is not UTF-16 or UTF-32, which `json.loads` would check for.
        is_utf8 = content[:1] == b"{" and content[1:2] != b"\0"
        return _decode(content.decode("utf-8", "surrogatepass")) if is_utf8 else json.loads(content)


def _is_plain(value: dict[Any, Any]) -> bool:
    """Return True if both encoders write equal values for an object."""
    return set(map(type, value)) <= _NAMES and _are_plain(value.values())


def _are_plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind in _SIMPLE:
            continue
        if kind is float:
            if value - value != 0:  # Infinity or NaN.
                return False
        elif kind is dict:
            if not _is_plain(value):
                return False
        elif (kind is not list and kind is not tuple) or not _are_plain(value):
            return False
    return True
