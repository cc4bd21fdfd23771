"""Each member's effective limit and its fair share of all replicas. Pure.

`effective_limits` takes spare capacity away from exiting members. `fair_shares` divides all replicas in proportion to
the remaining limits. A share is a ceiling: a member above its share gives up items, but a member below it need not get
any. So members that come and go cause no more moves than necessary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil

from coranto.coordination.plan_values import PlanItem, PlanMember


def effective_limits(items: Sequence[PlanItem], members: Sequence[PlanMember]) -> list[int]:
    """Return each member's limit, reduced for exiting members by the capacity of the others.

    Exiting members shed the capacity that exceeds all items' replicas, the oldest member first. At least as many
    members as the largest replication keep their limit. So no replica is left without a place: a lone member, or any
    of three when items have three replicas, keeps its items until others join. A limit above the number of items
    counts as that number.
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
    """Return each member's fair share of all replicas, in proportion to its limit, in whole items, rounded up.

    `zones` gives each member's zone by number, `limits` its effective limit. The excess of a full member is shared by
    all others in proportion to their limits. A zone's share is limited too: each item with several replicas needs a
    second zone, and a member for each replica. The excess of a zone is shared by the members of other zones.
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
        capacity = sum(bounds[index] for index in found)
        hard[zone] = min(capacity, _max_replicas_of_zone(demands, len(found), elsewhere=0))
        upper[zone] = (
            min(capacity, _max_replicas_of_zone(demands, len(found), elsewhere=1)) if len(by_zone) > 1 else hard[zone]
        )
    members = sum(len(found) for found in by_zone.values())
    demand = min(sum(min(r, members) * count for r, count in demands.items()), sum(hard.values()))
    # If there is no second zone for some items, each zone may hold that many more replicas.
    missing = max(0, demand - sum(upper.values()))
    upper = {zone: min(hard[zone], upper[zone] + missing) for zone in by_zone}

    shares = dict.fromkeys(range(len(limits)), Fraction(0))
    open_zones = sorted(by_zone)
    while open_zones:
        shares |= _divide([index for zone in open_zones for index in by_zone[zone]], demand, limits, bounds)
        # A zone that is full in this division stays full: the shares of the others only rise.
        full = [zone for zone in open_zones if sum(shares[index] for index in by_zone[zone]) > upper[zone]]
        for zone in full:
            shares |= _divide(by_zone[zone], upper[zone], limits, bounds)
            demand -= upper[zone]
        if not full:
            break
        open_zones = [zone for zone in open_zones if zone not in full]
    return [ceil(shares[index]) for index in range(len(limits))]


def _max_replicas_of_zone(demands: Mapping[int, int], members: int, *, elsewhere: int) -> int:
    """Return the maximum replicas of a zone of `members` members, with `elsewhere` of each item in other zones."""
    return sum(min(max(1, replication - elsewhere), members) * count for replication, count in demands.items())


def _divide(members: Sequence[int], demand: int, limits: Sequence[int], bounds: Sequence[int]) -> dict[int, Fraction]:
    """Divide `demand` in proportion to limits. No member gets more than its bound."""
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
