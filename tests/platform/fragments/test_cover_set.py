"""CoverSet against a brute-force model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.fragments.cover_set import CoverSet


@dataclass(frozen=True, slots=True)
class Span:
    begin: int
    end: int
    tag: int = 0


def spans(*pairs: tuple[int, int]) -> CoverSet[Span]:
    return CoverSet(Span(*pair) for pair in pairs)


def pairs(cover: CoverSet[Span] | list[Span]) -> list[tuple[int, int]]:
    return [(span.begin, span.end) for span in cover]


@st.composite
def span_lists(draw: st.DrawFn) -> list[Span]:
    raw = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=12))
    return [Span(begin, begin + length, tag) for tag, (begin, length) in enumerate(raw)]


def contains(outer: Span, inner: Span) -> bool:
    return outer.begin <= inner.begin and inner.end <= outer.end


def model_add(kept: list[Span], new: Span) -> tuple[list[Span], bool]:
    if new.begin == new.end:
        return kept, False
    same = [span for span in kept if (span.begin, span.end) == (new.begin, new.end)]
    if not same and any(contains(span, new) for span in kept):
        return kept, False
    rest = [span for span in kept if not contains(new, span)]
    return sorted([*rest, new], key=lambda span: span.begin), True


@given(span_lists())
def test_adding_against_a_model(added: list[Span]) -> None:
    cover: CoverSet[Span] = CoverSet()
    model: list[Span] = []
    for span in added:
        model, expected = model_add(model, span)
        assert cover.add(span) is expected
        assert list(cover) == model
    begins, ends = [span.begin for span in cover], [span.end for span in cover]
    assert begins == sorted(set(begins))
    assert ends == sorted(set(ends))
    assert cover.begin_offset == min((span.begin for span in added if span.begin < span.end), default=0)
    assert cover.end_offset == max((span.end for span in added if span.begin < span.end), default=0)


@given(span_lists(), st.integers(0, 30))
def test_querying_against_a_model(added: list[Span], offset: int) -> None:
    cover = CoverSet(added)
    index, found = cover.query(offset)
    covering = [span for span in added if span.begin <= offset < span.end]
    assert found is bool(covering)
    if found:
        assert cover[index].begin <= offset
        assert cover[index].end == max(span.end for span in covering)
    else:
        assert [span.begin > offset for span in cover] == [False] * index + [True] * (len(cover) - index)


@given(span_lists(), span_lists())
def test_difference_against_a_model(left: list[Span], right: list[Span]) -> None:
    mine, theirs = CoverSet(left), CoverSet(right)
    offsets = {offset for span in right for offset in range(span.begin, span.end)}
    expected = [span for span in mine if not set(range(span.begin, span.end)) <= offsets]
    assert mine.difference(theirs) == expected


@given(span_lists())
def test_gaps_are_the_uncovered_ranges(added: list[Span]) -> None:
    cover = CoverSet(added)
    offsets = {offset for span in added for offset in range(span.begin, span.end)}
    missing = {offset for begin, end in cover.gaps() for offset in range(begin, end)}
    assert missing == set(range(cover.begin_offset, cover.end_offset)) - offsets


@pytest.mark.parametrize(
    ("have", "new", "expected", "changed"),
    [
        ([], (3, 3), [], False),
        ([(0, 10)], (10, 20), [(0, 10), (10, 20)], True),
        ([(0, 10)], (0, 20), [(0, 20)], True),
        ([(5, 10)], (0, 20), [(0, 20)], True),
        ([(0, 10)], (2, 8), [(0, 10)], False),
        ([(0, 10)], (0, 8), [(0, 10)], False),
        ([(0, 10)], (2, 10), [(0, 10)], False),
        ([(0, 10), (10, 20), (20, 30)], (5, 25), [(0, 10), (5, 25), (20, 30)], True),
        ([(0, 10), (10, 20), (20, 30)], (10, 30), [(0, 10), (10, 30)], True),
        ([(10, 20)], (0, 5), [(0, 5), (10, 20)], True),
        ([(0, 10), (20, 30)], (8, 22), [(0, 10), (8, 22), (20, 30)], True),
    ],
)
def test_insertions_replace_covered_spans(
    have: list[tuple[int, int]], new: tuple[int, int], expected: list[tuple[int, int]], changed: bool
) -> None:
    cover = spans(*have)
    assert cover.add(Span(*new)) is changed
    assert pairs(cover) == expected


def test_an_equal_span_replaces() -> None:
    cover = CoverSet([Span(0, 10, tag=1), Span(10, 20, tag=1)])
    assert cover.add(Span(0, 10, tag=2))
    assert cover.add(Span(10, 20, tag=2))
    assert [span.tag for span in cover] == [2, 2]


@given(span_lists(), st.integers(1, 5))
def test_growing_a_span_is_the_same_as_adding(added: list[Span], by: int) -> None:
    for before in added:
        grown, model = CoverSet(added), CoverSet(added)
        after = Span(before.begin, before.end + by, tag=99)
        is_last = len(grown) > 0 and grown[len(grown) - 1] is before
        assert grown.grow(before, after) == is_last
        if is_last:
            model.add(after)
        assert grown == model


def test_an_empty_set_covers_nothing() -> None:
    cover: CoverSet[Span] = CoverSet()
    assert (cover.begin_offset, cover.end_offset, len(cover)) == (0, 0, 0)
    assert cover.query(0) == (0, False)
    assert cover.gaps() == []
    assert cover.covers(5, 5)
    assert not cover.covers(0, 1)


def test_sets_with_equal_spans_are_equal() -> None:
    assert spans((0, 1)) == spans((0, 1))
    assert spans((0, 1)) != spans((0, 2))
    assert spans((0, 1)) != [Span(0, 1)]
    assert "Span(begin=0, end=1" in repr(spans((0, 1)))
