"""Draining of exiting members, and fair shares."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.coordination.capacity import effective_limits, fair_shares
from coranto.coordination.layout import MemberId
from coranto.coordination.planning import PlanItem, PlanMember


def items(count: int, replication: int) -> list[PlanItem]:
    return [PlanItem(f"item-{replication}-{number}", replication) for number in range(count)]


def members(*limits: int, exiting: tuple[int, ...] = ()) -> list[PlanMember]:
    """Return members by age, the oldest first."""
    return [
        PlanMember(MemberId("zone", f"m-{number}"), limit, number in exiting, number)
        for number, limit in enumerate(limits)
    ]


@pytest.mark.parametrize(
    ("why", "wanted", "found", "limits"),
    [
        ("nobody exits", items(4, 1), members(4, 4, 4), [4, 4, 4]),
        ("others have room for all", items(4, 1), members(4, 4, 4, exiting=(0, 1)), [0, 0, 4]),
        ("the oldest goes first, the next as far as there is room", items(10, 1), members(10, 10, 7, exiting=(0, 1)),
         [0, 3, 7]),
        ("nothing is in excess", items(6, 2), members(4, 4, 4, exiting=(1,)), [4, 4, 4]),
        ("more is wanted than there is", items(9, 2), members(4, 4, 4, exiting=(1,)), [4, 4, 4]),
        ("three replicas need three members", items(4, 3), members(50, 50, 50, exiting=(2,)), [50, 50, 50]),
        ("of four, one can go", items(4, 3), members(50, 50, 50, 50, exiting=(1, 2)), [50, 0, 50, 50]),
        ("a member without a limit cannot stand in", items(4, 2), members(50, 50, 0, exiting=(0,)), [50, 50, 0]),
        ("the last one stays", items(4, 1), members(50, exiting=(0,)), [50]),
        ("a limit is worth the number of items", items(10, 2), members(10, 1000, 1, exiting=(0,)), [9, 1000, 1]),
        ("there is nothing to hold", [], members(5, 5, exiting=(0, 1)), [0, 0]),
    ],
)  # fmt: skip
def test_exiting_members_shed_excess_items(
    why: str, wanted: list[PlanItem], found: list[PlanMember], limits: list[int]
) -> None:
    assert effective_limits(wanted, found) == limits, why


def test_the_oldest_exiting_member_drains_first_and_ties_are_by_id() -> None:
    found = [
        PlanMember(MemberId("zone", "a"), 4, exiting=True, create_revision=9),
        PlanMember(MemberId("zone", "b"), 4, exiting=True, create_revision=3),
        PlanMember(MemberId("zone", "c"), 4, exiting=True, create_revision=3),
    ]
    assert effective_limits(items(4, 1), found) == [4, 0, 0]
    assert effective_limits(items(4, 2), found) == [4, 0, 4]


@pytest.mark.parametrize(
    ("why", "wanted", "zones", "limits", "shares"),
    [
        ("in proportion", items(40, 1), [0, 0], [300, 100], [30, 10]),
        ("rounded up", items(5, 1), [0, 0, 0], [7, 7, 7], [2, 2, 2]),
        ("no member holds an item twice", items(10, 2), [0, 0, 0], [900, 10, 10], [10, 5, 5]),
        ("nor more than its limit", items(10, 3), [0, 0, 0, 0], [1, 100, 100, 100], [1, 10, 10, 10]),
        ("a zone alone holds all", items(6, 3), [0, 0, 0], [100, 100, 100], [6, 6, 6]),
        ("one of two replicas is in the smaller zone", items(60, 2), [0, 0, 0, 1], [100] * 4, [20, 20, 20, 60]),
        ("one of three is", items(60, 3), [0, 0, 0, 0, 1], [100] * 5, [30, 30, 30, 30, 60]),
        ("as far as it has room", items(60, 2), [0, 0, 0, 1], [100, 100, 100, 30], [30, 30, 30, 30]),
        ("a larger zone gives no share away", items(60, 3), [0, 0, 1, 1, 1], [100] * 5, [36] * 5),
        ("no more than there is", items(9, 2), [0, 0], [4, 4], [4, 4]),
        ("without items", [], [0, 1], [4, 4], [0, 0]),
        ("without members", items(3, 1), [], [], []),
        ("without limits", items(3, 1), [0], [0], [0]),
    ],
)  # fmt: skip
def test_fair_shares(why: str, wanted: list[PlanItem], zones: list[int], limits: list[int], shares: list[int]) -> None:
    assert fair_shares(wanted, zones, limits) == shares, why


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9) | st.just(1000)), max_size=8),
)
@settings(max_examples=150, deadline=None)
def test_shares_place_as_many_replicas_as_possible(replications: list[int], found: list[tuple[int, int]]) -> None:
    wanted = [PlanItem(f"item-{number}", replication) for number, replication in enumerate(replications)]
    zones, limits = [zone for zone, _ in found], [limit for _, limit in found]
    shares = fair_shares(wanted, zones, limits)
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    assert all(bool(share) == bool(limit and any(replications)) for share, limit in zip(shares, limits, strict=True))
    assert sum(shares) >= largest_flow(replications, limits)
    assert sum(shares) <= sum(replications) + len(shares)


def largest_flow(replications: list[int], limits: list[int]) -> int:
    """Return how many replicas can be placed (Gale and Ryser).

    The smallest cut has the k items with the highest replication on one side, and on the other side the exchange of all
    items and members.
    """
    wanted = sorted(replications, reverse=True)
    cuts = (sum(min(k, limit) for limit in limits) + sum(wanted[k:]) for k in range(len(wanted) + 1))
    return min(cuts)
