"""The steps towards a placement that are safe now. Pure.

A consistent assignment is never removed if fewer consistent ones than the item's replication would remain. So a move
first adds a replica, and removes the old one when the new one has caught up. No step brings a member above its limit.
The caller applies the steps, and asks for more when assignments become consistent. There are none when the placement is
reached.

Slot 0 is the primary. A new assignment takes the next slot above the item's highest. A vacant slot 0 goes to a
consistent assignment, on the member with the fewest primaries in proportion to its limit. Other slots are compacted
one at a time, when the item has no other changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from coranto.coordination.layout import MemberId
from coranto.coordination.plan_values import (
    AddAssignment,
    Change,
    ItemChanges,
    MoveAssignment,
    PlanAssignment,
    PlanItem,
    PlanMember,
    RemoveAssignment,
)

_GONE = -1  # The member of an assignment, when that member does not exist.


class Convergence:
    """Computes the steps for one state of a cluster. `limits` are the members' effective limits."""

    def __init__(self, members: Sequence[PlanMember], limits: Sequence[int]) -> None:
        self._members = members
        self._limits = limits
        self._numbers: Mapping[MemberId, int] = {member.id: number for number, member in enumerate(members)}
        # The numbers of items and of primaries on every member, with the changes so far.
        self._total = [0] * len(members)
        self._primaries = [0] * len(members)
        # The number of items that every member has yet to receive.
        self._wanted = [0] * len(members)

    def steps(
        self,
        items: Sequence[PlanItem],
        assignments: Mapping[str, Sequence[PlanAssignment]],
        placement: Sequence[Sequence[int]],
    ) -> list[ItemChanges]:
        """Return the changes to make now. `assignments` are by item, in slot order; items in the placement's order."""
        numbers = self._numbers
        unsettled: list[tuple[PlanItem, Sequence[PlanAssignment], list[int], Sequence[int]]] = []
        for item, desired in zip(items, placement, strict=True):
            current = assignments.get(item.id, ())
            holders = [numbers.get(assignment.member, _GONE) for assignment in current]
            settled = len(holders) == len(desired)
            for slot, (assignment, holder) in enumerate(zip(current, holders, strict=True)):
                self._count(holder, assignment.slot, 1)
                settled = settled and assignment.slot == slot and holder in desired
            # Two assignments of one member do not make two replicas.
            if not settled or len(set(holders)) != len(holders):
                unsettled.append((item, current, holders, desired))
        changes = self._orphans(items, assignments)
        for _, _, holders, desired in unsettled:
            for member in desired:
                self._wanted[member] += member not in holders
        blocked = False
        waiting = False
        for item, current, holders, desired in unsettled:
            found = self._item_steps(item, current, holders, desired)
            if found:
                changes.append(ItemChanges(item.id, tuple(found)))
            blocked = blocked or any(member not in holders for member in desired)
            waiting = waiting or not all(assignment.consistent for assignment in current)
        if blocked and not waiting and not changes:
            changes = self._detour(unsettled)
        changes.sort(key=lambda change: change.item)
        return changes

    def _orphans(
        self, items: Sequence[PlanItem], assignments: Mapping[str, Sequence[PlanAssignment]]
    ) -> list[ItemChanges]:
        """Return the removal of all assignments whose item does not exist any more."""
        changes = []
        for id in assignments.keys() - {item.id for item in items}:
            for assignment in assignments[id]:
                self._count(self._numbers.get(assignment.member, _GONE), assignment.slot, 1)
            changes.append(ItemChanges(id, tuple(self._remove(a) for a in assignments[id]), orphaned=True))
        return changes

    # --- counts of members ---------------------------------------------------------------------------------------

    def _count(self, member: int, slot: int, by: int) -> None:
        if member != _GONE:
            self._total[member] += by
            if slot == 0:
                self._primaries[member] += by

    def _has_capacity(self, member: int) -> bool:
        return self._total[member] < self._limits[member]

    def _load(self, member: int) -> float:
        return self._total[member] / self._limits[member] if self._limits[member] else inf

    def _primary_load(self, member: int) -> float:
        if member == _GONE or not self._limits[member]:
            return inf
        return self._primaries[member] / self._limits[member]

    def _remove(self, assignment: PlanAssignment) -> RemoveAssignment:
        self._count(self._numbers.get(assignment.member, _GONE), assignment.slot, -1)
        return RemoveAssignment(assignment.item, assignment.member, assignment.slot)

    # --- steps of one item ---------------------------------------------------------------------------------------

    def _item_steps(
        self, item: PlanItem, current: Sequence[PlanAssignment], holders: Sequence[int], desired: Sequence[int]
    ) -> list[Change]:
        removed = self._removable(item, current, holders, desired)
        changes: list[Change] = []
        next_slot = max((assignment.slot for assignment in current), default=-1) + 1
        # The first newcomer of an item without assignments becomes its primary.
        newcomers = [member for member in desired if member not in holders]
        for member in sorted(newcomers, key=lambda member: (self._primary_load(member), member)):
            if self._has_capacity(member):
                changes.append(AddAssignment(item.id, self._members[member].id, next_slot))
                self._count(member, next_slot, 1)
                self._wanted[member] -= 1
                next_slot += 1
        changes.extend(self._remove(current[at]) for at in removed)

        kept = [at for at in range(len(current)) if at not in removed]
        if kept and current[kept[0]].slot != 0:
            # Slot 0 is, or becomes, vacant.
            chosen = min(kept, key=lambda at: (not current[at].consistent, self._primary_load(holders[at]), at))
            changes.append(self._move(current[chosen], 0))
        elif not changes:
            for position, at in enumerate(kept):
                if current[at].slot != position:
                    changes.append(self._move(current[at], position))
                    break
        return changes

    def _move(self, assignment: PlanAssignment, slot: int) -> MoveAssignment:
        holder = self._numbers.get(assignment.member, _GONE)
        self._count(holder, assignment.slot, -1)
        self._count(holder, slot, 1)
        return MoveAssignment(assignment.item, assignment.member, assignment.slot, slot)

    def _removable(
        self, item: PlanItem, current: Sequence[PlanAssignment], holders: Sequence[int], desired: Sequence[int]
    ) -> list[int]:
        """Return the positions of the assignments that can be removed now.

        These are assignments of missing members, second assignments of a member, and undesired assignments while enough
        consistent ones remain. Undesired assignments of full members that wait for another item come first, then
        assignments of the most loaded members.
        """
        removed: list[int] = []
        undesired: list[int] = []
        consistent = 0
        seen: set[int] = set()
        for at, holder in enumerate(holders):
            if holder == _GONE or holder in seen:
                removed.append(at)
                continue
            seen.add(holder)
            consistent += current[at].consistent
            if holder not in desired:
                undesired.append(at)

        def removal_order(at: int) -> tuple[bool, float, int]:
            holder = holders[at]
            needed = self._wanted[holder] > 0 and not self._has_capacity(holder)
            return (not needed, -self._load(holder), -at)

        for at in sorted(undesired, key=removal_order):
            if consistent < item.replication:
                break  # Too few are consistent, so each assignment may be needed.
            if current[at].consistent and consistent == item.replication:
                continue
            removed.append(at)
            consistent -= current[at].consistent
        return removed

    def _detour(
        self, unsettled: Sequence[tuple[PlanItem, Sequence[PlanAssignment], list[int], Sequence[int]]]
    ) -> list[ItemChanges]:
        """Resolve a deadlock of full members that wait for one another to give up an item.

        Add one item to a third member with capacity, so that it can leave a full member.
        """
        for item, current, holders, desired in unsettled:
            if not any(self._wanted[holder] for holder in holders if holder not in desired):
                continue  # No other item waits for capacity that this item could free.
            with_capacity = [m for m in range(len(self._members)) if self._has_capacity(m) and m not in holders]
            if with_capacity:
                member = min(with_capacity, key=lambda member: (self._load(member), member))
                slot = max(assignment.slot for assignment in current) + 1
                return [ItemChanges(item.id, (AddAssignment(item.id, self._members[member].id, slot),))]
        return []
