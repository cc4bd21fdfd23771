"""The planner, as properties: invariants of every step and of the converged placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coranto.coordination.layout import MemberId
from coranto.coordination.planning import PlanAssignment, PlanItem, PlanMember, Planner, can_drain
from tests.platform.coordination.allocation import AllocationWorld, plan
from tests.sampling import examples


def members(count: int, *, zones: int = 1, limit: int = 1000) -> list[PlanMember]:
    return [
        PlanMember(MemberId(f"zone-{i % zones}", f"member-{i:03}"), limit, create_revision=i + 1) for i in range(count)
    ]


def items(count: int, replication: int) -> list[PlanItem]:
    return [PlanItem(f"item-{i:04}", replication) for i in range(count)]


def check_at_rest(world: AllocationWorld) -> None:
    """Check the properties of any converged world."""
    assert world.plan().items == ()
    unplaced = sum(item.replication for item in world.items.values())
    for item in world.items.values():
        found = world.of(item.id)
        assert [a.slot for a in found] == list(range(len(found)))
        assert len({a.member for a in found}) == len(found) <= item.replication
        unplaced -= len(found)
    assert world.plan().unplaced == unplaced
    assert {a.item for a in world} <= world.items.keys()
    assert {a.member for a in world} <= world.members.keys()


member_ids = st.builds(MemberId, st.sampled_from(["a", "b", "c"]), st.sampled_from(["m-00", "m-01", "m-02", "m-03"]))
some_members = st.lists(
    st.builds(
        PlanMember,
        member_ids,
        limit=st.integers(0, 6) | st.just(50),
        exiting=st.booleans() | st.just(False),
        create_revision=st.integers(1, 9),
    ),
    unique_by=lambda m: m.id,
    max_size=7,
)
some_items = st.lists(
    st.builds(PlanItem, st.sampled_from([f"item-{i}" for i in range(9)]), st.integers(0, 4)),
    unique_by=lambda i: i.id,
    max_size=9,
)
# Valid or not: vanished members and items, no primary, two of them, gaps in slots.
some_assignments = st.lists(
    st.builds(
        PlanAssignment,
        st.sampled_from([f"item-{i}" for i in range(10)]),
        member_ids,
        st.integers(0, 5),
        st.booleans(),
    ),
    unique_by=lambda a: (a.item, a.member),
    max_size=20,
)
worlds = st.builds(AllocationWorld, some_items, some_members, some_assignments)


@given(worlds)
@settings(max_examples=examples(100), deadline=None)
def test_any_world_converges_within_its_guarantees(world: AllocationWorld) -> None:
    before = world.counts()
    world.converge()
    if world.plan().unplaced == 0:
        check_at_rest(world)
    for member, count in world.counts().items():
        # A limit may have been exceeded before; that ends when all replicas have a place.
        assert count <= max(world.members[member].limit, before[member] if world.plan().unplaced else 0)


@given(worlds, st.data())
@settings(max_examples=40, deadline=None)
def test_items_that_synchronize_at_any_pace_converge(world: AllocationWorld, data: st.DataObject) -> None:
    for _ in range(8):
        ready = data.draw(st.sets(st.sampled_from([f"item-{i}" for i in range(9)])))
        world.synchronize(ready.__contains__)
        world.apply(world.plan())
    world.converge()


@given(some_items, some_members, st.lists(some_members, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_planner_with_state_keeps_the_guarantees(
    items: list[PlanItem], members: list[PlanMember], later: list[list[PlanMember]]
) -> None:
    world = AllocationWorld(items, members, planning=Planner().plan)
    for joined in later:
        world.converge()
        world.put_members(*joined)
        world.lose_members(*[member for member in sorted(world.members) if member not in {m.id for m in joined}][::2])
    world.converge()
    fresh = AllocationWorld(items, world.members.values(), list(world))
    assert fresh.converge().added == 0


@given(some_items, some_members, some_members)
@settings(max_examples=examples(100), deadline=None)
def test_items_span_two_zones(items: list[PlanItem], members: list[PlanMember], joining: list[PlanMember]) -> None:
    """Items span two zones if members have capacity for it, despite concurrent joins and changes."""
    world = AllocationWorld(items, members)
    world.converge()
    available_zones = {member.zone for member in world.members} | {member.id.zone for member in joining}
    world.put_members(*joining)
    world.put_members(*[replace(m, limit=50, exiting=False) for m in world.members.values()])
    world.converge()
    check_at_rest(world)
    for item in items:
        found = world.members_of(item.id)
        assert len(found) == min(item.replication, len(world.members))
        if len(found) == item.replication > 1:
            assert len({member.zone for member in found}) >= min(2, len(available_zones))


@given(worlds, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_the_input_does_not_matter(world: AllocationWorld, random: Random) -> None:
    def shuffled(values: Sequence[Any]) -> list[Any]:
        return random.sample(values, len(values))

    assignments = list(world)
    again = plan(shuffled(list(world.items.values())), shuffled(list(world.members.values())), shuffled(assignments))
    assert world.plan() == again


@given(some_items, some_members)
@settings(max_examples=40, deadline=None)
def test_converged_assignments_stay(items: list[PlanItem], members: list[PlanMember]) -> None:
    world = AllocationWorld(items, members)
    world.converge()
    assert world.plan().items == ()
    world.put_items(PlanItem("another", 0))
    assert world.plan().items == ()


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_joining_or_leaving_members_cause_no_more_moves_than_their_share(
    count: int, replication: int, before: int, after: int
) -> None:
    assume(min(before, after) >= replication)
    world = AllocationWorld(items(count, replication), members(before))
    world.converge()
    spread = world.counts()
    assert max(spread.values()) <= -(-count * replication // before)

    leaving = [member.id for member in members(before)[after:]]
    share = -(-count * replication // after)
    lost = sum(spread[member] for member in leaving)
    world.lose_members(*leaving)
    world.put_members(*members(after)[before:])
    effort = world.converge()
    now = world.counts()
    assert max(now.values()) <= share
    # Added replicas are the lost ones and those above the share of other members, and no more. A lost replica may have
    # to displace another one if the member with capacity holds the item already.
    needed = lost + sum(max(0, spread[member] - share) for member in world.members)
    assert needed <= effort.added <= needed + (lost if replication > 1 else 0)


def test_the_placement_is_recomputed_only_when_items_or_members_change() -> None:
    planner = Planner()
    world = AllocationWorld(items(30, 2), members(4, zones=2), planning=planner.plan)
    world.converge()
    assert planner.placements == 1
    world.put_members(*members(5, zones=2))
    effort = world.converge()
    assert effort.rounds > 2
    assert planner.placements == 2
    world.put_items(PlanItem("item-0003", 3))
    world.converge()
    assert planner.placements == 3
    world.put_members(replace(members(1)[0], exiting=True))
    world.converge()
    assert planner.placements == 4


def test_a_planner_restores_removed_assignments() -> None:
    planner = Planner()
    world = AllocationWorld(items(9, 2), members(4), planning=planner.plan)
    world.converge()
    placed = {item: set(world.members_of(item)) for item in world.items}
    world.assignments = {item: found[1:] for item, found in world.assignments.items()}
    world.converge()
    assert {item: set(world.members_of(item)) for item in world.items} == placed
    assert planner.placements == 1


@pytest.mark.parametrize(
    ("others", "limit", "expected"), [(0, 100, False), (1, 100, False), (2, 100, True), (2, 4, False)]
)
def test_a_member_can_drain_when_others_can_take_all(others: int, limit: int, expected: bool) -> None:
    found = members(others + 1, limit=limit)
    assert can_drain(items(5, 2), found, found[0].id) is expected


def test_exiting_members_drain_in_order_and_the_last_one_cannot() -> None:
    first, second, third = members(3)
    wanted = items(5, 2)
    assert can_drain(wanted, [replace(first, exiting=True), second, third], first.id)
    assert not can_drain(wanted, [replace(first, exiting=True), second, third], second.id)
    assert can_drain(items(5, 1), [replace(first, exiting=True), second, third], second.id)
    assert not can_drain(items(5, 1), [replace(m, exiting=True) for m in (first, second, third)], first.id)
