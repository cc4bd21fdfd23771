"""A cluster's assignments in memory. It applies plans as etcd would, and checks the guarantees of each step.

It serves tests of the planner, and measures the cost of a change of the cluster's topology until it converges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from coranto.coordination.flow_network import Cost, FlowNetwork
from coranto.coordination.layout import MemberId
from coranto.coordination.planning import (
    AddAssignment,
    AllocationPlan,
    ItemChanges,
    MoveAssignment,
    PlanAssignment,
    PlanItem,
    PlanMember,
    Planner,
    RemoveAssignment,
)

Planning = Callable[[Iterable[PlanItem], Iterable[PlanMember], Iterable[PlanAssignment]], AllocationPlan]


def plan(
    items: Iterable[PlanItem], members: Iterable[PlanMember], assignments: Iterable[PlanAssignment]
) -> AllocationPlan:
    """Return the changes that a stateless planner makes."""
    return Planner().plan(items, members, assignments)


@dataclass(slots=True)
class Effort:
    """The cost of converging: rounds of planning that changed something, and the changes by kind.

    `promoted` and `packed` count assignments that only got another slot.
    """

    rounds: int = 0
    added: int = 0
    removed: int = 0
    promoted: int = 0
    packed: int = 0


class AllocationWorld:
    """Items, members and assignments, which tests may change freely between plans.

    An item synchronizes like a journal: after a change of its members or its primary, its assignments are inconsistent
    until `synchronize`, which has no effect on an item that is assigned to a missing member.
    """

    def __init__(
        self,
        items: Iterable[PlanItem],
        members: Iterable[PlanMember],
        assignments: Iterable[PlanAssignment] = (),
        *,
        planning: Planning = plan,
    ) -> None:
        self.items = {item.id: item for item in items}
        self.members = {member.id: member for member in members}
        self.assignments: dict[str, list[PlanAssignment]] = {}
        for assignment in assignments:
            self.assignments.setdefault(assignment.item, []).append(assignment)
        self.planning = planning

    def __iter__(self) -> Iterator[PlanAssignment]:
        for found in self.assignments.values():
            yield from found

    def put_items(self, *items: PlanItem) -> None:
        self.items.update((item.id, item) for item in items)

    def put_members(self, *members: PlanMember) -> None:
        self.members.update((member.id, member) for member in members)

    def lose_members(self, *members: MemberId) -> None:
        """Expire members' leases: the members and their assignments disappear."""
        for member in members:
            del self.members[member]
        self.assignments = {
            item: [assignment for assignment in found if assignment.member in self.members]
            for item, found in self.assignments.items()
        }

    def of(self, item: str) -> list[PlanAssignment]:
        """Return an item's assignments, in slot order."""
        return sorted(self.assignments.get(item, ()), key=lambda assignment: (assignment.slot, assignment.member))

    def members_of(self, item: str) -> list[MemberId]:
        return [assignment.member for assignment in self.of(item)]

    def counts(self) -> Counter[MemberId]:
        """Return the number of items that each member holds."""
        return Counter(assignment.member for assignment in self)

    def primaries(self) -> Counter[MemberId]:
        """Return the number of items that each member is primary of."""
        return Counter(assignment.member for assignment in self if assignment.slot == 0)

    def plan(self) -> AllocationPlan:
        return self.planning(self.items.values(), self.members.values(), self)

    def apply(self, changes: AllocationPlan, effort: Effort | None = None) -> None:
        """Apply the planned changes. Raises AssertionError for a change that breaks a guarantee.

        That is: it removes a needed consistent assignment, fills a member above its limit, uses a slot or a member
        twice for an item, or assigns an unknown member.
        """
        before = self.counts()
        for item in changes.items:
            assert item.changes, f"{item.item}: no changes"
            assert item.orphaned == (item.item not in self.items), f"{item.item}: wrong value of `orphaned`"
            self._apply_item(item, effort if effort is not None else Effort())
        for member, count in self.counts().items():
            limit = self.members[member].limit if member in self.members else 0
            assert count <= max(limit, before[member]), f"{member} was filled above its limit of {limit}"
        if effort is not None and changes.items:
            effort.rounds += 1

    def _apply_item(self, item: ItemChanges, effort: Effort) -> None:
        before = {(found.member, found.slot): found for found in self.assignments.get(item.item, ())}
        after = dict(before)
        holders = {member for member, _ in before}
        top = max((slot for _, slot in before), default=-1)
        synchronized = True
        for change in item.changes:
            assert change.item == item.item
            match change:
                case AddAssignment():
                    assert change.slot > top, f"{change}: not above the item's other slots"
                    assert change.member not in holders, f"{change}: the member holds the item"
                    assert change.member in self.members, f"{change}: there is no such member"
                    top = change.slot
                    after[change.member, change.slot] = PlanAssignment(item.item, change.member, change.slot, False)
                    effort.added += 1
                    synchronized = False
                case RemoveAssignment():
                    del after[change.member, change.slot]
                    effort.removed += 1
                    synchronized = False
                case MoveAssignment():
                    old = after.pop((change.member, change.slot))
                    after[change.member, change.to_slot] = PlanAssignment(
                        item.item, change.member, change.to_slot, old.consistent
                    )
                    if change.to_slot == 0:
                        effort.promoted += 1
                        synchronized = False
                    else:
                        effort.packed += 1
        if item.item in self.items:
            wanted = self.items[item.item].replication
            was = {found.member for found in before.values() if found.consistent and found.member in self.members}
            now = {member for member, _ in after if member in was}
            assert was == now or len(now) >= wanted, f"{item.item}: a needed consistent assignment was removed"
        self.assignments[item.item] = [
            found if synchronized else PlanAssignment(found.item, found.member, found.slot, False)
            for found in after.values()
        ]

    def synchronize(self, which: Callable[[str], bool] = lambda _: True) -> None:
        """Make the items that `which` selects consistent."""
        for item, found in self.assignments.items():
            if which(item) and all(a.member in self.members for a in found) and not all(a.consistent for a in found):
                self.assignments[item] = [PlanAssignment(a.item, a.member, a.slot, True) for a in found]

    def converge(self, rounds: int = 80) -> Effort:
        """Synchronize, plan and apply until nothing changes. Raises AssertionError when that takes too many rounds."""
        effort = Effort()
        while effort.rounds < rounds:
            self.synchronize()
            changes = self.plan()
            if not changes.items:
                return effort
            self.apply(changes, effort)
        raise AssertionError(f"it does not converge in {rounds} rounds; next would be {self.plan()}")


def least_cost(network: FlowNetwork) -> Cost:
    """Return the cost of the cheapest placement by trying all: only for networks of a few items and members.

    It processes the items in turn. For each possible state of the members after an item, it keeps the cheapest way to
    reach it.
    """
    usable = [member for member, limit in enumerate(network.limits) if limit]
    several = len({network.zones[member] for member in usable}) > 1
    states: dict[tuple[int, ...], tuple[int, int, int]] = {(0,) * len(network.limits): (0, 0, 0)}
    for wanted, held in zip(network.replication, network.held, strict=True):
        after: dict[tuple[int, ...], tuple[int, int, int]] = {}
        for members in (found for size in range(wanted + 1) for found in combinations(usable, size)):
            zones = {network.zones[member] for member in members}
            single = several and wanted > 1 and len(members) == wanted and len(zones) == 1
            moves = sum(member not in held for member in members)
            for counts, (unplaced, single_zoned, moved) in states.items():
                now = tuple(count + (member in members) for member, count in enumerate(counts))
                if any(count > limit for count, limit in zip(now, network.limits, strict=True)):
                    continue
                cost = (unplaced + wanted - len(members), single_zoned + single, moved + moves)
                after[now] = min(cost, after.get(now, cost))
        states = after
    costs = []
    for counts, (unplaced, single_zoned, moved) in states.items():
        over_share = sum(max(0, count - share) for count, share in zip(counts, network.shares, strict=True))
        costs.append((unplaced, single_zoned, over_share, moved))
    return Cost(*min(costs))
