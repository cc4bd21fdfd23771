"""Texts of columns are classified as plain, odd or invalid JSON, like single texts."""

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages.columnar_texts import odd_texts
from coranto.messages.json_text import is_plain

PARTS = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", " ", "\t", "\n", "\r", '"', "\\", "1", "-", "0", ".", "e", "+"),
        *('"a"', '"_meta"', '"\\u005fmeta"', "{}", '{"a":1}', "null", "true", "NaN", "Infinity", "01", "1e400"),
        *('"\x01"', '"\\ud800"', '"\\x"', '"é"', '"\u2028"', "\x00", "\x0b", "\ufeff", "9" * 400),
    ]
)
OBJECTS = st.sampled_from(
    ["{}", "{ }", '{"a":1}', '{ "a":1}', ' {"a":1}', '{"a":\n1}', '{"_meta":1}', '{"b":{"_meta":1}}', '{"a":[{}]}']
)
TEXTS = st.lists(OBJECTS | st.lists(PARTS, max_size=8).map("".join) | st.lists(PARTS, max_size=6).map(
    lambda parts: '{"a":' + "".join(parts) + "}"
), max_size=4)  # fmt: skip


@given(TEXTS)
@example(['{"a":{}', ',"b":1}'])
@example(['{"a":[{}', '{"b":1}]}'])
@example(["{} {}", "{}"])
@example(["{}{}", ""])
@example(['{"a":1}', '{"a":"}', '{"b":"}'])
@example(['{"a":' + "[" * 5000 + "]" * 5000 + "}"])
def test_columns_of_texts_are_classified_like_single_texts(texts):
    try:
        expected = [not is_plain(text, "_meta") for text in texts]
    except InvalidInput:
        with pytest.raises(InvalidInput, match="is not JSON"):
            odd_texts(pa.array(texts, pa.string()), "_meta")
        return
    assert odd_texts(pa.array(texts, pa.string()), "_meta").tolist() == expected
    padded = pa.array(["{", *texts, "["], pa.string())
    assert odd_texts(padded.slice(1, len(texts)), "_meta").tolist() == expected


def test_most_texts_are_not_decoded_one_by_one(monkeypatch):
    decoded: list[str] = []
    monkeypatch.setattr(
        "coranto.messages.columnar_texts.is_plain",
        lambda text, reserved: decoded.append(text) or is_plain(text, reserved),
    )
    texts = pa.array(['{"a":1}', "{}", ' {"a":1}', '{"_meta":{"uuid":1}}', '{"a":{"_meta":1}}'])
    assert odd_texts(texts, "_meta").tolist() == [False, False, True, True, False]
    assert decoded == [' {"a":1}']


def test_texts_that_are_not_utf_8_are_refused():
    texts = pa.array([b'{"a":"\xff"}'], pa.binary()).view(pa.string())
    with pytest.raises(InvalidInput, match="a message is not UTF-8"):
        odd_texts(texts, "_meta")
