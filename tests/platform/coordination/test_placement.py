"""Placement of items: never more expensive than the best one, with preferences among equals."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.coordination.capacity import effective_limits, fair_shares
from coranto.coordination.flow_network import FlowNetwork
from coranto.coordination.layout import MemberId
from coranto.coordination.placement import Placement, choose_placement
from coranto.coordination.planning import PlanItem, PlanMember
from tests.platform.coordination.allocation import AllocationWorld, least_cost


def members(*zones: str, limit: int = 1000) -> list[PlanMember]:
    return [PlanMember(MemberId(zone, f"m-{number:03}"), limit) for number, zone in enumerate(sorted(zones))]


def items(count: int, replication: int) -> list[PlanItem]:
    return [PlanItem(f"item-{number:05}", replication) for number in range(count)]


def patterns(found: list[PlanMember], placement: Placement) -> Counter[tuple[int, ...]]:
    """Count the items by the numbers of their replicas in each zone, the fullest zone first."""
    return Counter(
        tuple(sorted(Counter(found[member].id.zone for member in placed).values(), reverse=True))
        for placed in placement.members
    )


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_placement_costs_no_more_than_the_best_one(data: st.DataObject) -> None:
    found = members(*data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5)))
    found = [
        replace(m, limit=data.draw(st.sampled_from([0, 1, 2, 3, 9])), exiting=data.draw(st.booleans())) for m in found
    ]
    wanted = [
        replace(item, replication=data.draw(st.integers(0, 4))) for item in items(data.draw(st.integers(1, 4)), 0)
    ]
    held = [data.draw(st.lists(st.integers(0, len(found) - 1), unique=True, max_size=4)) for _ in wanted]
    placement = choose_placement(wanted, found, held)

    limits = effective_limits(wanted, found)
    zones = ["abc".index(member.id.zone) for member in found]
    usable = [[member for member in each if limits[member]] for each in held]
    network = FlowNetwork(
        [item.replication for item in wanted], usable, zones, limits, fair_shares(wanted, zones, limits)
    )
    assert placement.cost == least_cost(network)
    counts = Counter(member for placed in placement.members for member in placed)
    assert all(counts[member] <= limit for member, limit in enumerate(limits))
    for item, placed in zip(wanted, placement.members, strict=True):
        assert len(set(placed)) == len(placed) <= item.replication


def test_new_replicas_spread_evenly_over_zones() -> None:
    three = members(*"aabbcc")
    assert patterns(three, choose_placement(items(60, 3), three, [[]] * 60)) == {(1, 1, 1): 60}
    assert patterns(three, choose_placement(items(60, 4), three, [[]] * 60)) == {(2, 1, 1): 60}
    two = members(*"aaabbb")
    assert patterns(two, choose_placement(items(60, 4), two, [[]] * 60)) == {(2, 2): 60}
    assert patterns(two, choose_placement(items(60, 2), two, [[]] * 60)) == {(1, 1): 60}


def test_overloaded_members_release_items_with_two_replicas_in_a_zone_first() -> None:
    # Each item has two replicas in one of two zones. When a third zone joins, all members are above their share.
    found = members(*"aaaabbbb")
    held = [
        [(number + 1) % 4, 4 + number % 4, (4 if twice_in_b else 0) + (number + 2 * twice_in_b) % 4]
        for number in range(40)
        for twice_in_b in (False, True)
    ]
    joined = members(*"aaaabbbbcccc")
    placement = choose_placement(items(80, 3), joined, held)
    assert patterns(found, choose_placement(items(80, 3), found, held)) == {(2, 1): 80}
    assert placement.cost.moves == 80
    # It is a preference, met without an optimal search.
    assert patterns(joined, placement)[1, 1, 1] > 70


def test_a_small_zone_gets_only_the_replicas_that_two_zones_need() -> None:
    found = members(*"aaaaaab")
    placement = choose_placement(items(70, 2), found, [[]] * 70)
    counts = Counter(member for placed in placement.members for member in placed)
    assert counts[6] == 70
    assert max(counts[member] for member in range(6)) <= 12


def test_items_of_one_member_share_many_other_members() -> None:
    found = members(*("abc" * 10))
    placement = choose_placement(items(1000, 3), found, [[]] * 1000)
    neighbours = {member for placed in placement.members if 0 in placed for member in placed} - {0}
    assert len(neighbours) > 12
    assert set(Counter(member for placed in placement.members for member in placed).values()) == {100}


def test_of_excess_replicas_the_first_ones_and_two_zones_are_kept() -> None:
    found = members(*"aabb")
    placement = choose_placement(items(1, 2), found, [[0, 1, 2, 3]])
    assert set(placement.members[0]) in ({0, 2}, {0, 3})
    assert placement.cost.moves == 0
    single = members(*"aaaa")
    assert choose_placement(items(1, 2), single, [[3, 1, 0]]).members == ((3, 1),)


def test_excess_replicas_in_the_same_zone_are_removed_first() -> None:
    found = members(*"aabc")
    assert choose_placement(items(1, 3), found, [[2, 3, 0, 1]]).members == ((2, 3, 0),)
    assert choose_placement(items(1, 3), found, [[0, 1, 2, 3]]).members == ((0, 2, 3),)


def test_with_too_little_capacity_each_item_gets_a_first_replica() -> None:
    placement = choose_placement(items(3, 2), members("a", "b", limit=2), [[]] * 3)
    assert sorted(map(len, placement.members)) == [1, 1, 2]
    assert placement.cost.unplaced == 2


def test_changes_in_a_larger_cluster_move_only_the_necessary_replicas() -> None:
    zones = "abc" * 8
    world = AllocationWorld(items(800, 3), members(*zones))
    assert world.converge().added == 2400
    assert set(world.counts().values()) == {100}
    assert set(world.primaries().values()) <= {33, 34, 32}
    first, *others = list(world.members)

    world.put_members(replace(world.members[first], exiting=True))
    assert world.converge().added == 100
    assert world.counts()[first] == 0
    world.lose_members(first)
    assert world.converge().rounds == 0
    world.put_members(PlanMember(first, 1000))
    assert world.converge().added == 2400 - 23 * 100
    world.lose_members(others[10])
    assert world.converge().added == 100

    lost = [member for member in world.members if member.zone == "c"]
    missing = sum(world.counts()[member] for member in lost)
    world.lose_members(*lost)
    assert world.converge().added == missing
    world.put_members(*[PlanMember(member, 1000) for member in lost])
    share = -(-2400 // len(world.members))
    above = sum(max(0, count - share) for count in world.counts().values())
    assert world.converge().added == above
    assert max(world.counts().values()) == share
    assert all(len({member.zone for member in world.members_of(item)}) >= 2 for item in world.items)
