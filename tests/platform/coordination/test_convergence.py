"""The steps towards a placement, one at a time: what may be removed when, who becomes primary, which slots."""

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
    """The steps of one item. What others hold is only counted: those items are where they should be."""
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


def test_a_new_item_gets_all_its_members_at_once_and_the_least_burdened_as_primary() -> None:
    others = assigned("x", (A, 0, True), (B, 1, True)) + assigned("y", (A, 0, True)) + assigned("z", (B, 0, True))
    assert steps(3, [], {A, B, C}, others=others) == (
        AddAssignment("item", C, 0),
        AddAssignment("item", B, 1),
        AddAssignment("item", A, 2),
    )
    # In proportion to limits.
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
    # Nor what is inconsistent, while the item has not what it needs.
    assert steps(3, assigned("item", (A, 0, True), (B, 1, True), (C, 2, False), (D, 3, False)), {A, B, D}) == ()
    # Inconsistent ones go when the others suffice.
    assert steps(2, current, {A, B}) == (RemoveAssignment("item", C, 2),)


def test_the_most_loaded_members_are_relieved_first() -> None:
    current = assigned("item", (A, 0, True), (B, 1, True), (C, 2, True), (D, 3, True))
    others = assigned("x", (B, 0, True)) + assigned("y", (B, 0, True), (A, 1, True))
    # Only one may go: three replicas are asked for, though the placement holds two, as when one has no place.
    assert steps(3, current, {C, D}, others=others) == (RemoveAssignment("item", B, 1),)
    assert steps(3, current, {C, D}, others=others, limits=(2, 9, 9, 9))[0] == RemoveAssignment("item", A, 0)
    # A member that may hold nothing comes before all.
    assert steps(3, current, {B, C}, others=others, limits=(9, 9, 9, 0)) == (RemoveAssignment("item", D, 3),)


def test_members_that_are_gone_and_second_slots_go_whatever_is_consistent() -> None:
    assert steps(2, assigned("item", (GONE, 0, True), (A, 1, False)), {A, B}) == (
        AddAssignment("item", B, 2),
        RemoveAssignment("item", GONE, 0),
        MoveAssignment("item", A, 1, 0),
    )
    assert steps(2, assigned("item", (A, 0, False), (A, 1, False), (B, 2, False)), {A, B}) == (
        RemoveAssignment("item", A, 1),
    )


def test_a_lost_primary_is_replaced_by_a_consistent_replica_of_few_primaries() -> None:
    lagging, current = (A, 1, False), (B, 2, True)
    assert steps(2, assigned("item", lagging, current), {A, B}) == (MoveAssignment("item", B, 2, 0),)
    others = assigned("x", (B, 0, True))
    both = assigned("item", (B, 1, True), (C, 2, True))
    assert steps(2, both, {B, C}, others=others) == (MoveAssignment("item", C, 2, 0),)
    assert steps(2, both, {B, C}) == (MoveAssignment("item", B, 1, 0),)
    # There is no better one.
    assert steps(2, assigned("item", lagging), {A, B}) == (AddAssignment("item", B, 2), MoveAssignment("item", A, 1, 0))


def test_slots_are_packed_one_at_a_time_and_only_when_nothing_else_happens() -> None:
    gaps = assigned("item", (A, 0, True), (B, 2, True), (C, 5, True))
    assert steps(3, gaps, {A, B, C}) == (MoveAssignment("item", B, 2, 1),)
    assert steps(4, gaps, {A, B, C, D}) == (AddAssignment("item", D, 6),)
    two_primaries = assigned("item", (A, 0, True), (B, 0, True), (C, 2, True))
    assert steps(3, two_primaries, {A, B, C}) == (MoveAssignment("item", B, 0, 1),)


def test_a_full_member_gets_an_item_when_it_has_given_one_up() -> None:
    members = [PlanMember(member, 1) for member in (A, B, C)]
    world = AllocationWorld(
        [PlanItem("x", 1), PlanItem("y", 1)], members, assigned("x", (A, 0, True)) + assigned("y", (B, 0, True))
    )
    taken: list[list[Change]] = []

    def planning(*state: object) -> object:
        """Item x shall go to B, when item y has gone to C."""
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


def test_full_members_that_wait_for_one_another_are_helped_by_a_third() -> None:
    members = [PlanMember(A, 1), PlanMember(B, 1), PlanMember(C, 1)]
    items = [PlanItem("x", 1), PlanItem("y", 1)]
    placement = [[1], [0]]  # They shall change places.
    current = {"x": assigned("x", (A, 0, True)), "y": assigned("y", (B, 0, True))}
    found = Convergence(members, [1, 1, 1]).steps(items, current, placement)
    assert found == [ItemChanges("x", (AddAssignment("x", C, 1),))]
    # First of all they wait for items that are not consistent: whatever moves may be about to make room.
    lagging = {"x": assigned("x", (A, 0, False)), "y": assigned("y", (B, 0, True))}
    assert Convergence(members, [1, 1, 1]).steps(items, lagging, placement) == []
    current["x"] = assigned("x", (A, 0, False), (C, 1, False))
    assert Convergence(members, [1, 1, 1]).steps(items, current, placement) == []
    current["x"] = assigned("x", (A, 0, True), (C, 1, True))
    # The place that somebody waits for becomes free first, not the one that the detour took.
    found = Convergence(members, [1, 1, 1]).steps(items, current, placement)
    assert found[0] == ItemChanges("x", (RemoveAssignment("x", A, 0), MoveAssignment("x", C, 1, 0)))
    # Without a third they stay as they are.
    full = {"x": assigned("x", (A, 0, True)), "y": assigned("y", (B, 0, True))}
    assert Convergence(members[:2], [1, 1]).steps(items, full, placement) == []
