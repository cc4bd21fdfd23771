"""The allocator's planner: which member holds which item. Pure.

`plan` looks at the current assignments and returns the changes to make *now*. The caller applies them and plans again
as assignments become consistent, until nothing is left to change. Planning has two steps, each a module of its own.

`coranto.coordination.placement` decides where every item belongs in the end. In order of weight:

1. no member is above its limit; exiting members give up as much as the others can take (`coordination.capacity`);
2. each item is on as many distinct members as its replication asks for, as far as limits allow;
3. each replicated item has two zones or more, if there are two;
4. no member is above its fair share, in proportion to its limit;
5. current assignments stay where they are;
6. new replicas spread evenly over zones, and then over members.

`coranto.coordination.convergence` returns the steps towards that placement that are safe now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from coranto.coordination.capacity import effective_limits
from coranto.coordination.convergence import Convergence
from coranto.coordination.layout import MemberId
from coranto.coordination.placement import Placement, choose_placement
from coranto.coordination.plan_values import (
    AddAssignment,
    AllocationPlan,
    Change,
    ItemChanges,
    MoveAssignment,
    PlanAssignment,
    PlanItem,
    PlanMember,
    RemoveAssignment,
)

__all__ = [
    "AddAssignment",
    "AllocationPlan",
    "Change",
    "ItemChanges",
    "MoveAssignment",
    "PlanAssignment",
    "PlanItem",
    "PlanMember",
    "Planner",
    "RemoveAssignment",
    "can_drain",
]

_by_id = attrgetter("id")


class Planner:
    """Plans repeatedly for one cluster, and chooses a new placement only when its items or members changed.

    Until then it works towards the last placement, even if assignments change. Its state only saves work: a
    new planner, such as the one of a new leader, gives the same guarantees.
    """

    def __init__(self) -> None:
        self._items: list[PlanItem] = []
        self._members: list[PlanMember] = []
        self._placement: Placement | None = None
        self.placements = 0
        """The number of placements chosen so far."""

    def plan(
        self, items: Iterable[PlanItem], members: Iterable[PlanMember], assignments: Iterable[PlanAssignment]
    ) -> AllocationPlan:
        """Return the changes to make now. The last placement is used while items and members are unchanged."""
        ordered_items = sorted(items, key=_by_id)
        ordered_members = sorted(members, key=_by_id)
        current: dict[str, list[PlanAssignment]] = {}
        for assignment in assignments:
            current.setdefault(assignment.item, []).append(assignment)
        for found in current.values():
            found.sort(key=_slot_order)

        placement = self._placement
        if placement is None or ordered_items != self._items or ordered_members != self._members:
            numbers = {member.id: number for number, member in enumerate(ordered_members)}
            held = [
                dict.fromkeys(numbers[a.member] for a in current.get(item.id, ()) if a.member in numbers)
                for item in ordered_items
            ]
            placement = choose_placement(ordered_items, ordered_members, [list(found) for found in held])
            self._items, self._members, self._placement = ordered_items, ordered_members, placement
            self.placements += 1
        convergence = Convergence(ordered_members, placement.limits)
        return AllocationPlan(
            tuple(convergence.steps(ordered_items, current, placement.members)), placement.cost.unplaced
        )


def _slot_order(assignment: PlanAssignment) -> tuple[int, str, str]:
    return (assignment.slot, assignment.member.zone, assignment.member.suffix)


def can_drain(items: Iterable[PlanItem], members: Iterable[PlanMember], leaving: MemberId) -> bool:
    """Return True if `leaving`, when it exits, can hand over all its assignments.

    That requires that the others have capacity, that no other exiting member takes it first, and that a member stays.
    Otherwise, waiting before the exit has no effect.
    """
    found = [replace(member, exiting=True) if member.id == leaving else member for member in members]
    limits = effective_limits(list(items), found)
    stays = any(limit and not member.exiting for member, limit in zip(found, limits, strict=True))
    return stays and all(not limit for member, limit in zip(found, limits, strict=True) if member.id == leaving)
