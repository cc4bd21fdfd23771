"""The format of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.coordination.layout import AssignmentKey, ItemKey, Layout, MemberId, MemberKey
from coranto.errors import InvalidInput

LAYOUT = Layout("/gazette/cluster")
names = st.text(st.characters(whitelist_categories=["L", "N"], whitelist_characters="-_+/.=%"), min_size=1, max_size=12)
members = st.builds(MemberId, names, names)


def test_keys_equal_gazettes_keys() -> None:
    member = MemberId("zone-a", "broker-1")
    assert LAYOUT.item_key("foo/bar") == "/gazette/cluster/items/foo/bar"
    assert LAYOUT.member_key(member) == "/gazette/cluster/members/zone-a#broker-1"
    assert LAYOUT.assignment_key("foo/bar", member, 2) == "/gazette/cluster/assign/foo/bar#zone-a#broker-1#2"


@given(names, members, st.integers(0, 99))
def test_every_key_round_trips(item: str, member: MemberId, slot: int) -> None:
    assert LAYOUT.decode(LAYOUT.item_key(item)) == ItemKey(item)
    assert LAYOUT.decode(LAYOUT.member_key(member)) == MemberKey(member)
    assert LAYOUT.decode(LAYOUT.assignment_key(item, member, slot)) == AssignmentKey(item, member, slot)


@given(names, names, members, members)
def test_the_order_of_keys_is_the_order_of_entities(item: str, other: str, left: MemberId, right: MemberId) -> None:
    assert (LAYOUT.assignment_key(item, left, 0) < LAYOUT.assignment_key(item, right, 0)) == (left < right)
    assert (LAYOUT.assignments_of(item) < LAYOUT.assignments_of(other)) == (item < other)
    assert LAYOUT.assignments_of(item).encode() < LAYOUT.assignments_of(item + "0").encode()


@pytest.mark.parametrize(
    "key",
    [
        "/gazette/cluster/other/x",
        "/gazette/clusters/items/x",
        "/gazette/cluster/items/",
        "/gazette/cluster/items/a#b",
        "/gazette/cluster/members/zone",
        "/gazette/cluster/members/zone#a#b",
        "/gazette/cluster/assign/item#zone#suffix",
        "/gazette/cluster/assign/item#zone#suffix#",
        "/gazette/cluster/assign/item#zone#suffix#-1",
        "/gazette/cluster/assign/item#zone#suffix#x",
        "/gazette/cluster/assign/item#zone#suffix#²",
    ],
)
def test_keys_with_another_layout_are_refused(key: str) -> None:
    with pytest.raises(InvalidInput, match="key"):
        LAYOUT.decode(key)


@pytest.mark.parametrize("prefix", ["", "/", "gazette", "/gazette/", "/a//b", "/a/../b"])
def test_the_prefix_is_a_clean_absolute_path(prefix: str) -> None:
    with pytest.raises(InvalidInput, match="prefix"):
        Layout(prefix)


@pytest.mark.parametrize("name", ["", "a#b", "a b", "a\tb", 'a"b'])
def test_names_that_would_break_the_order_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        LAYOUT.item_key(name)
    with pytest.raises(InvalidInput):
        LAYOUT.member_key(MemberId("zone", name))
    with pytest.raises(InvalidInput):
        LAYOUT.assignment_key(name, MemberId("zone", "suffix"), 0)


def test_a_negative_slot_is_refused() -> None:
    with pytest.raises(InvalidInput, match="slot"):
        LAYOUT.assignment_key("item", MemberId("zone", "suffix"), -1)
