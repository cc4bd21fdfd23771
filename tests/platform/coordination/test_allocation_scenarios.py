"""Changes that operators make to clusters, and the resulting allocation of items. One test per scenario."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coranto.coordination.layout import MemberId
from coranto.coordination.planning import (
    AddAssignment,
    MoveAssignment,
    PlanAssignment,
    PlanItem,
    PlanMember,
    Planner,
    RemoveAssignment,
)
from tests.platform.coordination.allocation import AllocationWorld


def member_id(name: str) -> MemberId:
    """Return a member's id; its zone is the first letter of its name."""
    return MemberId(f"zone-{name[0]}", name)


def cluster(
    items: dict[str, int], members: dict[str, int], assigned: dict[str, str] | None = None, *, consistent: bool = True
) -> AllocationWorld:
    """Create items by replication, members (the oldest first) by limit, and the members of each item in slot order."""
    return AllocationWorld(
        [PlanItem(item, replication) for item, replication in items.items()],
        [PlanMember(member_id(name), limit, False, age) for age, (name, limit) in enumerate(members.items(), 1)],
        [
            PlanAssignment(item, member_id(name), slot, consistent)
            for item, names in (assigned or {}).items()
            for slot, name in enumerate(names.split())
        ],
        planning=Planner().plan,
    )


def change(world: AllocationWorld, exiting: bool | None = None, **limits: int) -> None:
    """Change members' limits, or add members with a limit; and set whether they are exiting."""
    for name, limit in limits.items():
        id = member_id(name)
        age = world.members[id].create_revision if id in world.members else len(world.members) + 1
        world.put_members(PlanMember(id, limit, bool(exiting), age))


def where(world: AllocationWorld) -> dict[str, str]:
    """Return the members of each item in slot order, as in `cluster`."""
    return {item: " ".join(member.suffix for member in world.members_of(item)) for item in sorted(world.items)}


def zones(world: AllocationWorld, item: str) -> str:
    return "".join(sorted(member.suffix[0] for member in world.members_of(item)))


def holds(world: AllocationWorld) -> dict[str, int]:
    counts = world.counts()
    return {member.suffix: counts[member] for member in sorted(world.members)}


ONE_TWO_THREE = {"item-1": 1, "item-2": 2, "item-3": 3}


def test_the_first_allocation_fills_all_limits_and_gives_every_item_two_zones() -> None:
    world = cluster(ONE_TWO_THREE, {"a1": 2, "a2": 2, "b": 4})
    effort = world.converge()
    assert (effort.rounds, effort.added, effort.removed, effort.packed) == (1, 6, 0, 0)
    assert {item: len(world.of(item)) for item in world.items} == ONE_TWO_THREE
    assert zones(world, "item-2") == "ab"
    assert zones(world, "item-3") == "aab"
    assert all(count <= world.members[member].limit for member, count in world.counts().items())


def test_large_limits_do_not_keep_items_from_a_second_zone() -> None:
    world = cluster({f"item-{i}": 3 for i in range(7)}, {"a1": 1024, "a2": 1024, "b": 1024})
    assert world.converge().added == 21
    assert {zones(world, item) for item in world.items} == {"aab"}
    assert len(set(world.primaries().values())) <= 2


@pytest.mark.parametrize("consistent", [False, True])
def test_a_member_is_replaced_by_another_once_items_are_consistent(consistent: bool) -> None:
    world = cluster(
        ONE_TWO_THREE,
        {"a": 2, "b": 4, "aold": 0, "anew": 3},
        {"item-1": "a", "item-2": "aold b", "item-3": "aold a b"},
        consistent=consistent,
    )
    # The new member gets the items that the old one must give up, but they are not consistent until it has caught up.
    world.apply(world.plan())
    assert where(world) == {"item-1": "a", "item-2": "aold b anew", "item-3": "aold a b anew"}
    assert world.plan().items == ()
    effort = world.converge()
    assert holds(world) == {"a": 2, "aold": 0, "anew": 2, "b": 2}
    assert [a.slot for a in world.of("item-3")] == [0, 1, 2]
    assert (effort.added, effort.removed, effort.promoted) == (0, 2, 2)
    # Each member is primary of one of the three items.
    assert sorted(world.primaries().values()) == [1, 1, 1]


def test_allocation_follows_rising_and_falling_limits() -> None:
    world = cluster(
        ONE_TWO_THREE,
        {"a": 2, "alimited": 2, "b": 4},
        {"item-1": "b", "item-2": "a b", "item-3": "a alimited b"},
    )
    assert world.converge().rounds == 0
    change(world, alimited=10)
    assert world.converge().added == 2
    assert holds(world) == {"a": 1, "alimited": 3, "b": 2}
    change(world, alimited=2)
    assert world.converge().added == 1
    assert holds(world)["alimited"] == 2
    assert zones(world, "item-3") == "aab"
    change(world, alimited=1)
    assert world.converge().added == 1
    assert holds(world)["alimited"] == 1
    assert {item: len(world.of(item)) for item in world.items} == ONE_TWO_THREE
    assert zones(world, "item-2") == "ab"
    assert zones(world, "item-3") == "aab"
    assert world.converge().rounds == 0


def test_replication_of_items_can_be_swapped() -> None:
    world = cluster(
        ONE_TWO_THREE,
        {"a1": 2, "a2": 2, "b": 4},
        {"item-1": "b", "item-2": "a1 b", "item-3": "a1 a2 b"},
    )
    assert world.converge().rounds == 0
    world.put_items(PlanItem("item-1", 3), PlanItem("item-3", 1))
    effort = world.converge()
    assert (effort.added, effort.removed) == (2, 2)
    assert where(world)["item-1"].split()[0] == "b"
    assert zones(world, "item-1") == "aab"
    assert len(world.of("item-3")) == 1
    # No member is above its share: one and a half, and three.
    assert all(count <= {"a1": 2, "a2": 2, "b": 3}[name] for name, count in holds(world).items())


def test_joining_members_add_capacity_until_all_replicas_are_placed() -> None:
    world = cluster(ONE_TWO_THREE, {"a1": 1})
    world.converge()
    assert len(list(world)) == 1
    assert world.plan().unplaced == 5
    change(world, a2=2)
    world.converge()
    # The first replica of each item comes before the second of any.
    assert [len(world.of(item)) for item in ONE_TWO_THREE] == [1, 1, 1]
    assert world.plan().unplaced == 3
    change(world, a3=3)
    world.converge()
    assert {item: len(world.of(item)) for item in world.items} == ONE_TWO_THREE
    assert world.plan().unplaced == 0
    assert holds(world) == {"a1": 1, "a2": 2, "a3": 3}


def test_a_lowered_limit_removes_no_item_that_no_other_member_can_take() -> None:
    world = cluster(
        ONE_TWO_THREE,
        {"a1": 1, "a2": 2, "a3": 3},
        {"item-1": "a3", "item-2": "a2 a3", "item-3": "a3 a1 a2"},
    )
    assert world.converge().rounds == 0
    change(world, a3=2)
    assert world.converge().rounds == 0
    assert world.plan().unplaced == 1


def test_a_second_zone_is_used_first_with_too_little_then_enough_capacity() -> None:
    world = cluster({f"item-{i}": 3 for i in (1, 2, 3)}, {"a1": 100, "a2": 100, "a3": 100})
    world.converge()
    assert holds(world) == {"a1": 3, "a2": 3, "a3": 3}
    change(world, b=2)
    assert world.converge().added == 2
    # Its small limit would make its share small, but two zones matter more.
    assert sorted(zones(world, item) for item in world.items) == ["aaa", "aab", "aab"]
    change(world, b=3)
    assert world.converge().added == 1
    assert {zones(world, item) for item in world.items} == {"aab"}
    world.put_items(PlanItem("item-4", 1))
    assert world.converge().added == 1
    assert {zones(world, f"item-{i}") for i in (1, 2, 3)} == {"aab"}
    assert zones(world, "item-4") == "a"


def test_a_shrinking_zone_keeps_needed_replicas_until_it_closes() -> None:
    world = cluster(
        {"item-1": 3, "item-2": 3, "item-3": 2},
        {"a1": 10, "a2": 10, "b": 10},
        {"item-1": "a1 a2 b", "item-2": "a1 a2 b", "item-3": "a1 b"},
    )
    assert world.converge().rounds == 0
    change(world, b=2)
    effort = world.converge()
    # Two items of three replicas need the zone, so the other item must leave it. The zone is used up to its limit.
    assert (effort.added, effort.removed) == (1, 1)
    assert where(world) == {"item-1": "a1 a2 b", "item-2": "a1 a2 b", "item-3": "a1 a2"}
    change(world, b=0, a3=10)
    effort = world.converge()
    assert (effort.added, effort.removed) == (2, 2)
    assert where(world) == {"item-1": "a1 a2 a3", "item-2": "a1 a2 a3", "item-3": "a1 a2"}


def test_a_third_zone_gets_only_new_replicas() -> None:
    world = cluster(
        {"item-1": 2, "item-2": 3}, {"a1": 100, "a2": 100, "b": 100}, {"item-1": "a1 b", "item-2": "a1 a2 b"}
    )
    assert world.converge().rounds == 0
    # No member is above its share, and two zones are enough: nothing needs to move.
    change(world, c=100)
    assert world.converge().rounds == 0
    # New replicas spread evenly over zones, though another member also has capacity within its share.
    world.put_items(PlanItem("item-1", 3), PlanItem("item-2", 4))
    assert world.converge().added == 2
    assert where(world) == {"item-1": "a1 b c", "item-2": "a1 a2 b c"}


def test_a_closing_third_zone_gives_up_its_replicas() -> None:
    world = cluster(
        {"item-1": 3, "item-2": 3},
        {"a1": 10, "a2": 10, "a3": 10, "b": 10, "c": 10},
        {"item-1": "a1 a2 c", "item-2": "a3 b c"},
    )
    assert world.converge().rounds == 0
    change(world, c=0)
    effort = world.converge()
    assert (effort.added, effort.removed) == (2, 2)
    assert where(world)["item-1"] == "a1 a2 b"
    assert zones(world, "item-2") == "aab"


def test_limits_can_rotate_within_a_zone_and_between_zones() -> None:
    world = cluster(
        {f"item-{i}": 3 for i in (1, 2, 3)},
        {"a1": 1, "a2": 3, "b1": 10, "b2": 10},
        {"item-1": "a1 b1 b2", "item-2": "a2 b1 b2", "item-3": "a2 b1 b2"},
    )
    assert world.converge().rounds == 0
    change(world, a1=3, a2=1)
    effort = world.converge()
    assert (effort.added, effort.removed) == (1, 1)
    assert holds(world) == {"a1": 2, "a2": 1, "b1": 3, "b2": 3}
    change(world, a1=10, a2=10, b1=1, b2=3)
    effort = world.converge()
    assert (effort.added, effort.removed) == (2, 2)
    assert holds(world)["b1"] == 1
    assert all(set(zones(world, item)) == {"a", "b"} for item in world.items)


@pytest.mark.parametrize("with_its_assignments", [True, False])
def test_replicas_of_an_expired_zone_are_replaced(with_its_assignments: bool) -> None:
    world = cluster(
        ONE_TWO_THREE,
        {"a1": 4, "a2": 2, "a3": 1, "b": 4},
        {"item-1": "a1", "item-2": "b a2", "item-3": "a3 b a1"},
    )
    assert world.converge().rounds == 0
    if with_its_assignments:
        world.lose_members(member_id("b"))
    else:
        del world.members[member_id("b")]
    effort = world.converge()
    assert effort.added == 2
    assert effort.removed == (0 if with_its_assignments else 2)
    assert where(world)["item-3"].split()[0] == "a3"
    assert {zones(world, item) for item in ("item-2", "item-3")} == {"aa", "aaa"}
    assert {item: len(world.of(item)) for item in world.items} == ONE_TWO_THREE


def test_a_returning_zone_gets_its_share_back() -> None:
    world = cluster({f"item-{i}": 3 for i in range(12)}, {"a1": 50, "a2": 50, "b1": 50, "b2": 50, "c1": 50, "c2": 50})
    world.converge()
    assert {zones(world, item) for item in world.items} == {"abc"}
    world.lose_members(member_id("c1"), member_id("c2"))
    assert world.converge().added == 12
    change(world, c1=50, c2=50)
    # No item needs this zone to span two, but members above their share need members below it.
    assert world.converge().added == 12
    assert {zones(world, item) for item in world.items} == {"abc"}
    assert set(holds(world).values()) == {6}


def test_a_single_zone_rebalances_when_a_member_becomes_larger() -> None:
    world = cluster(ONE_TWO_THREE, {"a1": 3, "a2": 2, "a3": 1})
    world.converge()
    assert holds(world) == {"a1": 3, "a2": 2, "a3": 1}
    change(world, a4=1)
    assert world.converge().rounds == 0
    change(world, a4=3)
    effort = world.converge()
    assert (effort.added, effort.removed) == (1, 1)
    assert holds(world) == {"a1": 2, "a2": 2, "a3": 1, "a4": 1}


def test_exiting_members_are_drained() -> None:
    world = cluster({f"item-{i}": 1 for i in range(4)}, {"a2": 4, "a1": 4, "b1": 4, "b2": 4})
    world.converge()
    assert set(holds(world).values()) == {1}
    change(world, exiting=True, a1=4, b1=4)
    effort = world.converge()
    assert (effort.added, effort.removed) == (2, 2)
    assert holds(world) == {"a1": 0, "a2": 2, "b1": 0, "b2": 2}


def test_the_leader_is_drained_like_any_other_member() -> None:
    world = cluster({f"item-{i}": 1 for i in range(3)}, {"a1": 4, "a2": 4, "b": 4})
    world.converge()
    change(world, exiting=True, a1=4)
    world.converge()
    assert holds(world)["a1"] == 0
    assert len(list(world)) == 3


def test_exiting_members_leave_by_age_when_others_can_replace_them() -> None:
    world = cluster({f"item-{i}": 2 for i in range(6)}, {"a1": 50, "a2": 50, "b1": 50})
    world.converge()
    change(world, exiting=True, a1=50, a2=50)
    world.converge()
    # Two replicas need two members, so the younger one must stay.
    assert holds(world) == {"a1": 0, "a2": 6, "b1": 6}
    world.lose_members(member_id("a1"))
    assert world.converge().added == 0
    change(world, c1=50)
    world.converge()
    assert holds(world) == {"a2": 0, "b1": 6, "c1": 6}


def test_an_exiting_member_that_must_stay_is_the_last_choice_for_new_items() -> None:
    world = cluster({f"item-{i}": 3 for i in range(3)}, {"a": 50, "b": 50, "c": 50})
    world.converge()
    change(world, exiting=True, a=50)
    world.put_items(PlanItem("small-1", 1), PlanItem("small-2", 1))
    world.converge()
    assert {zones(world, "small-1"), zones(world, "small-2")} == {"b", "c"}
    world.put_items(PlanItem("item-3", 3))
    world.converge()
    assert zones(world, "item-3") == "abc"


def test_the_last_member_keeps_its_items_while_it_is_exiting() -> None:
    world = cluster({f"item-{i}": 1 for i in range(5)}, {"a": 50})
    world.converge()
    change(world, exiting=True, a=50)
    assert world.converge().rounds == 0
    assert holds(world) == {"a": 5}


def test_assignments_without_an_item_are_removed_immediately() -> None:
    world = cluster(
        {"item-2": 1, "item-5": 2, "item-6": 3},
        {"a": 1, "b": 2, "c": 3},
        {
            "item-1": "c b",
            "item-2": "c",
            "item-3": "c",
            "item-4": "b c",
            "item-5": "c b",
            "item-6": "a b c",
            "item-7": "a c",
        },
    )
    changes = world.plan()
    assert [item.item for item in changes.items] == ["item-1", "item-3", "item-4", "item-7"]
    assert all(item.orphaned for item in changes.items)
    effort = world.converge()
    assert (effort.rounds, effort.added, effort.removed) == (1, 0, 7)
    assert where(world) == {"item-2": "c", "item-5": "c b", "item-6": "a b c"}


def test_assignments_without_a_member_are_replaced_immediately() -> None:
    vanished = member_id("fdead")
    world = cluster({"item-1": 1, "item-2": 1}, {"a": 2}, {"item-1": "fdead a", "item-2": "fdead"})
    first, second = world.plan().items
    assert first.changes == (RemoveAssignment("item-1", vanished, 0), MoveAssignment("item-1", member_id("a"), 1, 0))
    assert set(second.changes) == {RemoveAssignment("item-2", vanished, 0), AddAssignment("item-2", member_id("a"), 1)}
    world.converge()
    assert where(world) == {"item-1": "a", "item-2": "a"}


def test_a_rolling_restart_moves_only_each_members_own_items() -> None:
    names = {f"{zone}{number}": 500 for number in (1, 2) for zone in "abc"}
    world = cluster({f"item-{i:02}": 3 for i in range(40)}, names)
    world.converge()
    for name in names:
        held = world.counts()[member_id(name)]
        change(world, exiting=True, **{name: 500})
        assert world.converge().added == held
        world.lose_members(member_id(name))
        assert world.converge().rounds == 0
        id = member_id(name)
        world.put_members(PlanMember(id, 500, False, 100 + len(name)))
        effort = world.converge()
        assert effort.added <= -(-120 // 6)
        assert effort.added == world.counts()[id]
    assert {len(world.of(item)) for item in world.items} == {3}
    assert max(world.counts().values()) == 20


def test_a_suspended_item_gives_up_all_its_members() -> None:
    world = cluster({"item-1": 2, "item-2": 2}, {"a": 9, "b": 9})
    world.converge()
    world.put_items(replace(world.items["item-1"], replication=0))
    assert world.converge().removed == 2
    assert where(world)["item-1"] == ""
