"""The steps towards a placement, one at a time: the order of removals, the choice of the primary, and slots."""

from __future__ import annotations

from dataclasses import replace

from coranto.coordination.convergence import Convergence
from coranto.coordination.layout import MemberId
from coranto.coordination.planning import (
    AddAssignment,
    Change,
    ItemChanges,
    MoveAssignment,
    PlanAssignment,
    PlanItem,
    PlanMember,
    Planner,
    RemoveAssignment,
)
from tests.platform.coordination.allocation import AllocationWorld

A, B, C, D = (MemberId("zone", name) for name in ("m-a", "m-b", "m-c", "m-d"))
ALL = (A, B, C, D)
GONE = MemberId("zone", "gone")


def assigned(item: str, *holders: tuple[MemberId, int, bool]) -> list[PlanAssignment]:
    return [PlanAssignment(item, member, slot, consistent) for member, slot, consistent in holders]


def steps(
    replication: int,
    current: list[PlanAssignment],
    desired: set[MemberId],
    *,
    others: list[PlanAssignment] | None = None,
    limits: tuple[int, ...] = (9, 9, 9, 9),
) -> tuple[Change, ...]:
    """Return the steps of one item. Assignments of `others` only count as load: those items are placed already."""
    by_item = {"item": current}
    for assignment in others or []:
        by_item.setdefault(assignment.item, []).append(assignment)
    items = [PlanItem(name, replication if name == "item" else len(found)) for name, found in by_item.items()]
    wanted = [desired if name == "item" else {a.member for a in found} for name, found in by_item.items()]
    members = [PlanMember(member, limit) for member, limit in zip(ALL, limits, strict=True)]
    found = Convergence(members, limits).steps(
        items, by_item, [sorted(ALL.index(member) for member in each) for each in wanted]
    )
    assert [changes.item for changes in found] in ([], ["item"])
    return found[0].changes if found else ()


def test_a_new_item_gets_all_its_members_and_the_least_loaded_as_primary() -> None:
    others = assigned("x", (A, 0, True), (B, 1, True)) + assigned("y", (A, 0, True)) + assigned("z", (B, 0, True))
    assert steps(3, [], {A, B, C}, others=others) == (
        AddAssignment("item", C, 0),
        AddAssignment("item", B, 1),
        AddAssignment("item", A, 2),
    )
    # Load is relative to limits.
    assert steps(2, [], {A, B}, others=others, limits=(90, 9, 9, 9)) == (
        AddAssignment("item", A, 0),
        AddAssignment("item", B, 1),
    )


def test_a_move_adds_waits_removes_and_promotes() -> None:
    before = assigned("item", (A, 0, True))
    assert steps(1, before, {B}) == (AddAssignment("item", B, 1),)
    assert steps(1, assigned("item", (A, 0, False), (B, 1, False)), {B}) == ()
    after = assigned("item", (A, 0, True), (B, 1, True))
    assert steps(1, after, {B}) == (RemoveAssignment("item", A, 0), MoveAssignment("item", B, 1, 0))


def test_nothing_is_removed_while_too_few_would_stay_consistent() -> None:
    current = assigned("item", (A, 0, True), (B, 1, True), (C, 2, False))
    assert steps(2, current, {B, C}) == ()
    # Inconsistent assignments stay, too, while the item has too few.
    assert steps(3, assigned("item", (A, 0, True), (B, 1, True), (C, 2, False), (D, 3, False)), {A, B, D}) == ()
    # Inconsistent assignments are removed when the others suffice.
    assert steps(2, current, {A, B}) == (RemoveAssignment("item", C, 2),)


def test_assignments_of_the_most_loaded_members_are_removed_first() -> None:
    current = assigned("item", (A, 0, True), (B, 1, True), (C, 2, True), (D, 3, True))
    others = assigned("x", (B, 0, True)) + assigned("y", (B, 0, True), (A, 1, True))
    # Only one may be removed: the replication is three, though the placement holds two, as if one had no place.
    assert steps(3, current, {C, D}, others=others) == (RemoveAssignment("item", B, 1),)
    assert steps(3, current, {C, D}, others=others, limits=(2, 9, 9, 9))[0] == RemoveAssignment("item", A, 0)
    # A member with limit 0 comes first.
    assert steps(3, current, {B, C}, others=others, limits=(9, 9, 9, 0)) == (RemoveAssignment("item", D, 3),)


def test_vanished_members_and_second_slots_are_removed_unconditionally() -> None:
    assert steps(2, assigned("item", (GONE, 0, True), (A, 1, False)), {A, B}) == (
        AddAssignment("item", B, 2),
        RemoveAssignment("item", GONE, 0),
        MoveAssignment("item", A, 1, 0),
    )
    assert steps(2, assigned("item", (A, 0, False), (A, 1, False), (B, 2, False)), {A, B}) == (
        RemoveAssignment("item", A, 1),
    )


def test_the_new_primary_is_a_consistent_replica_with_the_fewest_primaries() -> None:
    lagging, current = (A, 1, False), (B, 2, True)
    assert steps(2, assigned("item", lagging, current), {A, B}) == (MoveAssignment("item", B, 2, 0),)
    others = assigned("x", (B, 0, True))
    both = assigned("item", (B, 1, True), (C, 2, True))
    assert steps(2, both, {B, C}, others=others) == (MoveAssignment("item", C, 2, 0),)
    assert steps(2, both, {B, C}) == (MoveAssignment("item", B, 1, 0),)
    # No consistent replica exists.
    assert steps(2, assigned("item", lagging), {A, B}) == (AddAssignment("item", B, 2), MoveAssignment("item", A, 1, 0))


def test_slots_are_packed_one_at_a_time_and_after_all_other_changes() -> None:
    gaps = assigned("item", (A, 0, True), (B, 2, True), (C, 5, True))
    assert steps(3, gaps, {A, B, C}) == (MoveAssignment("item", B, 2, 1),)
    assert steps(4, gaps, {A, B, C, D}) == (AddAssignment("item", D, 6),)
    two_primaries = assigned("item", (A, 0, True), (B, 0, True), (C, 2, True))
    assert steps(3, two_primaries, {A, B, C}) == (MoveAssignment("item", B, 0, 1),)


def test_a_full_member_gets_an_item_after_it_has_released_one() -> None:
    members = [PlanMember(member, 1) for member in (A, B, C)]
    world = AllocationWorld(
        [PlanItem("x", 1), PlanItem("y", 1)], members, assigned("x", (A, 0, True)) + assigned("y", (B, 0, True))
    )
    taken: list[list[Change]] = []

    def planning(*state: object) -> object:
        """Move item x to B after item y has moved to C."""
        by_item = {name: world.of(name) for name in ("x", "y")}
        found = Convergence(members, [1, 1, 1]).steps(list(world.items.values()), by_item, [[1], [2]])
        taken.append([change for item in found for change in item.changes])
        return replace(world_plan, items=tuple(found))

    world_plan = Planner().plan([], [], [])
    world.planning = planning  # type: ignore[assignment]
    world.converge()
    assert taken == [
        [AddAssignment("y", C, 1)],
        [RemoveAssignment("y", B, 0), MoveAssignment("y", C, 1, 0)],
        [AddAssignment("x", B, 1)],
        [RemoveAssignment("x", A, 0), MoveAssignment("x", B, 1, 0)],
        [],
    ]


def test_full_members_that_wait_for_each_other_use_a_third_one() -> None:
    members = [PlanMember(A, 1), PlanMember(B, 1), PlanMember(C, 1)]
    items = [PlanItem("x", 1), PlanItem("y", 1)]
    placement = [[1], [0]]  # The items must swap members.
    current = {"x": assigned("x", (A, 0, True)), "y": assigned("y", (B, 0, True))}
    found = Convergence(members, [1, 1, 1]).steps(items, current, placement)
    assert found == [ItemChanges("x", (AddAssignment("x", C, 1),))]
    # They wait for inconsistent items first: a pending move may free capacity.
    lagging = {"x": assigned("x", (A, 0, False)), "y": assigned("y", (B, 0, True))}
    assert Convergence(members, [1, 1, 1]).steps(items, lagging, placement) == []
    current["x"] = assigned("x", (A, 0, False), (C, 1, False))
    assert Convergence(members, [1, 1, 1]).steps(items, current, placement) == []
    current["x"] = assigned("x", (A, 0, True), (C, 1, True))
    # The member with a waiting item is freed first, not the one of the detour.
    found = Convergence(members, [1, 1, 1]).steps(items, current, placement)
    assert found[0] == ItemChanges("x", (RemoveAssignment("x", A, 0), MoveAssignment("x", C, 1, 0)))
    # Without a third member the items stay.
    full = {"x": assigned("x", (A, 0, True)), "y": assigned("y", (B, 0, True))}
    assert Convergence(members[:2], [1, 1]).steps(items, full, placement) == []
