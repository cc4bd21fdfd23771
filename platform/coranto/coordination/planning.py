"""Which member shall hold which item: the allocator's planner, pure.

`plan` looks at the current assignments and returns the changes to make *now*. Applying them and planning again, as
members become consistent, leads to a placement at which there is nothing left to change. It works in two steps.

`choose_placement` (`coranto.coordination.placement`) decides where every item belongs in the end.

`_converge` takes the steps towards it that are safe today: it never removes a consistent assignment if fewer than the
item's replication would remain consistent, so a move first over-replicates, and removes when the newcomer has caught
up. Slot 0 is the primary. A new assignment takes the slot above all of its item; a vacant slot 0 is given to a
consistent assignment on the member with the fewest primaries; other slots are packed down one at a time when all is
quiet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from coranto.coordination.layout import MemberId
from coranto.coordination.placement import Placement, PlanItem, PlanMember, choose_placement


@dataclass(frozen=True, slots=True)
class PlanAssignment:
    item: str
    member: MemberId
    slot: int
    consistent: bool


@dataclass(frozen=True, slots=True)
class Add:
    """Create an assignment, empty, under the member's lease."""

    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an assignment."""

    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """Give an assignment another slot, with the same value and lease. To slot 0: promote it."""

    item: str
    member: MemberId
    slot: int
    to_slot: int


Change = Add | Remove | Move


@dataclass(frozen=True, slots=True)
class ItemChanges:
    """The changes of one item, to be applied together. `orphaned` when there is no such item (any more)."""

    item: str
    changes: tuple[Change, ...]
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to change, by item, and how many replicas cannot be placed for lack of members or capacity."""

    items: tuple[ItemChanges, ...]
    unplaced: int = 0


def plan(items: Iterable[PlanItem], members: Iterable[PlanMember], assignments: Iterable[PlanAssignment]) -> Plan:
    """The changes to make now. The same input in any order gives the same plan."""
    by_id = {item.id: item for item in sorted(items, key=lambda item: item.id)}
    member_by_id = {member.id: member for member in sorted(members, key=lambda member: member.id)}
    current: dict[str, list[PlanAssignment]] = {}
    for assignment in sorted(assignments, key=lambda a: (a.item, a.slot, a.member)):
        current.setdefault(assignment.item, []).append(assignment)

    held = {item: [a.member for a in current.get(item, ()) if a.member in member_by_id] for item in by_id}
    placement = choose_placement(by_id, member_by_id, held)
    unplaced = sum(max(0, item.replication - len(placement[item.id])) for item in by_id.values())
    changes = _converge(by_id, member_by_id, current, placement)
    return Plan(tuple(changes), unplaced)


def can_drain(items: Iterable[PlanItem], members: Iterable[PlanMember], leaving: MemberId) -> bool:
    """Whether the other members that are not exiting could take all items. An exiting member that gets no for an answer
    waits in vain for its assignments to go."""
    items = list(items)
    others = [member for member in members if member.id != leaving and not member.exiting and member.limit > 0]
    needed = max((item.replication for item in items), default=0)
    return len(others) >= needed and sum(m.limit for m in others) >= sum(item.replication for item in items)


class _Tally:
    """What every member holds now, with the changes so far."""

    def __init__(self, members: Mapping[MemberId, PlanMember], current: Iterable[Sequence[PlanAssignment]]) -> None:
        self.members = members
        self.total = dict.fromkeys(members, 0)
        self.primaries = dict.fromkeys(members, 0)
        for assignments in current:
            for assignment in assignments:
                self.count(assignment.member, assignment.slot, 1)

    def count(self, member: MemberId, slot: int, by: int) -> None:
        if member in self.total:
            self.total[member] += by
            if slot == 0:
                self.primaries[member] += by

    def has_room(self, member: MemberId) -> bool:
        return self.total[member] < self.members[member].limit

    def load(self, member: MemberId) -> float:
        return self._ratio(self.total, member)

    def primary_load(self, member: MemberId) -> float:
        return self._ratio(self.primaries, member)

    def _ratio(self, counts: Mapping[MemberId, int], member: MemberId) -> float:
        found = self.members.get(member)
        return counts[member] / found.limit if found is not None and found.limit else inf


def _converge(
    items: Mapping[str, PlanItem],
    members: Mapping[MemberId, PlanMember],
    current: Mapping[str, Sequence[PlanAssignment]],
    placement: Placement,
) -> Iterable[ItemChanges]:
    tally = _Tally(members, current.values())
    for id in sorted(items.keys() | current.keys()):
        assignments = current.get(id, ())
        if id not in items:
            for a in assignments:
                tally.count(a.member, a.slot, -1)
            yield ItemChanges(id, tuple(Remove(id, a.member, a.slot) for a in assignments), orphaned=True)
            continue
        changes = _item_steps(items[id], members, assignments, placement[id], tally)
        if changes:
            yield ItemChanges(id, tuple(changes))


def _item_steps(
    item: PlanItem,
    members: Mapping[MemberId, PlanMember],
    assignments: Sequence[PlanAssignment],
    desired: frozenset[MemberId],
    tally: _Tally,
) -> list[Change]:
    """This item's changes that are safe now. `assignments` are in slot order."""
    removed = _removable(item, members, assignments, desired, tally)
    kept = [a for a in assignments if a not in removed]
    changes: list[Change] = []

    next_slot = max((a.slot for a in assignments), default=-1) + 1
    here = {a.member for a in assignments}
    # The first newcomer of an item without assignments becomes its primary.
    for member in sorted(desired - here, key=lambda m: (tally.primary_load(m), m)):
        if tally.has_room(member):
            changes.append(Add(item.id, member, next_slot))
            tally.count(member, next_slot, 1)
            next_slot += 1
    for a in removed:
        changes.append(Remove(item.id, a.member, a.slot))
        tally.count(a.member, a.slot, -1)

    if kept and kept[0].slot != 0:
        # Slot 0 is, or becomes, vacant.
        primary = min(kept, key=lambda a: (not a.consistent, tally.primary_load(a.member), a.slot, a.member))
        changes.append(Move(item.id, primary.member, primary.slot, 0))
        tally.count(primary.member, 0, 1)
        tally.count(primary.member, primary.slot, -1)
    elif not changes:
        for position, a in enumerate(kept):
            if a.slot != position:
                changes.append(Move(item.id, a.member, a.slot, position))
                break
    return changes


def _removable(
    item: PlanItem,
    members: Mapping[MemberId, PlanMember],
    assignments: Sequence[PlanAssignment],
    desired: frozenset[MemberId],
    tally: _Tally,
) -> list[PlanAssignment]:
    """Undesired assignments that can go now: the most loaded members' first, while enough consistent ones remain."""
    first = {a.member: a for a in reversed(assignments)}
    vanished = [a for a in assignments if a.member not in members]
    live = [a for a in assignments if a.member in members]
    # A member can hold one slot of an item. A second one stands for no further replica.
    doubled = [a for a in live if first[a.member] is not a]
    single = [a for a in live if first[a.member] is a]
    consistent = sum(a.consistent for a in single)
    removed = vanished + doubled
    undesired = [a for a in single if a.member not in desired]
    for a in sorted(undesired, key=lambda a: (-tally.load(a.member), -a.slot, a.member)):
        if consistent < item.replication:
            break  # The item is not consistent: whatever it has may be needed.
        if a.consistent and consistent == item.replication:
            continue
        removed.append(a)
        consistent -= a.consistent
    return removed
