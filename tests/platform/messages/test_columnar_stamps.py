"""Stamping columns yields the same lines as stamping each."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages.columnar_stamps import stamped_lines, uuid_texts
from coranto.messages.framing import JsonLines
from coranto.messages.json_text import JsonTexts
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, format_uuid

PRODUCER = ProducerId(bytes.fromhex("0123456789ab"))
TEXTS = [
    "{}",
    "{ }",
    '{"a":1}',
    ' {"a": 1}\t',
    '{"a":\n1}',
    '{"a":12345678901234567890.12345678901234567890}',
    '{"_meta":{"uuid":"x","b":[1,2]},"é":"ü\\n"}',
    '{"_meta":null}',
    '{"deep":{"uuid":1},"a":2,"a":3}',
]


@pytest.mark.parametrize("pointer", ["/_meta/uuid", "/uuid", "/deep/er/id"])
def test_stamped_columns_equal_stamped_lines(pointer):
    framing = JsonLines(pointer)
    texts = [text for text in TEXTS if "deep" not in text or pointer != "/deep/er/id"]

    lines = stamped_lines(pa.array(texts), framing, PRODUCER, 10_000, Flags.CONTINUE_TXN).to_pylist()

    for n, (text, line) in enumerate(zip(texts, lines, strict=True)):
        uuid = format_uuid(PRODUCER, 10_000 + n * CLOCK_TICK, Flags.CONTINUE_TXN)
        assert line == JsonTexts(framing).marshal(text, uuid)
        assert json.loads(line)
        assert str(framing.uuid_of(line)) == str(framing.uuid_of(framing.acknowledgement(uuid)))


@given(
    clocks=st.lists(st.integers(0, (1 << 64) - 1), max_size=20),
    flags=st.sampled_from(list(Flags)),
    producer=st.binary(min_size=6, max_size=6),
)
def test_uuid_columns_equal_single_uuids(clocks, flags, producer):
    texts = uuid_texts(ProducerId(producer), np.array(clocks, dtype=np.uint64), flags).to_pylist()

    assert [text.decode() for text in texts] == [format_uuid(ProducerId(producer), clock, flags) for clock in clocks]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a":NaN}', '{"a":1} x', "{'a':1}"])
def test_texts_that_are_not_objects_are_refused(text):
    with pytest.raises(InvalidInput, match="is not"):
        stamped_lines(pa.array(['{"a":1}', text]), JsonLines(), PRODUCER, 1, Flags.CONTINUE_TXN)


def test_known_objects_are_not_checked_and_no_texts_yield_no_lines():
    framing = JsonLines()
    texts = pa.array(['{"a":1}', "{}"])

    assert (
        stamped_lines(texts, framing, PRODUCER, 1, Flags.OUTSIDE_TXN, checked=True).to_pylist()
        == stamped_lines(texts, framing, PRODUCER, 1, Flags.OUTSIDE_TXN).to_pylist()
    )
    assert stamped_lines(pa.array([], pa.string()), framing, PRODUCER, 1, Flags.OUTSIDE_TXN).to_pylist() == []
    with pytest.raises(InvalidInput, match="place for UUIDs"):
        stamped_lines(texts, JsonLines(None), PRODUCER, 1, Flags.OUTSIDE_TXN)
