"""How much each member may hold, and how much of the whole is its fair share. Pure.

`effective_limits` takes from exiting members what the cluster can do without. `fair_shares` divides the replicas that
there are in proportion to what is left. A share is a ceiling: a member above its share gives up items, one below it
need not get any, so that members that come and go move no more than they must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil

from coranto.coordination.plan_values import PlanItem, PlanMember


def effective_limits(items: Sequence[PlanItem], members: Sequence[PlanMember]) -> list[int]:
    """What each member may hold, once exiting members have shed what others can take.

    Exiting members shed capacity that is in excess of all items' replicas, the oldest member first, while as many
    members as the largest replication asks for keep theirs. So they never leave a replica without a place: a lone
    member, or the third of three when items want three replicas, keeps what it has until others come. A limit beyond
    the number of items is not worth more than that number.
    """
    limits = [max(0, member.limit) for member in members]
    distinct = sum(1 for item in items if item.replication > 0)
    excess = max(0, sum(min(limit, distinct) for limit in limits) - sum(item.replication for item in items))
    spare_members = sum(1 for limit in limits if limit) - max((item.replication for item in items), default=0)
    exiting = [index for index, member in enumerate(members) if member.exiting and limits[index]]
    exiting.sort(key=lambda index: (members[index].create_revision, members[index].id))
    for index in exiting[: max(0, spare_members)]:
        useful = min(limits[index], distinct)
        shed = min(useful, excess)
        if shed or not useful:
            limits[index] = useful - shed
        excess -= shed
    return limits


def fair_shares(items: Iterable[PlanItem], zones: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Each member's fair share, in whole items, rounded up: its limit's part of all replicas, as far as these can be
    so divided. `zones` gives each member's zone by number, `limits` its effective limit.

    What one member cannot hold is shared by all others, still in proportion; and what a zone should not hold, because
    each item of several replicas needs a second zone and a member for each, is shared by the members of other zones.
    """
    demands = Counter(item.replication for item in items if item.replication > 0)
    distinct = sum(demands.values())
    bounds = [min(limit, distinct) for limit in limits]
    by_zone: dict[int, list[int]] = {}
    for index, limit in enumerate(limits):
        if limit:
            by_zone.setdefault(zones[index], []).append(index)

    upper: dict[int, int] = {}
    hard: dict[int, int] = {}
    for zone, found in by_zone.items():
        room = sum(bounds[index] for index in found)
        hard[zone] = min(room, _most_of_a_zone(demands, len(found), elsewhere=0))
        upper[zone] = min(room, _most_of_a_zone(demands, len(found), elsewhere=1)) if len(by_zone) > 1 else hard[zone]
    members = sum(len(found) for found in by_zone.values())
    demand = min(sum(min(r, members) * count for r, count in demands.items()), sum(hard.values()))
    # Where a second zone for each item is too much to ask, zones hold that much more.
    missing = max(0, demand - sum(upper.values()))
    upper = {zone: min(hard[zone], upper[zone] + missing) for zone in by_zone}

    shares = dict.fromkeys(range(len(limits)), Fraction(0))
    open_zones = sorted(by_zone)
    while open_zones:
        shares |= _divide([index for zone in open_zones for index in by_zone[zone]], demand, limits, bounds)
        # A zone that is full at this measure stays full: the measure of the others only rises.
        full = [zone for zone in open_zones if sum(shares[index] for index in by_zone[zone]) > upper[zone]]
        for zone in full:
            shares |= _divide(by_zone[zone], upper[zone], limits, bounds)
            demand -= upper[zone]
        if not full:
            break
        open_zones = [zone for zone in open_zones if zone not in full]
    return [ceil(shares[index]) for index in range(len(limits))]


def _most_of_a_zone(demands: Mapping[int, int], members: int, *, elsewhere: int) -> int:
    """What one zone of so many members can hold of all items, if so many replicas of each live in other zones."""
    return sum(min(max(1, replication - elsewhere), members) * count for replication, count in demands.items())


def _divide(members: Sequence[int], demand: int, limits: Sequence[int], bounds: Sequence[int]) -> dict[int, Fraction]:
    """`demand` in proportion to limits, where nobody can have more than its bound."""
    shares: dict[int, Fraction] = {}
    remaining = list(members)
    while remaining:
        weight = sum(limits[index] for index in remaining)
        bound = [index for index in remaining if demand * limits[index] > bounds[index] * weight]
        if not bound:
            return shares | {index: Fraction(demand * limits[index], weight) for index in remaining}
        for index in bound:
            shares[index] = Fraction(bounds[index])
            demand -= bounds[index]
        remaining = [index for index in remaining if index not in shares]
    return shares
