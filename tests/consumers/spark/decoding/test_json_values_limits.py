"""Numbers and depths at the limits of Spark's parser. `test_json_values.py` compares them with Spark's answers."""

import pyarrow as pa
import pytest

from coranto.messages.json_text import DECODER
from coranto_consumers.spark.decoding.json_columns import may_be_beyond
from coranto_consumers.spark.decoding.json_values import has_long_number, is_deep


def marked(*lines: str) -> list[bool]:
    return may_be_beyond(
        pa.array([b"before", *(f"{line}\n".encode() for line in lines)], pa.binary()).slice(1)
    ).tolist()


@pytest.mark.parametrize("before", [0, 1, 498, 499, 500, 501, 999])
def test_long_numbers_are_found_at_any_position(before):
    short, long = "9" * 1000, "9" * 1001
    lines = ["x" * before + short, "x" * before + long, "1", "x" * before + long + "x", "", short + "x" + short]
    assert marked(*lines) == [False, True, False, True, False, False]
    assert marked("-0." + "1" * 1000) == [True], "it is checked again"


def test_deep_lines_are_found():
    deep, texts = "[" * 501 + '{"a":' * 500, "[]" * 2000
    assert marked("[" * 1000 + "x" * 2000, deep, texts) == [False, True, True]
    assert is_deep(deep)
    assert not is_deep(texts)
    assert not is_deep("[" * 1000 + "]" * 1000)
    assert not is_deep('"' + "[" * 2000 + '"')
    assert is_deep('"\\\\"' + "[" * 1001)
    assert not is_deep('"' + '\\"' * 100_000 + "[" * 1001), "a text that does not end, with a quote at each position"


@pytest.mark.parametrize("text", ["9" * 1001, "-" + "9" * 1001, "0." + "1" * 1000, "1" * 999 + "e-12"])
def test_digits_of_a_number_include_its_exponent(text):
    one_less = text.replace("9", "", 1) if "9" in text else text.replace("1", "", 1)
    for each, expected in ((text, True), (one_less, False)):
        for written in (each, f"[[{each}]]", f'{{"a":1,"b":[{each}]}}'):
            assert has_long_number(DECODER.decode(written), written) == expected
    assert not has_long_number("9" * 2000, "9" * 2000), "a text"
