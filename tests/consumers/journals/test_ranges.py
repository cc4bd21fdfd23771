"""Ranges: every byte of a plan belongs to exactly one slice of any split."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto_consumers.journals.ranges import Range, ReadPlan, plan_slices, plan_transaction, split

offsets = st.integers(0, 10_000)
journals = st.dictionaries(
    st.sampled_from(["a/one", "a/two", "a/three", "b/four", "b/five"]),
    st.tuples(offsets, offsets).map(lambda pair: (min(pair), max(pair))),
)


@given(journals, st.integers(1, 20_000))
def test_a_transaction_is_bounded_and_advances_every_journal(heads, max_bytes):
    ranges = plan_transaction(heads, max_bytes)

    assert [r.journal for r in ranges] == sorted(j for j, (begin, head) in heads.items() if head > begin)
    assert sum(r.length for r in ranges) <= max(max_bytes, len(ranges))
    for r in ranges:
        begin, head = heads[r.journal]
        assert r.begin == begin < r.end <= head == r.limit
        assert r.aligned


@given(journals)
def test_a_transaction_with_a_sufficient_limit_reads_everything(heads):
    total = sum(head - begin for begin, head in heads.values())

    assert sum(r.length for r in plan_transaction(heads, max(total, 1))) == total


def test_the_unused_share_of_a_small_journal_goes_to_others():
    ranges = plan_transaction({"small": (0, 10), "large": (100, 10_000)}, 1_010)

    assert [(r.journal, r.begin, r.end) for r in ranges] == [("large", 100, 1_100), ("small", 0, 10)]


@given(offsets, st.integers(0, 5_000), st.integers(1, 700), st.lists(offsets).map(sorted))
def test_parts_of_a_split_are_adjacent_and_bounded(begin, length, max_bytes, cuts):
    whole = Range("j", begin, begin + length, begin + length)
    parts = split(whole, max_bytes, cuts)

    assert [part.begin for part in parts] == [begin, *(part.end for part in parts[:-1])][: len(parts)]
    assert sum(part.length for part in parts) == length
    assert all(0 < part.length <= max_bytes for part in parts)
    assert [part.aligned for part in parts] == [True, *[False] * (len(parts) - 1)][: len(parts)]


def test_a_split_prefers_fragment_borders():
    parts = split(Range("j", 0, 300, 300), 100, cuts=[10, 90, 160, 290])

    assert [(part.begin, part.end) for part in parts] == [(0, 90), (90, 160), (160, 260), (260, 300)]


def test_a_part_may_be_larger_to_end_with_its_fragment_or_range():
    parts = split(Range("j", 0, 310, 310), 100, cuts=[0, 104, 208], slack=10)
    assert [(part.begin, part.end) for part in parts] == [(0, 104), (104, 208), (208, 310)]

    [one, two] = plan_slices(
        [Range("j", 0, 207, 207)], max_bytes=200, max_slices=2, cuts={"j": [0, 105]}, worthwhile_bytes=1
    )
    assert [(part.begin, part.end) for part in (*one, *two)] == [(0, 105), (105, 207)]


@given(journals, st.integers(1, 20_000), st.integers(1, 5_000), st.integers(1, 8))
def test_slices_hold_every_range_once_and_are_few(heads, max_transaction, max_bytes, max_slices):
    ranges = plan_transaction(heads, max_transaction)
    slices = plan_slices(ranges, max_bytes=max_bytes, max_slices=max_slices)

    assert len(slices) <= max_slices
    assert all(slices)
    parts = sorted(part for slice_ in slices for part in slice_)
    for whole in ranges:
        mine = [part for part in parts if part.journal == whole.journal]
        assert (mine[0].begin, mine[-1].end) == (whole.begin, whole.end)
        assert all(left.end == right.begin for left, right in pairwise(mine))


def test_small_journals_share_a_slice_and_a_large_one_is_split():
    ranges = [Range(f"small/{i}", 0, 10, 10) for i in range(20)] + [Range("large", 0, 1_000, 1_000)]
    slices = plan_slices(ranges, max_bytes=400, max_slices=4, worthwhile_bytes=1)

    assert len(slices) == 4
    assert max(sum(part.length for part in slice_) for slice_ in slices) <= 2 * 300


def test_small_ranges_are_not_split():
    ranges = [Range("a", 0, 5_000, 5_000), Range("b", 0, 20_000, 20_000)]

    assert len(plan_slices(ranges, max_bytes=1 << 20, max_slices=4)) == 1
    assert len(plan_slices(ranges, max_bytes=1 << 20, max_slices=4, worthwhile_bytes=10_000)) == 3


def test_a_plan_numbers_its_ranges_in_order():
    ranges = [Range("j/b", 3, 500, 600), Range("j/a", 0, 100, 100)]
    slices = plan_slices(ranges, max_bytes=200, max_slices=9)
    plan = ReadPlan(tuple(slices), 7, {"j/a": {"010203040506": 5}})

    assert list(plan.numbers.values()) == list(range(7, 7 + len(plan.numbers)))
    assert list(plan.numbers) == sorted(plan.numbers)


def test_sizes_must_be_positive():
    with pytest.raises(InvalidInput, match="max_transaction_bytes"):
        plan_transaction({"j": (0, 1)}, 0)
    with pytest.raises(InvalidInput, match="maxBytesPerPartition"):
        split(Range("j", 0, 1, 1), 0)
    with pytest.raises(InvalidInput, match="max_slices"):
        plan_slices([Range("j", 0, 1, 1)], max_bytes=1, max_slices=0)
