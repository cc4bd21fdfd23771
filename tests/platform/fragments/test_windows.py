"""Windows of offsets: no gap, no overlap, bounded in number, and names with a stable meaning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptData, InvalidInput
from coranto.fragments.windows import Span, Stored, Window, check, extend, find, merge, numbers_of, positions

NAMES = ("a/one", "a/two", "a/three")


@st.composite
def growth(draw: st.DrawFn) -> list[dict[str, Stored]]:
    """Return contents of some journals, repeatedly while they grow, and while new journals join them."""
    steps: list[dict[str, Stored]] = []
    begins = {name: draw(st.integers(0, 50)) for name in NAMES}
    ends: dict[str, list[int]] = {}
    for _ in range(draw(st.integers(1, 6))):
        for name in draw(st.sets(st.sampled_from(NAMES))):
            grown = ends.setdefault(name, [])
            for length in draw(st.lists(st.integers(1, 40), max_size=6)):
                grown.append((grown[-1] if grown else begins[name]) + length)
        steps.append(
            {name: Stored(begins[name], tuple(each), max([begins[name], *each]), 7) for name, each in ends.items()}
        )
    return steps


@given(growth(), st.integers(1, 60), st.integers(2, 8), st.booleans())
def test_windows_cover_whole_fragments_without_gaps_in_a_bounded_number(
    steps: list[dict[str, Stored]], target: int, most: int, partial: bool
) -> None:
    windows: list[Window] = []
    issued: dict[str, Window] = {}
    for now, stored in enumerate(steps):
        windows += (made := extend(windows, stored, target=target, now=float(now), partial=partial))
        for window in made:
            largest = max(
                end - begin
                for name in window.spans
                for begin, end in zip((stored[name].begin, *stored[name].ends), stored[name].ends, strict=False)
            )
            assert window.length <= max(target, largest)
        issued |= {window.name: window for window in made}
        before = positions(windows)
        windows = merge(windows, most)
        issued |= {window.name: window for window in windows}

        check(windows)
        assert len(windows) <= most
        assert {name: span.end for name, span in positions(windows).items()} == {
            name: span.end for name, span in before.items()
        }
        for name, span in positions(windows).items():
            assert span.end in stored[name].ends
            assert min(window.spans[name].begin for window in windows if name in window.spans) == stored[name].begin
        uncovered = sum(
            each.ends[-1] - (before[name].end if name in before else each.begin)
            for name, each in stored.items()
            if each.ends
        )
        assert uncovered == 0 if partial else uncovered < target
        for name, once in issued.items():
            now_in = find(windows, name)
            assert now_in.first <= once.first <= once.last <= now_in.last
            for journal, span in once.spans.items():
                assert now_in.spans[journal].begin <= span.begin
                assert span.end <= now_in.spans[journal].end
            if now_in.name == name:
                assert now_in.spans == once.spans


@given(growth(), st.integers(1, 60), st.data())
def test_windows_do_not_depend_on_the_number_of_extensions(
    steps: list[dict[str, Stored]], target: int, data: st.DataObject
) -> None:
    last = steps[-1]
    once = extend([], last, target=target, now=0.0)
    cut = data.draw(st.integers(0, len(once)))
    assert once == [*once[:cut], *extend(once[:cut], last, target=target, now=0.0)]
    assert once[:cut] == extend([], last, target=target, now=0.0, limit=cut)


def test_merging_joins_the_smallest_old_neighbours_and_no_new_windows() -> None:
    sizes = (20, 1, 1, 9, 1, 1, 1, 1)
    windows, at = [], 0
    for number, size in enumerate(sizes, 1):
        windows.append(Window(number, number, {"j": Span(at, at + size)}, float(number)))
        at += size
    merged = merge(windows, 6)
    assert [window.name for window in merged] == [
        "00000001", "00000002-00000003", "00000004-00000005", "00000006", "00000007", "00000008",
    ]  # fmt: skip
    assert merged[1] == Window(2, 3, {"j": Span(20, 22)}, 3.0)


def test_a_journal_that_joins_later_starts_a_merged_window_at_its_own_begin() -> None:
    early = Window(1, 1, {"a": Span(0, 4)}, 1.0)
    late = Window(2, 2, {"a": Span(4, 6), "b": Span(3, 9)}, 2.0)
    assert early.merged(late) == Window(1, 2, {"a": Span(0, 6), "b": Span(3, 9)}, 2.0)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (Stored(0, (8,), 8, revision=2), "deleted and created again"),
        (Stored(0, (8,), 8, revision=1), "lost content"),
        (Stored(12, (20,), 20, revision=1), "the content from 10 to 12 is gone"),
    ],
)
def test_lost_content_is_an_error_and_leaves_no_gap(stored: Stored, message: str) -> None:
    windows = [Window(1, 1, {"j": Span(0, 10, 1)}, 0.0)]
    with pytest.raises(CorruptData, match=message):
        extend(windows, {"j": stored}, target=1, now=0.0)


@pytest.mark.parametrize("name", ["", "12", "00000000", "00000009-00000003", "00000001-", "x", "٠٠٠٠٠٠٠١"])
def test_invalid_names_of_windows_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="not the name of a window"):
        numbers_of(name)


@pytest.mark.parametrize("name", ["00000003", "00000001-00000002", "00000002-00000003"])
def test_a_name_that_no_window_covers_is_not_found(name: str) -> None:
    windows = [Window(1, 1, {}, 0.0), Window(2, 2, {}, 0.0)]
    with pytest.raises(InvalidInput, match="there is no window"):
        find(windows, name)


@pytest.mark.parametrize(
    "windows",
    [
        [Window(2, 2, {"j": Span(0, 1)})],
        [Window(1, 1, {"j": Span(0, 2)}), Window(2, 2, {"j": Span(1, 3)})],
        [Window(1, 1, {"j": Span(0, 2)}), Window(2, 2, {"j": Span(3, 4)})],
        [Window(1, 1, {"j": Span(2, 2)})],
    ],
)
def test_gaps_and_overlaps_are_found(windows: list[Window]) -> None:
    with pytest.raises(CorruptData):
        check(windows)
