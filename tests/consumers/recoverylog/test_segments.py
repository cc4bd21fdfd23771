"""Segments, and sets of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto_consumers.recoverylog.operations import Author
from coranto_consumers.recoverylog.segments import LogSegment, SegmentSet, join

A, B = "a/log", "b/log"


def seg(
    author: int, first: int, last: int, begin: int, end: int = 0, checksum: int | None = None, log: str = A
) -> LogSegment:
    return LogSegment(Author(author), first, begin, first * 0x11 if checksum is None else checksum, last, end, log)


VALID = seg(0xFEFE, 10, 10, 0, 1)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (replace(VALID, author=Author(0)), "author"),
        (replace(VALID, author=Author(1 << 32)), "author"),
        (replace(VALID, first_seq_no=0), "first_seq_no"),
        (replace(VALID, first_seq_no=-1), "first_seq_no"),
        (replace(VALID, first_offset=-1), "first_offset"),
        (replace(VALID, last_seq_no=9), "last_seq_no"),
        (replace(VALID, first_offset=100, last_offset=99), "last_offset"),
        (replace(VALID, log=""), "log"),
    ],
)
def test_impossible_segments_are_refused(wrong: LogSegment, field: str) -> None:
    VALID.validate()
    replace(VALID, last_offset=0).validate()
    with pytest.raises(InvalidInput) as caught:
        SegmentSet([wrong])
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize(
    ("a", "b", "joined"),
    [
        pytest.param(seg(1, 2, 7, 200, 700), seg(1, 4, 9, 400, 901), seg(1, 2, 9, 200, 901), id="overlap"),
        pytest.param(seg(1, 2, 7, 200, 701), seg(1, 3, 6, 300), seg(1, 2, 7, 200, 701), id="covered"),
        pytest.param(seg(1, 2, 4, 200, 401), seg(1, 6, 7, 600), None, id="disjoint"),
        pytest.param(seg(1, 2, 7, 200, 701), seg(1, 4, 7, 400), seg(1, 2, 7, 200, 701), id="equal right"),
        pytest.param(seg(1, 2, 7, 200, 701), seg(1, 2, 9, 210, 901), seg(1, 2, 9, 210, 901), id="equal left"),
        pytest.param(seg(1, 2, 7, 190, 701), seg(1, 2, 7, 200), seg(1, 2, 7, 200, 701), id="identity"),
        pytest.param(seg(1, 2, 4, 200, 401), seg(1, 5, 7, 500, 701), seg(1, 2, 7, 200, 701), id="adjacent"),
        pytest.param(seg(1, 2, 4, 200, 401), seg(2, 5, 7, 500, 701), None, id="adjacent, other author"),
        pytest.param(seg(1, 2, 4, 200, 401), seg(1, 5, 7, 500, 701, log=B), None, id="adjacent, other log"),
    ],
)
def test_adjacent_and_overlapping_segments_are_joined(a: LogSegment, b: LogSegment, joined: LogSegment | None) -> None:
    assert join(a, b) == joined
    assert join(b, a) == joined


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        (seg(1, 2, 7, 200, 701), seg(1, 4, 9, 100, 901), "first offsets"),
        (seg(1, 2, 7, 200, 701), seg(1, 4, 9, 400, 700), "last offsets"),
        (seg(1, 2, 7, 200, 701), seg(1, 4, 7, 400, 702), "last offsets"),
        (seg(1, 2, 7, 200), seg(1, 4, 9, 400, 901), "follows one without"),
        (seg(1, 2, 7, 200, 701), seg(2, 4, 9, 400, 901), "different authors"),
        (seg(1, 2, 7, 200, 701), seg(1, 4, 9, 400, 901, log=B), "different logs"),
        (seg(1, 2, 7, 200, 701), seg(1, 2, 9, 210, 901, checksum=0xBAD), "different checksums"),
        (seg(1, 2, 4, 200), seg(1, 5, 7, 500, log=B), "another log"),
    ],
)
def test_contradictory_segments_are_refused(a: LogSegment, b: LogSegment, problem: str) -> None:
    for first, second in ((a, b), (b, a)):
        with pytest.raises(InvalidInput, match=problem):
            join(first, second)


MODEL = (
    seg(0xA, 5, 10, 500, 1001),
    seg(0xB, 11, 11, 1100, 1101),
    seg(0xB, 13, 15, 1300, 1501),
    seg(0xC, 16, 20, 10, 51, log=B),
    seg(0xC, 22, 24, 60, log=B),
)


@given(st.permutations([*MODEL, seg(0xB, 12, 12, 1200, 1201), seg(0xC, 23, 30, 65, log=B), seg(0xA, 5, 6, 500, 601)]))
def test_the_order_of_additions_does_not_matter(order: list[LogSegment]) -> None:
    assert SegmentSet(order).segments == (
        MODEL[0],
        seg(0xB, 11, 15, 1100, 1501),
        MODEL[3],
        seg(0xC, 22, 30, 60, log=B),
    )


def test_a_refused_addition_changes_nothing() -> None:
    segments = SegmentSet(MODEL)
    with pytest.raises(InvalidInput):
        segments.add(seg(0xD, 9, 14, 900, 1450))
    assert segments.segments == MODEL


@pytest.mark.parametrize(
    ("log", "begin", "end", "found"),
    [
        (A, 0, 500, []),
        (A, 0, 501, [0]),
        (A, 1000, 1100, [0]),
        (A, 1001, 1100, []),
        (A, 1001, 1302, [1, 2]),
        (A, 1501, 9999, []),
        (B, 50, 61, [3, 4]),
        (B, 5000, 6000, [4]),
        ("c/log", 0, 9999, []),
    ],
)
def test_intersections(log: str, begin: int, end: int, found: list[int]) -> None:
    assert SegmentSet(MODEL).intersect(log, begin, end) == [MODEL[i] for i in found]


def test_a_range_is_not_backwards() -> None:
    with pytest.raises(InvalidInput):
        SegmentSet(MODEL).intersect(A, 10, 9)
