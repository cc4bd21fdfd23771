"""The buffers of Arrow arrays, also of slices."""

from itertools import pairwise

import pyarrow as pa
import pytest

from coranto.messages.arrow_values import data_of, joined, value_offsets

TEXTS = ["one", "", "twó", "x" * 100, "end"]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
@pytest.mark.parametrize(("begin", "count"), [(0, 5), (1, 3), (2, 1), (5, 0), (0, 0)])
def test_borders_and_data_of_a_slice_match_its_values(kind, begin, count):
    values = pa.array(TEXTS).cast(kind).slice(begin, count)
    borders, data = value_offsets(values), data_of(values)
    wanted = [text.encode() for text in TEXTS[begin : begin + count]]
    assert [data[a:b].tobytes() for a, b in pairwise(borders)] == wanted
    assert joined(values).tobytes() == b"".join(wanted)


def test_lists_and_maps_have_borders():
    assert value_offsets(pa.array([[1, 2], [], [3]]).slice(1)).tolist() == [2, 2, 3]
    kind = pa.map_(pa.string(), pa.int64())
    assert value_offsets(pa.array([[("a", 1)], [("b", 2), ("c", 3)]], kind)).tolist() == [0, 1, 3]


def test_empty_texts_have_no_data():
    for values in (pa.array(["", ""]), pa.nulls(2, pa.string())):
        assert value_offsets(values).tolist() == [0, 0, 0]
        assert joined(values).tobytes() == b""
