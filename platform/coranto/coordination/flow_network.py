"""The optimal placement of items on members, as a minimum-cost flow. Pure.

Every wanted replica is a unit that flows

::

    source ──▶ item ──▶ item in a zone ──▶ member ──▶ sink
        up to R     the R-th unit        one unit     up to the member's limit,
                    costs SINGLE         costs MOVE   units above its share
                                         unless held  cost OVER

and each unit that does not flow costs UNPLACED. The weights are so far apart that costs compare in this order: first
as many replicas as can be placed; then as few items as possible whose replicas all live in one zone; then as few
replicas as possible above members' fair shares; then as few moves as possible. A placement is optimal exactly when no
change of the flow along a cycle has negative cost (the classic condition of minimum-cost flows). `optimize` changes the
flow along such cycles until none is left.

The network has a node for each item, but the members that a cycle visits determine it: an item takes part only by
moving from one member to another. So the search runs over the members and one extra node, the `hub`, which stands for
source and sink. The cost of one step depends only on an item's position: whether its member is in `held`, and whether
its other replicas share one zone. Items in the same position form one group. A step from member to member looks for the
cheapest group, and in it for an item that the target does not hold yet. That makes the search independent of the number
of items, except for grouping them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ANY = -1  # No zone: the other replicas do not share one, or it does not matter.

_Position = tuple[bool, bool, int]
_Group = dict[tuple[int, ...], dict[int, None]]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a placement. Fields are in order of weight: costs compare lexicographically."""

    unplaced: int
    single_zoned: int
    over_share: int
    moves: int


@dataclass(frozen=True, slots=True)
class _Shift:
    """`item` moves from member `out` to member `into`. None for `out`: it gains a replica; for `into`: it loses one."""

    item: int
    out: int | None
    into: int | None


class FlowNetwork:
    """A placement of items on members, which are identified by numbers. `assign` and `unassign` change it.

    `optimize` never exceeds `limits`, and the placement that it starts from must not either. `held[item]` are the
    members that hold the item already: a replica there costs no move.
    """

    def __init__(
        self,
        replication: Sequence[int],
        held: Sequence[Sequence[int]],
        zones: Sequence[int],
        limits: Sequence[int],
        shares: Sequence[int],
    ) -> None:
        self.replication = replication
        self.held = held
        self.zones = zones
        self.limits = limits
        self.shares = shares
        self.placed: list[list[int]] = [[] for _ in replication]
        self.counts = [0] * len(limits)
        self.several_zones = len({zone for zone, limit in zip(zones, limits, strict=True) if limit}) > 1

    def assign(self, item: int, member: int) -> None:
        self.placed[item].append(member)
        self.counts[member] += 1

    def unassign(self, item: int, member: int) -> None:
        self.placed[item].remove(member)
        self.counts[member] -= 1

    def spreads(self, item: int) -> bool:
        """Return True if the item should live in two zones."""
        return self.several_zones and self.replication[item] > 1

    def single_zoned(self, item: int) -> bool:
        """Return True if the item should live in two zones, but all its replicas live in one."""
        placed = self.placed[item]
        if len(placed) < self.replication[item] or not self.spreads(item):
            return False
        return len({self.zones[member] for member in placed}) == 1

    def cost(self) -> Cost:
        placements = list(zip(self.replication, self.held, self.placed, strict=True))
        return Cost(
            unplaced=sum(wanted - len(placed) for wanted, _, placed in placements),
            single_zoned=sum(map(self.single_zoned, range(len(self.placed)))),
            over_share=sum(max(0, count - share) for count, share in zip(self.counts, self.shares, strict=True)),
            moves=sum(member not in held for _, held, placed in placements for member in placed),
        )

    def cost_bound(self) -> Cost:
        """Return a lower bound of the cost of any placement. It is cheap to compute, and often reached."""
        kept = 0
        by_member = [0] * len(self.limits)
        for item, members in enumerate(self.held):
            wanted = self.replication[item]
            for member in members:
                by_member[member] += 1
            if self.spreads(item) and len(members) >= wanted:
                zone = self.zones[members[0]] if members else _ANY
                wanted -= all(self.zones[member] == zone for member in members)
            kept += min(wanted, len(members))
        kept = min(kept, sum(min(share, held) for share, held in zip(self.shares, by_member, strict=True)))
        return Cost(unplaced=0, single_zoned=0, over_share=0, moves=max(0, sum(self.replication) - kept))

    def optimize(self) -> Cost:
        """Change the placement to one of minimum cost, and return that cost."""
        cost = self.cost()
        if cost == self.cost_bound():
            return cost
        _Residual(self).cancel_cycles()
        return self.cost()


class _Residual:
    """The residual network: the possible changes of a placement, as edges between members."""

    def __init__(self, network: FlowNetwork) -> None:
        self.network = network
        self.hub = len(network.limits)
        # Smaller weights never add up to a greater one within a cycle, because a cycle has no more steps than nodes.
        radix = 2 * (self.hub + 2)
        self.move_weight = 1
        self.over_weight = radix
        self.single_weight = radix**2
        self.unplaced_weight = radix**3
        self.none = 4 * radix**4
        # Items on each member, and items that lack a replica (on the hub), by position, then by their members.
        self.groups: list[dict[_Position, _Group]] = [{} for _ in range(self.hub + 1)]
        # The same items, by each member in `held` that they are not placed on.
        self.returns: list[dict[int, dict[_Position, dict[int, None]]]] = [{} for _ in range(self.hub + 1)]
        for item in range(len(network.placed)):
            self._enter(item)
        self.edges: list[list[int]] = []
        self.steps: list[list[_Shift | None]] = []
        for node in range(self.hub + 1):
            edges, steps = self._edges_from(node)
            self.edges.append(edges)
            self.steps.append(steps)

    # --- groups --------------------------------------------------------------------------------------------------

    def _position(self, item: int, member: int) -> _Position:
        """Return an item's position on a member that it may leave (or on the hub, if it may get another replica).

        A position is: whether the member is in `held`, whether all replicas are in one zone, and the zone that the item
        should avoid.
        """
        network = self.network
        placed = network.placed[item]
        others = [network.zones[m] for m in placed if m != member]
        zone = _ANY
        if network.spreads(item) and len(others) == network.replication[item] - 1 and len(set(others)) == 1:
            zone = others[0]
        single = zone != _ANY and member != self.hub and network.zones[member] == zone
        return (member in network.held[item], single, zone)

    def _places(self, item: int) -> list[int]:
        """Return the nodes that connect the item with a member."""
        placed = self.network.placed[item]
        return [*placed, self.hub] if len(placed) < self.network.replication[item] else placed

    def _enter(self, item: int) -> None:
        members = tuple(sorted(self.network.placed[item]))
        homes = [member for member in self.network.held[item] if member not in members]
        for node in self._places(item):
            position = self._position(item, node)
            self.groups[node].setdefault(position, {}).setdefault(members, {})[item] = None
            for home in homes:
                self.returns[node].setdefault(home, {}).setdefault(position, {})[item] = None

    def _withdraw(self, item: int) -> None:
        members = tuple(sorted(self.network.placed[item]))
        homes = [member for member in self.network.held[item] if member not in members]
        for node in self._places(item):
            position = self._position(item, node)
            group = self.groups[node][position]
            del group[members][item]
            if not group[members]:
                del group[members]
            if not group:
                del self.groups[node][position]
            for home in homes:
                returning = self.returns[node][home]
                del returning[position][item]
                if not returning[position]:
                    del returning[position]

    # --- edges ---------------------------------------------------------------------------------------------------

    def _cost_of(self, step: _Shift) -> int:
        """Return the cost that the step adds to its item, without the cost of members' counts."""
        network = self.network
        out, into = step.out, step.into
        if out == into:
            return 0
        position = self._position(step.item, self.hub if out is None else out)
        cost = -self.single_weight if position[1] else 0
        if out is None:
            cost -= self.unplaced_weight
        elif out not in network.held[step.item]:
            cost -= self.move_weight
        if into is None:
            cost += self.unplaced_weight
        else:
            if into not in network.held[step.item]:
                cost += self.move_weight
            if position[2] == network.zones[into]:
                cost += self.single_weight
        return cost

    def _edges_from(self, node: int) -> tuple[list[int], list[_Shift | None]]:
        """Return the costs of the cheapest steps from a node to each other node, and the steps.

        An edge without a step only changes a member's count.
        """
        network, hub = self.network, self.hub
        edges: list[int] = [self.none] * (hub + 1)
        steps: list[_Shift | None] = [None] * (hub + 1)
        out = None if node == hub else node
        positions = sorted(self.groups[node])
        by_zone: dict[int, list[tuple[int, _Group]]] = {}
        for target in range(hub):
            if target == node or not network.limits[target]:
                continue
            zone = network.zones[target]
            if zone not in by_zone:
                priced = [
                    (self._group_cost(node, position, zone), self.groups[node][position]) for position in positions
                ]
                by_zone[zone] = sorted(priced, key=lambda pair: pair[0])
            for cost, group in by_zone[zone]:
                members = next((members for members in group if target not in members), None)
                if members is not None:
                    edges[target], steps[target] = cost, _Shift(next(iter(group[members])), out, target)
                    break
        for home, returning in self.returns[node].items():
            for position, items in returning.items():
                cost = self._group_cost(node, position, network.zones[home]) - self.move_weight
                if cost < edges[home]:
                    edges[home], steps[home] = cost, _Shift(next(iter(items)), out, home)
        if node == hub:
            for member, count in enumerate(network.counts):
                given_back = -self.over_weight if count > network.shares[member] else 0
                if count and given_back < edges[member]:
                    edges[member], steps[member] = given_back, None
        elif network.counts[node] < network.limits[node]:
            edges[hub] = self.over_weight if network.counts[node] >= network.shares[node] else 0
        elif positions:
            # The member is full: another item loses the replica.
            dropped = [(self._cost_of(step), step) for step in (self._drop(node, position) for position in positions)]
            edges[hub], steps[hub] = min(dropped, key=lambda pair: pair[0])
        return edges, steps

    def _drop(self, node: int, position: _Position) -> _Shift:
        items = next(iter(self.groups[node][position].values()))
        return _Shift(next(iter(items)), node, None)

    def _group_cost(self, node: int, position: _Position, zone: int) -> int:
        """Return the cost of moving an item in that position to a member of `zone` that does not hold it."""
        held, single, avoided = position
        cost = self.move_weight
        if node == self.hub:
            cost -= self.unplaced_weight
        elif not held:
            cost -= self.move_weight
        return cost + self.single_weight * ((zone == avoided) - single)

    # --- cycles --------------------------------------------------------------------------------------------------

    def cancel_cycles(self) -> None:
        """Change the placement along cycles of negative cost until none is left."""
        while (cycle := self._find_cycle()) is not None:
            while self._gain(cycle) < 0:
                self._apply(self._steps_along(cycle), cycle)

    def _gain(self, cycle: Sequence[int]) -> int:
        return sum(self.edges[here][there] for here, there in _around(cycle))

    def _steps_along(self, cycle: Sequence[int]) -> list[_Shift]:
        """Return the steps of a cycle of negative cost that passes through each node of the network at most once.

        It is the given cycle, which has negative cost, or a part of it. A cycle that passes through an item twice
        consists of two cycles, each closed by another step of that item, and one of the two has negative cost.
        """
        along = [(here, there, self.edges[here][there], self.steps[here][there]) for here, there in _around(cycle)]
        first: dict[tuple[int, int], int] = {}
        at = 0
        while at < len(along):
            step = along[at][3]
            passed = [] if step is None else self._passes(step)
            before = next((first[node] for node in passed if node in first), None)
            if step is None or before is None:
                first.update(dict.fromkeys(passed, at))
                at += 1
                continue
            begun = along[before][3]
            assert begun is not None
            inner, outer = _Shift(step.item, step.out, begun.into), _Shift(step.item, begun.out, step.into)
            inside = [*along[before + 1 : at], (along[at][0], along[before][1], self._cost_of(inner), inner)]
            outside = [*along[:before], (along[before][0], along[at][1], self._cost_of(outer), outer), *along[at + 1 :]]
            along = min(inside, outside, key=lambda part: sum(edge[2] for edge in part))
            first, at = {}, 0
        return [step for _, _, _, step in along if step is not None and step.out != step.into]

    def _passes(self, step: _Shift) -> list[tuple[int, int]]:
        """Return the nodes that a step passes through.

        These are the item's nodes in the zones that it leaves and enters, and the item's own node unless it stays in
        its zone.
        """
        zones = {_ANY if member is None else self.network.zones[member] for member in (step.out, step.into)}
        return [(step.item, zone) for zone in sorted(zones if len(zones) == 1 else zones | {_ANY})]

    def _apply(self, steps: Iterable[_Shift], cycle: Iterable[int]) -> None:
        network = self.network
        stale = {self.hub, *cycle}
        for step in steps:
            self._withdraw(step.item)
            stale.update(network.placed[step.item])
            if step.out is not None:
                network.unassign(step.item, step.out)
            if step.into is not None:
                network.assign(step.item, step.into)
                stale.add(step.into)
            self._enter(step.item)
        for node in stale:
            self.edges[node], self.steps[node] = self._edges_from(node)

    def _find_cycle(self) -> list[int] | None:
        """Return the nodes of a cycle of negative cost, by Bellman-Ford search; None if none exists."""
        nodes = range(self.hub + 1)
        distance = [0] * (self.hub + 1)
        parent = [-1] * (self.hub + 1)
        cheapest = [min(edges) for edges in self.edges]
        moved = list(nodes)
        while moved:
            changed: dict[int, None] = {}
            for here in moved:
                base = distance[here]
                if base + cheapest[here] >= 0:
                    continue  # No distance is above 0.
                for there, cost in enumerate(self.edges[here]):
                    if base + cost < distance[there]:
                        distance[there] = base + cost
                        parent[there] = here
                        changed[there] = None
            cycle = _cycle_of(parent, changed)
            if cycle is not None:
                return cycle
            moved = list(changed)
        return None


def _around(cycle: Sequence[int]) -> Iterable[tuple[int, int]]:
    return zip(cycle, [*cycle[1:], cycle[0]], strict=True)


def _cycle_of(parent: Sequence[int], starts: Iterable[int]) -> list[int] | None:
    """Return a cycle found by following parents, in the direction from parent to child; None if there is none."""
    seen_from: dict[int, int] = {}
    for start in starts:
        node = start
        while node != -1 and node not in seen_from:
            seen_from[node] = start
            node = parent[node]
        if node != -1 and seen_from[node] == start:
            cycle = [node]
            while (before := parent[cycle[-1]]) != node:
                cycle.append(before)
            return cycle[::-1]
    return None
