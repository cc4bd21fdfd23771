"""Mapping columns of keys gives each key the same journal as mapping it alone."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages.columnar_mapping import fnv1a32_column, mapped
from coranto.messages.mapping import fnv1a32, modulo, rendezvous

NAMES = ["a/one", "a/two", "b/three", "c/four"]


@given(keys=st.lists(st.binary(max_size=20), max_size=30), begin=st.integers(0, 5), count=st.integers(1, 4))
def test_columns_are_mapped_like_single_keys(keys, begin, count):
    journals, column = NAMES[:count], pa.array(keys, pa.binary()).slice(begin)
    keys = keys[begin:]

    assert fnv1a32_column(column).tolist() == [fnv1a32(key) for key in keys]
    assert [journals[n] for n in mapped(column, journals, "rendezvous")] == [rendezvous(key, journals) for key in keys]
    assert [journals[n] for n in mapped(column, journals, "modulo")] == [modulo(key, journals) for key in keys]


def test_mapping_without_journals_is_refused():
    with pytest.raises(InvalidInput, match="no journal"):
        mapped(pa.array([b"a"]), [], "modulo")
