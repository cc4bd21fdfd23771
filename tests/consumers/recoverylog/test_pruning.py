"""The choice of a recovery log's dead fragments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto_consumers.recoverylog import Author, Fnode, Hints, LiveFnode, LogSegment
from coranto_consumers.recoverylog.hint_store import StoredHints
from coranto_consumers.recoverylog.pruning import ShardHints, is_dead, live_segments

A, B = "log/a", "log/b"


def segment(first: int, last: int, begin: int, end: int, log: str = A, author: int = 7) -> LogSegment:
    return LogSegment(Author(author), first, begin, first, last, end, log)


def hints(*segments: LogSegment, log: str = A) -> Hints:
    return Hints(log, tuple(LiveFnode(Fnode(each.first_seq_no), (each,)) for each in segments))


def shard(name: str, log: str, primary: Hints | None, *backups: Hints | None) -> ShardHints:
    return ShardHints(name, log, StoredHints(primary, backups))


def fragment(begin: int, end: int) -> Fragment:
    return Fragment(A, begin, end, ZERO_SUM, Codec.NONE)


OLD = segment(10, 20, 100, 200)
MIDDLE = segment(40, 50, 400, 500)
LAST = segment(60, 70, 600, 0)


@pytest.mark.parametrize(
    ("begin", "end", "dead"),
    [
        (0, 100, True),
        (0, 101, False),
        (199, 300, False),
        (200, 400, True),
        (200, 401, False),
        (450, 460, False),
        (500, 600, True),
        (500, 601, False),
        (5000, 6000, False),
    ],
)
def test_fragments_without_live_content_are_dead(begin: int, end: int, dead: bool) -> None:
    live = live_segments([shard("s", A, hints(OLD, MIDDLE, LAST))])
    assert live.kept == {}
    assert is_dead(fragment(begin, end), live.by_log[A]) == dead


def test_content_after_the_last_segment_is_live_even_if_the_segment_has_an_end() -> None:
    live = live_segments([shard("s", A, hints(OLD, MIDDLE))])
    assert not is_dead(fragment(5000, 6000), live.by_log[A])
    assert is_dead(fragment(200, 400), live.by_log[A])


def test_content_referenced_by_any_hints_is_kept() -> None:
    shards = [shard("s", A, hints(LAST), hints(MIDDLE, LAST), hints(LAST))]
    assert not is_dead(fragment(400, 500), live_segments(shards).by_log[A])
    assert is_dead(fragment(100, 200), live_segments(shards).by_log[A])
    # Another shard's history is a fork of this log.
    fork = shard("t", B, hints(OLD, segment(80, 90, 0, 0, B, author=8), log=B))
    live = live_segments([*shards, fork])
    assert not is_dead(fragment(100, 200), live.by_log[A])
    assert is_dead(fragment(200, 400), live.by_log[A])
    assert [each.first_offset for each in live.by_log[B]] == [0]


@pytest.mark.parametrize(
    ("primary", "backup"),
    [(None, hints(LAST)), (hints(LAST), None), (None, None), (Hints(A), hints(LAST)), (hints(LAST), Hints(A))],
)
def test_a_log_is_not_pruned_until_all_hints_have_files(primary: Hints | None, backup: Hints | None) -> None:
    live = live_segments([shard("good", A, hints(LAST), hints(LAST)), shard("s", A, primary, backup)])
    assert set(live.kept) == {A}
    assert "shard s" in live.kept[A]


def test_segments_of_different_histories_need_not_agree() -> None:
    other = replace(LAST, author=Author(9), first_offset=50)
    assert not is_dead(fragment(0, 100), live_segments([shard("s", A, hints(LAST), hints(other))]).by_log[A])


def test_a_log_named_only_in_hints_is_not_pruned() -> None:
    """Any client that may apply a shard may give it hints, and name any journal in them."""
    other = "flights/events"
    hostile = hints(segment(1, 2, 10**9, 10**9 + 1, other), segment(10, 20, 0, 0), log=A)
    live = live_segments([shard("s", A, hostile, hints(LAST))])
    assert set(live.kept) == {other}
    assert "shard s" in live.kept[other]


def test_a_forked_log_is_pruned_only_together_with_the_shard_of_the_original() -> None:
    fork = hints(OLD, segment(80, 90, 0, 0, B, author=8), log=B)
    assert live_segments([shard("s", A, hints(LAST)), shard("t", B, fork)]).kept == {}
    assert set(live_segments([shard("t", B, fork)]).kept) == {A}
