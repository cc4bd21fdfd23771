"""Retention's choice of fragments to remove."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto.fragments.retention import GAP_SECONDS, expired

NOW = 1_700_000_000.0
HOUR = 3600.0


def stored(begin: int, end: int, age: float, store: str = "file:///a/") -> Fragment:
    return Fragment("a/journal", begin, end, ZERO_SUM, Codec.NONE, store, int(NOW - age))


def local(begin: int, end: int) -> Fragment:
    return Fragment("a/journal", begin, end, ZERO_SUM, Codec.NONE)


def spans(fragments: Iterable[Fragment]) -> list[tuple[int, int]]:
    return [(fragment.begin, fragment.end) for fragment in fragments]


OLD, YOUNG = 2 * HOUR, HOUR / 2


@pytest.mark.parametrize(
    ("fragments", "removed"),
    [
        ([], []),
        ([stored(0, 10, OLD)], []),
        ([stored(0, 10, OLD), stored(10, 20, OLD)], [(0, 10)]),
        ([stored(10, 20, YOUNG), stored(0, 10, OLD)], [(0, 10)]),
        ([stored(0, 10, YOUNG), stored(10, 20, OLD), stored(20, 30, YOUNG)], []),
        ([stored(0, 10, OLD), local(10, 20)], []),
        ([stored(0, 10, OLD), stored(10, 20, OLD), local(20, 30)], [(0, 10)]),
        ([local(0, 10)], []),
        ([stored(0, 10, OLD), local(10, 20), stored(20, 30, OLD), stored(30, 40, OLD)], [(0, 10)]),
        # Of overlapping fragments, only the larger one may cover an offset.
        ([stored(0, 100, OLD), stored(50, 60, YOUNG), stored(100, 110, YOUNG)], []),
        ([stored(0, 10, OLD), stored(5, 10, YOUNG), stored(10, 20, YOUNG)], [(0, 10)]),
        ([stored(0, 10, OLD), stored(5, 15, YOUNG), stored(10, 20, OLD), stored(20, 30, YOUNG)], [(0, 10)]),
        # Smaller stored parts of a removed fragment are removed with it.
        ([stored(0, 10, OLD), stored(0, 5, OLD), stored(0, 10, OLD, "file:///b/"), stored(10, 20, YOUNG)],
         [(0, 5), (0, 10), (0, 10)]),
        # For some hours, a broker may still store the content of a gap.
        ([stored(0, 10, OLD), stored(20, 30, OLD), stored(30, 40, OLD)], []),
        ([stored(0, 5, OLD), stored(5, 8, OLD), stored(8, 10, OLD), local(20, 30)], [(0, 5), (5, 8)]),
        ([stored(0, 10, OLD), stored(20, 30, GAP_SECONDS), stored(30, 40, OLD)], [(0, 10), (20, 30)]),
        ([stored(20, 30, OLD), stored(30, 40, OLD)], [(20, 30)]),
    ],
)  # fmt: skip
def test_only_fragments_at_the_beginning_are_removed(fragments: list[Fragment], removed: list[tuple[int, int]]) -> None:
    assert spans(expired(fragments, HOUR, NOW)) == removed
    assert expired(fragments, 0, NOW) == expired(fragments, -HOUR, NOW) == []


def test_the_age_is_inclusive() -> None:
    head = stored(10, 20, 0)
    assert expired([stored(0, 10, HOUR), head], HOUR, NOW)
    assert not expired([stored(0, 10, HOUR - 1), head], HOUR, NOW)


@st.composite
def journals(draw: st.DrawFn) -> list[Fragment]:
    """Return fragments that overlap, leave gaps, have any age, and are in several stores or in none."""
    offsets = st.integers(0, 30)
    found = []
    for _ in range(draw(st.integers(0, 12))):
        begin = draw(offsets)
        end = begin + draw(st.integers(1, 12))
        age = draw(st.sampled_from([0, YOUNG, HOUR, OLD, GAP_SECONDS, 10 * GAP_SECONDS]))
        store = draw(st.sampled_from(["", "file:///a/", "file:///b/"]))
        found.append(stored(begin, end, age, store) if store else local(begin, end))
    return found


def covered(fragments: Iterable[Fragment]) -> set[int]:
    return {offset for each in fragments for offset in range(each.begin, each.end)}


@given(journals())
@settings(max_examples=500)
def test_each_removal_leaves_no_new_gap_and_the_same_head(fragments: list[Fragment]) -> None:
    before = covered(fragments)
    left = list(fragments)
    head = max((each.end for each in fragments if each.backing_store), default=0)
    for removed in expired(fragments, HOUR, NOW):
        assert removed.backing_store
        assert NOW - removed.mod_time >= HOUR
        left.remove(removed)
        now = covered(left)
        assert now == {offset for offset in before if offset >= min(now)}
        assert max(now) == max(before)
        assert head == max(each.end for each in left if each.backing_store)


@given(journals())
@settings(max_examples=500)
def test_one_pass_removes_all_removable_fragments(fragments: list[Fragment]) -> None:
    """A second pass after the removal finds nothing more, and old fragments at the beginning are removed."""
    removed = expired(fragments, HOUR, NOW)
    left = list(fragments)
    for each in removed:
        left.remove(each)
    assert expired(left, HOUR, NOW) == []
    if all(each.backing_store and NOW - each.mod_time >= GAP_SECONDS for each in fragments):
        head = max((each.end for each in fragments), default=0)
        assert sorted(spans(removed)) == sorted(span for span in spans(fragments) if span[1] != head)
