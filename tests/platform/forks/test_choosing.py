"""The content that a fork shares, and the specs of a fork and its source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto import labels
from coranto.errors import ContentGone, InvalidInput
from coranto.forks.choosing import (
    SharedSpan,
    choose,
    complete,
    fork_at,
    is_safe,
    missing,
    new_spec,
    with_hold,
    without_hold,
)
from coranto.fragments.forks import holds_of
from coranto.fragments.fragment import Codec, Fragment
from coranto.specs.durability import ACK_ZONES
from coranto.wire import protocol_pb2 as pb

NOW = 1_000_000.0


def spec(retention: int = 0, **fields: str) -> pb.JournalSpec:
    made = pb.JournalSpec(name="a", labels=labels.label_set(fields), flags=pb.JournalSpec.O_RDONLY)
    made.fragment.retention.FromSeconds(retention)
    return made


def stored(begin: int, end: int, age: float = 0, journal: str = "a") -> Fragment:
    return Fragment(journal, begin, end, bytes(20), Codec.NONE, "s3://b/", int(NOW - age))


def local(begin: int, end: int) -> Fragment:
    return Fragment("a", begin, end, bytes(20), Codec.NONE)


@pytest.mark.parametrize(
    ("fragments", "offset", "shared"),
    [
        ([], 0, (0, 0)),
        ([local(0, 30)], 20, (0, 0)),
        ([stored(0, 10), stored(10, 20), local(20, 30)], 30, (0, 20)),
        ([stored(0, 10), stored(10, 20), local(20, 30)], 20, (0, 20)),
        ([stored(0, 10), stored(10, 20), local(20, 30)], 19, (0, 10)),
        ([stored(5, 10), stored(10, 20)], 5, (5, 5)),
        ([stored(0, 10), stored(8, 20), stored(15, 40)], 30, (0, 20)),  # They overlap.
        # A later fragment may be stored first. The fork must lack neither the content between nor the beginning.
        ([local(0, 10), stored(10, 20), stored(20, 30)], 30, (0, 0)),
        ([stored(0, 10), local(10, 20), stored(20, 30)], 30, (0, 10)),
        ([stored(0, 10), local(5, 20), stored(20, 30)], 30, (0, 10)),
        ([stored(0, 10), stored(20, 30)], 30, (0, 30)),  # The source has no content between.
    ],
)
def test_all_whole_stored_fragments_below_the_offset_are_shared(
    fragments: list[Fragment], offset: int, shared: tuple[int, int]
) -> None:
    head = max((each.end for each in fragments), default=0)
    assert choose(spec(), fragments, offset, head, NOW) == SharedSpan(*shared)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.booleans()), max_size=8), st.integers(0, 50))
def test_a_fork_has_all_content_of_its_source(spans: list[tuple[int, int, bool]], offset: int) -> None:
    """With its shared and its copied content, the fork has each byte of its source."""
    fragments = [(stored if is_stored else local)(begin, begin + size) for begin, size, is_stored in spans]
    known = {at for each in fragments for at in range(each.begin, each.end)}
    if offset < min(known, default=offset):
        return
    shared = choose(spec(), fragments, offset, max(known, default=0), NOW)
    taken = [each for each in fragments if each.backing_store and shared.begin <= each.begin and each.end <= shared.end]
    has = {at for each in taken for at in range(each.begin, each.end)} | set(range(shared.end, offset))
    assert {at for at in known if at < offset} <= has
    assert missing(fragments, taken, shared) is None
    if taken and len({(each.begin, each.end) for each in taken}) == 1:
        assert missing(fragments, [], shared) == shared.begin


def test_fragments_that_retention_may_remove_are_not_shared() -> None:
    ages = [101.0, 99.0, 80.0, 70.0, 1.0]  # Fragments within a quarter of the retention count as old.
    fragments = [stored(10 * n, 10 * n + 10, age) for n, age in enumerate(ages)]
    assert choose(spec(100), fragments, 50, 50, NOW) == SharedSpan(30, 50)
    # Retention keeps the last fragment only until there is another one. So it is copied.
    old = [stored(0, 10, 300), stored(10, 20, 200), local(20, 30)]
    assert choose(spec(100), old, 30, 30, NOW) == SharedSpan(10, 10)
    # Fragments that another fork holds, or that a source shares itself, are not removed.
    held = spec(100, **{labels.FORK_HOLD: "10/other"})
    assert [is_safe(held, each, NOW, 0) for each in old[:2]] == [False, True]
    assert is_safe(spec(100), stored(0, 10, 300, "above"), NOW, 0)


def test_missing_content_cannot_be_forked() -> None:
    with pytest.raises(ContentGone):
        choose(spec(), [stored(10, 20)], 9, 20, NOW)
    with pytest.raises(ContentGone):
        choose(spec(), [], 9, 20, NOW)


@pytest.mark.parametrize("managed_by", sorted(labels.OF_RECORDS))
def test_specs_of_a_fork_and_its_source_have_the_labels_of_the_fork(managed_by: str) -> None:
    source = spec(region="eu", **{ACK_ZONES: "2", labels.STREAM: "shop/s", labels.MANAGED_BY: managed_by})
    fork = fork_at(source, "b", 30, SharedSpan(0, 20))
    made = new_spec(source, fork)
    same = new_spec(source, fork, same_labels=True).labels
    assert (labels.value_of(same, "region"), labels.value_of(same, labels.MANAGED_BY)) == ("eu", "")
    assert dict(labels.as_pairs(made.labels)) == {
        ACK_ZONES: "2",
        labels.FORK_OF: "a",
        labels.FORK_OFFSET: "30",
        labels.FORK_BEGIN: "0",
        labels.FORK_SHARES: "20/a",
        labels.FORK_STATE: labels.FORMING,
    }
    assert (made.suspend.offset, made.flags) == (20, pb.JournalSpec.O_RDWR)
    held = with_hold(with_hold(source, fork), fork)
    assert holds_of(held) == {"b": 0}
    assert without_hold(held, "b") == source
    assert holds_of(with_hold(source, fork_at(source, "b", 30, SharedSpan(20, 20)))) == {}
    done = complete(made, labels.label_set(region="us", run="7"))
    found = dict(labels.as_pairs(done.labels))
    assert (found["region"], found["run"], found.get(labels.FORK_STATE)) == ("us", "7", None)
    with pytest.raises(InvalidInput, match="leave it out"):
        complete(made, labels.label_set({labels.FORK_OF: "z"}))
