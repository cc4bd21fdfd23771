"""The planner's choice of members for every item, given its current members. Pure.

`choose_placement` first makes greedy choices: keep current replicas, add a second zone to items that live in one,
relieve members above their share, and give every item the replicas that it lacks. The result is almost always optimal,
which a bound of the cost shows immediately. If it is not, for example because limits leave little room, the flow
network (`coranto.coordination.flow_network`) improves it until it is optimal.

Among placements of equal cost the greedy choices prefer an even spread over zones, then the members with the lowest
load in proportion to their share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coranto.coordination.capacity import effective_limits, fair_shares
from coranto.coordination.flow_network import Cost, FlowNetwork
from coranto.coordination.plan_values import PlanItem, PlanMember

_SCATTER = 2654435761
"""A multiplier that scatters consecutive numbers: 2**32 divided by the golden ratio."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The members of each item and members' effective limits. Items and members are numbered in the given order."""

    members: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    cost: Cost


def choose_placement(
    items: Sequence[PlanItem], members: Sequence[PlanMember], held: Sequence[Sequence[int]]
) -> Placement:
    """Choose a placement of minimum cost (`coranto.coordination.flow_network.Cost`).

    `items` and `members` must be in the order of their ids, so that equal input gives equal output. `held[i]` are the
    numbers of the members that hold item `i`, without repetition, the most preferred ones first.
    """
    limits = effective_limits(items, members)
    zone_numbers = {zone: number for number, zone in enumerate(sorted({member.id.zone for member in members}))}
    zones = [zone_numbers[member.id.zone] for member in members]
    network = FlowNetwork(
        [max(0, item.replication) for item in items],
        [[member for member in found if limits[member]] for found in held],
        zones,
        limits,
        fair_shares(items, zones, limits),
    )
    _Chooser(network, [member.exiting for member in members]).choose()
    cost = network.optimize()
    return Placement(tuple(map(tuple, network.placed)), tuple(limits), cost)


class _FreeMembers:
    """Members below their ceiling (a number of items), by zone, with the lowest load first."""

    def __init__(self, network: FlowNetwork, ceilings: Sequence[int], reluctant: Sequence[bool]) -> None:
        self._network = network
        self._ceilings = ceilings
        self._reluctant = reluctant
        self.zones: dict[int, list[tuple[float, int]]] = {zone: [] for zone in sorted(set(network.zones))}
        self._entries: list[tuple[float, int] | None] = [None] * len(ceilings)
        for member in range(len(ceilings)):
            self.refresh(member)

    def refresh(self, member: int) -> None:
        """Update the member's rank after a change of its count."""
        ranking = self.zones[self._network.zones[member]]
        entry = self._entries[member]
        if entry is not None:
            del ranking[bisect_left(ranking, entry)]
        count, ceiling = self._network.counts[member], self._ceilings[member]
        entry = (count / ceiling + self._reluctant[member], member) if count < ceiling else None
        if entry is not None:
            insort(ranking, entry)
        self._entries[member] = entry

    def least_loaded(self, zone: int, item: int, placed: Sequence[int]) -> tuple[float, int] | None:
        """Return (load, number) of the least loaded member of a zone that the item is not placed on, or None.

        Among members of equal load, the choice varies with the item. Otherwise the same few members would share all
        their items, and would have to take over the whole load of a lost member.
        """
        ranking = self.zones[zone]
        if not ranking:
            return None
        lowest = ranking[0][0]
        equals = bisect_right(ranking, (lowest, len(self._entries)))
        first = (item * (2 * zone + 1) * _SCATTER >> 16) % equals
        for at in range(equals):
            member = ranking[(first + at) % equals][1]
            if member not in placed:
                return (lowest, member)
        return next((entry for entry in ranking[equals:] if entry[1] not in placed), None)

    def __bool__(self) -> bool:
        return any(self.zones.values())


class _Chooser:
    """The greedy choices. `reluctant` members are chosen last."""

    def __init__(self, network: FlowNetwork, reluctant: Sequence[bool]) -> None:
        self.network = network
        self.below_share = _FreeMembers(network, network.shares, reluctant)
        self.below_limit = _FreeMembers(network, network.limits, reluctant)

    def choose(self) -> None:
        self._keep()
        self._respect_limits()
        self._spread()
        self._relieve()
        for free, anywhere in (
            (self.below_share, False),
            (self.below_limit, False),
            (self.below_share, True),
            (self.below_limit, True),
        ):
            self._fill(free, anywhere)

    def _assign(self, item: int, member: int) -> None:
        self.network.assign(item, member)
        self.below_share.refresh(member)
        self.below_limit.refresh(member)

    def _unassign(self, item: int, member: int) -> None:
        self.network.unassign(item, member)
        self.below_share.refresh(member)
        self.below_limit.refresh(member)

    def _excess(self, member: int) -> int:
        return self.network.counts[member] - self.network.shares[member]

    def _target(self, free: _FreeMembers, item: int, leaving: int | None, *, anywhere: bool) -> tuple[int, int] | None:
        """Return the best member with capacity for the item, and the number of the item's other replicas in its zone.

        `leaving` is the member that the item would leave, if any. A member that brings all replicas into one zone is
        considered only with `anywhere`.
        """
        network = self.network
        placed = network.placed[item]
        zones = [network.zones[member] for member in placed if member != leaving]
        last = network.spreads(item) and len(zones) == network.replication[item] - 1
        best: tuple[int, float, int] | None = None
        for zone in free.zones:
            near = zones.count(zone)
            if (best is not None and near > best[0]) or (last and not anywhere and near == len(zones)):
                continue
            found = free.least_loaded(zone, item, placed)
            if found is not None and (best is None or (near, *found) < best):
                best = (near, *found)
        return None if best is None else (best[2], best[0])

    def _keep(self) -> None:
        """Keep current replicas. Drop replicas beyond the replication, first on the members most above their share.

        Two zones remain if possible.
        """
        network = self.network
        for item, held in enumerate(network.held):
            network.placed[item] = list(held)
            for member in held:
                network.counts[member] += 1
        for item, placed in enumerate(network.placed):
            while len(placed) > network.replication[item]:
                zones = [network.zones[member] for member in placed]
                ranked = sorted(
                    range(len(placed)),
                    key=lambda at: (max(0, self._excess(placed[at])), zones.count(zones[at]), at),
                    reverse=True,
                )
                apart = (at for at in ranked if len({*zones[:at], *zones[at + 1 :]}) > 1)
                network.unassign(item, placed[next(apart, ranked[0])])
        for member in range(len(network.limits)):
            self.below_share.refresh(member)
            self.below_limit.refresh(member)

    def _items_on(self, members: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {member: [] for member in members}
        for item, placed in enumerate(self.network.placed):
            for member in placed:
                if member in found:
                    found[member].append(item)
        return found

    def _respect_limits(self) -> None:
        """Drop items of members above their limit: first those that another member can take."""
        network = self.network
        over = [member for member, limit in enumerate(network.limits) if network.counts[member] > limit]
        for member, items in self._items_on(over).items() if over else ():
            surplus = network.counts[member] - network.limits[member]
            movable = [item for item in items if self._target(self.below_limit, item, member, anywhere=True)]
            stuck = [item for item in items if item not in set(movable)] if len(movable) < surplus else []
            for item in [*movable[::-1], *stuck[::-1]][:surplus]:
                self._unassign(item, member)

    def _spread(self) -> None:
        """Move one replica of items that live in a single zone to another zone, if it has capacity."""
        network = self.network
        for item, placed in enumerate(network.placed):
            if not network.single_zoned(item):
                continue
            leaving = max(placed, key=lambda member: (self._excess(member), member))
            for free in (self.below_share, self.below_limit):
                found = self._target(free, item, leaving, anywhere=False)
                if found is not None:
                    self._unassign(item, leaving)
                    self._assign(item, found[0])
                    break

    def _relieve(self) -> None:
        """Move items from members above their share to members below it.

        Items that become more evenly spread over zones move first. No item in several zones is moved into one.
        """
        network = self.network
        over = [member for member in range(len(network.limits)) if self._excess(member) > 0]
        if not over or not self.below_share:
            return
        items_on = self._items_on(over)
        for tolerated in (-1, 0, max(network.replication)):
            for leaving in sorted(over, key=lambda member: (-self._excess(member), member)):
                zone = network.zones[leaving]
                for item in items_on[leaving]:
                    if self._excess(leaving) <= 0 or not self.below_share:
                        break
                    if leaving not in network.placed[item]:
                        continue
                    found = self._target(self.below_share, item, leaving, anywhere=network.single_zoned(item))
                    if found is None:
                        continue
                    near = sum(network.zones[member] == zone for member in network.placed[item]) - 1
                    if found[1] - near <= tolerated:
                        self._unassign(item, leaving)
                        self._assign(item, found[0])

    def _fill(self, free: _FreeMembers, anywhere: bool) -> None:
        """Place missing replicas where there is capacity: first one of each item, then a second, and so on."""
        network = self.network
        short = [i for i, placed in enumerate(network.placed) if len(placed) < network.replication[i]]
        wanted = 0
        while short and free:
            wanted += 1
            for item in short:
                if len(network.placed[item]) < min(wanted, network.replication[item]):
                    found = self._target(free, item, None, anywhere=anywhere)
                    if found is not None:
                        self._assign(item, found[0])
            short = [item for item in short if wanted < network.replication[item]]
