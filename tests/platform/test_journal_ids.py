"""Ids of journals: two ids determine the content that both journals have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.journal_ids import (
    EVERYTHING,
    fallen_id,
    first_id,
    held_through,
    is_same,
    latest_id,
    same_journal,
    shared_through,
)
from coranto.names import PATH_SYMBOLS, validate_token

FIRST = first_id("5d3c7a", 0x1F)
ONCE = fallen_id(FIRST, 4096, 0x2B)
TWICE = fallen_id(ONCE, 512, 0x9C)
AGAIN = fallen_id(FIRST, 4096, 0x30)
"""The id in an etcd that was restored from before the first fall."""


def test_ids_contain_the_offset_of_each_fall_of_the_head() -> None:
    assert (FIRST, ONCE, TWICE) == ("5d3c7a-1f", "5d3c7a-1f_4096.2b", "5d3c7a-1f_4096.2b_512.9c")
    assert (first_id("", 7), fallen_id("", 7, 8)) == ("", "")
    validate_token("label value", f"{TWICE}/shop/orders", 1, 512, symbols=PATH_SYMBOLS)


@pytest.mark.parametrize(
    ("known", "found", "through"),
    [
        (FIRST, FIRST, EVERYTHING),
        (TWICE, TWICE, EVERYTHING),
        ("", FIRST, EVERYTHING),
        (FIRST, "", EVERYTHING),
        (FIRST, ONCE, 4096),
        (ONCE, FIRST, 4096),  # A broker that has not seen the fall yet.
        (ONCE, TWICE, 512),
        (FIRST, TWICE, 512),
        (ONCE, AGAIN, 4096),
        (TWICE, AGAIN, 512),
        (FIRST, first_id("5d3c7a", 0x20), None),
        (FIRST, first_id("5d3c7b", 0x1F), None),
        (ONCE, f"{first_id('5d3c7b', 0x1F)}_4096.2b", None),
        (FIRST, f"{FIRST}_what", None),
        ("another", "others", None),
    ],
)
def test_a_position_is_valid_up_to_the_lowest_fall_of_the_head(known: str, found: str, through: int | None) -> None:
    assert shared_through(known, found) == shared_through(found, known) == through
    assert is_same(known, through or 0, found) == (through is not None)
    if through != EVERYTHING:
        assert not is_same(known, (through or 0) + 1, found)
        assert held_through(known, 1 << 40, found) == (through or 0)
        assert not same_journal(7, known, (through or 0) + 1, 7, found)
    assert held_through(known, 3, found) == (0 if through is None or "" in (known, found) else 3)


def test_without_ids_create_revisions_decide() -> None:
    assert same_journal(7, "", 5, 7, FIRST)
    assert same_journal(0, FIRST, 5, 7, "")
    assert not same_journal(7, FIRST, 5, 8, "")
    assert same_journal(7, FIRST, 5, 8, FIRST), "etcd was restored"


def test_a_position_gets_the_later_id() -> None:
    assert latest_id(FIRST, ONCE) == latest_id(ONCE, FIRST) == ONCE
    assert latest_id("", ONCE) == latest_id(ONCE, "") == ONCE
    assert latest_id(ONCE, first_id("a", 1)) == first_id("a", 1)


def test_after_many_falls_an_id_restarts_and_earlier_positions_are_invalid() -> None:
    found = FIRST
    ids = [found := fallen_id(found, 100, revision) for revision in range(1, 100)]
    assert len(set(ids)) == 99
    assert max(map(len, ids)) < 150
    assert not is_same(ids[0], 1, ids[-1])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=12))
def test_an_offset_is_valid_exactly_if_its_content_was_kept(falls: list[tuple[int, int]]) -> None:
    """A journal of numbered bytes: each fall truncates it, and later bytes are new."""
    content: list[int] = []
    id_, number, kept = FIRST, 0, []
    for revision, (offset, growth) in enumerate(falls, 1):
        if revision > 1:
            offset = min(offset, len(content))
            content, id_ = content[:offset], fallen_id(id_, offset, revision)
        content = content + list(range(number, number + growth))
        number += growth
        kept.append((id_, list(content)))
    for known, before in kept:
        for offset in range(len(before) + 1):
            same = before[:offset] == content[:offset]
            assert same or not is_same(known, offset, id_), "a wrongly accepted position skips content"
            through = shared_through(known, id_)
            assert through is not None
            assert is_same(known, offset, id_) == (offset <= through)
