"""The labels of forks, and the rule for the location of a journal's fragments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import InvalidInput
from coranto.fragments.forks import (
    Fork,
    Share,
    first_offset,
    folders_of,
    fork_labels,
    fork_of,
    held_from,
    hold_for,
    holds_of,
    shares_of,
    without_expired_shares,
)
from coranto.fragments.fragment import MAX_OFFSET, Codec, Fragment
from coranto.fragments.retention import expired
from coranto.wire import protocol_pb2 as pb

NOW = 1_000_000.0


def spec(name: str, *pairs: tuple[str, str], retention: int = 0) -> pb.JournalSpec:
    made = pb.JournalSpec(name=name, labels=labels.label_set(pairs))
    made.fragment.retention.FromSeconds(retention)
    return made


def stored(journal: str, begin: int, end: int, age: int = 0) -> Fragment:
    return Fragment(journal, begin, end, bytes(20), Codec.NONE, "s3://b/", int(NOW) - age)


@given(st.integers(0, MAX_OFFSET), st.integers(0, MAX_OFFSET), st.integers(0, MAX_OFFSET), st.booleans())
def test_labels_describe_a_fork_completely(begin: int, end: int, offset: int, forming: bool) -> None:
    begin, end, offset = sorted((begin, end, offset))
    shares = shares_of(spec("a/b"), begin, end)
    made = Fork("a/b", "c=%/d", offset, end if shares else begin, begin, shares, forming)
    found = spec("c=%/d", *fork_labels(made))
    assert fork_of(found) == made
    assert first_offset(found) == begin
    assert holds_of(spec("a/b", hold_for(made))) == {"c=%/d": begin}
    assert fork_of(spec("a/b", hold_for(made))) is None


def test_a_fork_of_a_fork_shares_the_fragments_of_both() -> None:
    first = Fork("a", "b", 120, 100, 10, shares_of(spec("a"), 10, 100))
    source = spec("b", *fork_labels(first))
    assert shares_of(source, 20, 90) == (Share("a", 20, 90),)
    assert shares_of(source, 20, 100) == (Share("a", 20, 100),)
    assert shares_of(source, 20, 200) == (Share("a", 20, 100), Share("b", 100, 200))
    assert shares_of(source, 150, 200) == (Share("b", 150, 200),)


def test_only_whole_fragments_below_the_shared_end_are_used() -> None:
    first = Fork("a", "b", 120, 100, 10, shares_of(spec("a"), 10, 100))
    own, of_source = folders_of(spec("b", *fork_labels(first)))
    assert own == Share("b", 100, MAX_OFFSET)
    assert of_source.journal == "a"
    spans = [(10, 50), (50, 100), (0, 50), (50, 101), (100, 120)]
    assert [of_source.contains(stored("a", *span)) for span in spans] == [True, True, False, False, False]
    assert folders_of(spec("a")) == (Share("a", 0, MAX_OFFSET),)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 300)), max_size=5), st.integers(0, 300))
def test_each_offset_belongs_to_one_folder(chain: list[tuple[str, int]], begin: int) -> None:
    """For any chain of forks: files of an earlier journal in a folder are not content at offsets of another folder."""
    source = spec("first")
    for number, (name, end) in enumerate(chain):
        shares = shares_of(source, begin, max(begin, end))
        end = shares[-1].end if shares else begin
        source = spec(f"{name}{number}", *fork_labels(Fork(source.name, f"{name}{number}", end, end, begin, shares)))
        own, *others = folders_of(source)
        assert own == Share(source.name, end, MAX_OFFSET)
        assert [each.begin for each in others] == [begin, *(each.end for each in others)][:-1]
        begin = own.begin if not others else begin
    own, *others = folders_of(source)
    assert not any(each.contains(stored(each.journal, own.begin - 5, own.begin + 5)) for each in (own, *others))


def test_a_hold_keeps_all_content_from_its_offset() -> None:
    old = [stored("a", begin, begin + 10, age=100) for begin in range(0, 50, 10)] + [stored("a", 50, 60)]
    holds = [(labels.FORK_HOLD, "20/f/one"), (labels.FORK_HOLD, "30/f/two")]
    assert held_from(spec("a", *holds)) == 20
    assert [each.end for each in expired(old, 50, NOW, held_from(spec("a", *holds)))] == [10, 20]
    assert [each.end for each in expired(old, 50, NOW, held_from(spec("a")))] == [10, 20, 30, 40, 50]
    assert held_from(spec("a", (labels.FORK_HOLD, "no-hold"))) == 0  # The offset to keep is unknown.
    assert expired(old, 50, NOW, 0) == []
    assert held_from(spec("a", (labels.FORK_STATE, labels.FORMING))) == 0


def test_a_fork_omits_shared_fragments_older_than_its_own_retention() -> None:
    first = Fork("a", "b", 30, 30, 0, shares_of(spec("a"), 0, 30))
    fragments = [stored("a", 0, 10, 100), stored("a", 10, 20, 10), stored("b", 30, 40), stored("b", 20, 30, 100)]
    assert without_expired_shares(spec("b", *fork_labels(first), retention=50), fragments, NOW) == fragments[1:]
    assert without_expired_shares(spec("b", *fork_labels(first)), fragments, NOW) == fragments
    plain = [stored("b", 0, 10, 100), stored("b", 10, 20, 100)]
    # Only retention removes a journal's own fragments.
    assert without_expired_shares(spec("b", retention=50), plain, NOW) == plain


def test_a_gap_left_by_a_forks_retention_keeps_no_shared_fragment() -> None:
    fork = Fork("a", "b", 40, 20, 0, (Share("a", 0, 20),))
    old = [stored("a", 0, 10, 90), stored("a", 10, 20, 80)]
    young = stored("b", 30, 40)  # [20, 30) was old and was removed, too.
    assert without_expired_shares(spec("b", *fork_labels(fork), retention=50), [*old, young], NOW) == [young]
    held = spec("b", *fork_labels(fork), (labels.FORK_HOLD, "10/c"), retention=50)
    assert without_expired_shares(held, [*old, young], NOW) == [old[1], young]


@pytest.mark.parametrize(
    "pairs",
    [
        [(labels.FORK_OF, "a")],
        [(labels.FORK_OF, "a"), (labels.FORK_OFFSET, "-1"), (labels.FORK_BEGIN, "0")],
        [(labels.FORK_OF, "a"), (labels.FORK_OFFSET, "1"), (labels.FORK_BEGIN, "٣")],
        [(labels.FORK_OF, "a"), (labels.FORK_OFFSET, "9" * 19), (labels.FORK_BEGIN, "0")],
        [(labels.FORK_OF, "a"), (labels.FORK_OFFSET, "1"), (labels.FORK_BEGIN, "0"), (labels.FORK_SHARES, "1")],
    ],
)
def test_invalid_fork_labels_are_refused(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidInput):
        folders_of(spec("b", *pairs))
    assert first_offset(spec("b", *pairs)) == 0
