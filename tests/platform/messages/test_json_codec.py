"""JSON is read and written as by Python's own module, for any value."""

from __future__ import annotations

import datetime as dt
import enum
import json
import math
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from coranto.messages.json_codec import decode_json, encode_json


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    pass


@dataclass
class Point:
    x: int = 1


ODD = [
    *(math.nan, math.inf, -math.inf, Decimal("1.5"), b"bytes", bytearray(b"x"), {1}, frozenset({1}), uuid.UUID(int=1)),
    *(
        dt.datetime(2024, 2, 29, tzinfo=dt.UTC),
        dt.date(2024, 2, 29),
        dt.time(1),
        dt.timedelta(1),
        Colour.RED,
        Level.LOW,
    ),
    *(Name("n"), Point(), OrderedDict(a=1), object(), 1 + 2j, range(3), "\ud800", memoryview(b"x"), type),
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats()
    | st.text()
    | st.sampled_from(["\x00\x1f\x7f", '\u2028/\\"', "\U0001f600"])
)
KEYS = st.text(max_size=4) | st.sampled_from([1, 2.5, None, True, Name("k"), (1,), b"k", math.nan])
VALUES = st.recursive(
    SCALARS | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
OWN = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def outcome(work: Any, *arguments: Any) -> Any:
    """Return the exact result, or "refused" after a failure."""
    try:
        return repr(work(*arguments))
    except (TypeError, ValueError, RecursionError):
        return "refused"


@given(st.dictionaries(KEYS, VALUES, max_size=4) | VALUES)
@example({"a": [{"b": 1e16, "c": 1e-7, "d": -0.0, "e": 10**30}]})
def test_written_json_reads_the_same_as_the_standard_modules(value):
    expected = outcome(lambda: json.loads(OWN.encode(value).encode()))
    assert outcome(lambda: json.loads(encode_json(value))) == expected
    if not any(mark in expected for mark in ("e+", "e-")):
        assert outcome(lambda: encode_json(value)) == outcome(lambda: OWN.encode(value).encode())


PIECES = [
    *("{", "}", "[", "]", ",", ":", " ", "\n", "\t", '"a"', '"b":', '"a":1', "1", "-1", "-0", "0.5", "01", "1.", ".5"),
    *("1e400", "-1e400", "1e5", "1E-400", "NaN", "Infinity", "-Infinity", "null", "true", "tru", '"\\ud800"', "9" * 30),
    *('"\\ud83d\\ude00"', '"\\u0000"', '"\t"', '"\\x"', "18446744073709551616", "-9223372036854775809", '"é"', "-"),
]
TEXTS = (
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join).map(str.encode)
    | VALUES.filter(lambda value: outcome(OWN.encode, value) != "refused" and "\ud800" not in repr(value)).map(
        lambda value: OWN.encode(value).encode("utf-8", "surrogatepass")
    )
    | st.binary(max_size=12)
    | st.dictionaries(st.text(), st.integers(), max_size=2).map(lambda value: json.dumps(value).encode("utf-16"))
)


@given(TEXTS)
@example(b'{"a":1,"a":2}')
@example(b'{"a":"\xed\xa0\x80"}')
@example(b"\xef\xbb\xbf{}")
@example(b'{"a":1.7976931348623159e308}')
@example(b"[" * 100_000)
def test_json_is_read_as_by_the_standard_module(content):
    assert outcome(decode_json, content) == outcome(_standard, content)


def _standard(content: bytes) -> Any:
    is_utf8 = content[:1] == b"{" and content[1:2] != b"\0"
    return json.loads(content.decode("utf-8", "surrogatepass") if is_utf8 else content)
