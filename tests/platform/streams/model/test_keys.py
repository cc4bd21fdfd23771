"""Routing keys hash as in Pravega, and ranges of keys cover exactly their keys."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.streams import KEY_SPACE, KeyRange, key_hash
from coranto.streams.model.keys import key_hashes

VECTORS = {
    "": 0.24117842791623523,
    "a": 0.9433912753816884,
    "key": 0.8449093464660018,
    "customer-1": 0.16527509990982603,
    "routingKey": 0.9115813645916913,
    "žluťoučký": 0.9142005645894957,
    "🙂": 0.25121261457191935,
}


def ranges(least: int = 1) -> st.SearchStrategy[KeyRange]:
    edges = st.lists(st.integers(0, KEY_SPACE), min_size=2, max_size=2, unique=True).map(sorted)
    return edges.map(lambda pair: KeyRange(*pair)).filter(lambda keys: keys.width >= least)


@pytest.mark.parametrize(("key", "fraction"), VECTORS.items())
def test_keys_hash_as_in_pravega(key: str, fraction: float) -> None:
    assert key_hash(key) / KEY_SPACE == fraction


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(), max_size=40))
def test_any_text_is_a_key(key: str) -> None:
    assert key_hash(key) == key_hash(key)
    assert key_hash(key) in KeyRange.FULL


def test_text_that_is_not_unicode_is_a_key() -> None:
    assert key_hash("\ud800") != key_hash("\udfff")


def test_every_length_of_the_last_block_counts() -> None:
    # Blocks have 8 code units. These texts differ in the padding of the last one.
    assert len({key_hash("x" * length) for length in range(40)}) == 40


@pytest.mark.parametrize("has_numpy", [True, False])
def test_hashing_many_keys_equals_hashing_each(monkeypatch: pytest.MonkeyPatch, has_numpy: bool) -> None:
    if not has_numpy:
        monkeypatch.setitem(sys.modules, "coranto.streams.model.columnar_keys", None)
    chosen = random.Random(3)
    keys = [chosen.choice(["", "customer-", "é", "🙂", "\udcff"]) + str(chosen.randrange(500)) for _ in range(3000)]
    for count in (0, 1, 100, 3000):
        assert key_hashes(keys[:count]) == {key: key_hash(key) for key in keys[:count]}


def test_keys_spread_over_the_space() -> None:
    places = [key_hash(f"customer-{number}") for number in range(1000)]
    counts = [sum(place in part for place in places) for part in KeyRange.FULL.split(10)]
    assert sum(counts) == 1000
    assert 60 < min(counts) <= max(counts) < 140  # 100 each, within four standard deviations.


@settings(max_examples=50, deadline=None)
@given(ranges(), st.integers(0, KEY_SPACE - 1))
def test_a_range_is_half_open(keys: KeyRange, place: int) -> None:
    assert keys.contains(place) == (keys.begin <= place < keys.end) == (place in keys)
    assert keys.begin in keys
    assert keys.end not in keys
    assert "key" not in keys


@settings(max_examples=50, deadline=None)
@given(ranges(least=64), st.integers(1, 64), st.integers(0, KEY_SPACE - 1))
def test_parts_of_a_split_cover_the_range_exactly(keys: KeyRange, parts: int, place: int) -> None:
    found = keys.split(parts)
    assert sum(place in part for part in found) == (place in keys)
    assert [part.begin for part in found[1:]] == [part.end for part in found[:-1]]
    assert max(part.width for part in found) - min(part.width for part in found) <= 1
    assert KeyRange.merge(reversed(found)) == keys
    assert sum(part.share for part in found) == pytest.approx(keys.share)


@settings(max_examples=50, deadline=None)
@given(ranges(), ranges())
def test_ranges_overlap_if_they_share_a_place(one: KeyRange, other: KeyRange) -> None:
    assert one.overlaps(other) == (max(one.begin, other.begin) < min(one.end, other.end)) == other.overlaps(one)


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (5, 5), (6, 5), (-1, 5), (0, KEY_SPACE + 1)])
def test_invalid_ranges_are_refused(begin: int, end: int) -> None:
    with pytest.raises(InvalidInput, match="not a range of keys"):
        KeyRange(begin, end)


def test_impossible_splits_and_merges_are_refused() -> None:
    with pytest.raises(InvalidInput, match="1 to 3"):
        KeyRange(5, 8).split(4)
    with pytest.raises(InvalidInput, match="not adjacent"):
        KeyRange.merge([KeyRange(0, 5), KeyRange(6, 8)])
    with pytest.raises(InvalidInput, match="not adjacent"):
        KeyRange.merge([KeyRange(0, 5), KeyRange(4, 8)])
    with pytest.raises(InvalidInput, match="cannot merge no ranges"):
        KeyRange.merge([])
