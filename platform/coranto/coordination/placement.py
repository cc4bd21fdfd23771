"""Where every item of the allocator belongs in the end, pure.

In order of weight:

1. each item is on as many distinct members as its replication asks for, as far as members' limits allow;
2. no member above its limit; exiting members hold nothing that another can take, and get nothing new;
3. two zones or more for each replicated item, when there are two;
4. every member holds its fair share, in proportion to its limit;
5. what is assigned stays where it is.

Placement is greedy with repairs (augmenting paths where limits are tight), behind one function, so that a flow solver
for very large clusters can take its place. Where limits leave no room at all, zones are spread as the greedy choice
found them; items are not exchanged between full members for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coranto.coordination.layout import MemberId


@dataclass(frozen=True, slots=True)
class PlanItem:
    id: str
    replication: int


@dataclass(frozen=True, slots=True)
class PlanMember:
    """`limit` is the number of items that it may hold. The older of two exiting members is drained first."""

    id: MemberId
    limit: int
    exiting: bool = False
    create_revision: int = 0


Placement = Mapping[str, frozenset[MemberId]]
"""The members that each item belongs on."""


def choose_placement(
    items: Mapping[str, PlanItem], members: Mapping[MemberId, PlanMember], held: Mapping[str, Sequence[MemberId]]
) -> Placement:
    """Where every item belongs, given where it is (`held`, in slot order). Mappings must be in key order."""
    return _Placer(items, members, held).place()


@dataclass(slots=True)
class _Seat:
    """A member that may be given items, and what it holds in the placement so far."""

    member: PlanMember
    items: set[str] = field(default_factory=set)
    low: int = 0
    high: int = 0

    @property
    def count(self) -> int:
        return len(self.items)

    @property
    def load(self) -> tuple[int, float, MemberId]:
        """For choosing the least loaded: distance from its fair share, then proportion, then identity."""
        return (self.count - self.high, self.count / self.member.limit, self.member.id)


class _Placer:
    def __init__(
        self,
        items: Mapping[str, PlanItem],
        members: Mapping[MemberId, PlanMember],
        held: Mapping[str, Sequence[MemberId]],
    ) -> None:
        self.items = items
        self.members = members
        self.held = held
        self.seats = {id: _Seat(member) for id, member in members.items() if member.limit > 0 and not member.exiting}
        self.zones = {id.zone for id in self.seats}
        self.placed: dict[str, set[MemberId]] = {item: set() for item in items}
        self._set_shares()

    def place(self) -> Placement:
        self._keep_current()
        self._respect_limits()
        for item in sorted(self.items.values(), key=self._urgency):
            while self._short_of(item) and (self._fill_one(item) or self._augment(item.id)):
                pass
        self._spread_zones()
        self._choose_survivors()
        while self._balance() and self._spread_zones():
            pass
        retained = self._retain_exiting()
        return {item: frozenset(self.placed[item] | retained.get(item, set())) for item in self.items}

    def _set_shares(self) -> None:
        """Fair shares in proportion to limits, where no member can hold more than its limit, nor an item twice."""
        open_seats = list(self.seats.values())
        demand = sum(min(item.replication, len(open_seats)) for item in self.items.values())
        distinct = sum(1 for item in self.items.values() if item.replication > 0)
        remaining = demand
        while open_seats:
            weight = sum(seat.member.limit for seat in open_seats)
            full = [s for s in open_seats if remaining * s.member.limit >= min(s.member.limit, distinct) * weight]
            if not full:
                for seat in open_seats:
                    seat.low, rest = divmod(remaining * seat.member.limit, weight)
                    seat.high = seat.low + (rest > 0)
                return
            for seat in full:
                seat.low = seat.high = min(seat.member.limit, distinct)
                remaining -= seat.high
                open_seats.remove(seat)

    def _give(self, item: str, member: MemberId) -> None:
        self.placed[item].add(member)
        self.seats[member].items.add(item)

    def _take(self, item: str, member: MemberId) -> None:
        self.placed[item].remove(member)
        self.seats[member].items.remove(item)

    def _swap(self, item: str, leaving: MemberId, coming: MemberId) -> None:
        self._take(item, leaving)
        self._give(item, coming)

    def _short_of(self, item: PlanItem) -> bool:
        return len(self.placed[item.id]) < item.replication

    def _urgency(self, item: PlanItem) -> tuple[int, str]:
        """Items that have nowhere to stay come first, then those on exiting members, the oldest member's first."""
        exiting = (self.members[m].create_revision for m in self.held[item.id] if self.members[m].exiting)
        return (min(exiting, default=0), item.id)

    def _spread(self, item: str, members: Iterable[MemberId]) -> bool:
        """Whether an item on `members` is as far from living in a single zone as it can be."""
        return len(self.zones) < 2 or self.items[item].replication < 2 or len({m.zone for m in members}) >= 2

    def _keep_current(self) -> None:
        """Take over what is assigned, then drop what is more than the replication: from those above their share first,
        then the higher slots."""
        for item, members in self.held.items():
            for member in members:
                if member in self.seats:
                    self._give(item, member)
        for item, spec in self.items.items():
            while len(self.placed[item]) > spec.replication:
                placed = self.placed[item]
                slots = {member: slot for slot, member in reversed(list(enumerate(self.held[item])))}
                candidates = [m for m in placed if self._spread(item, placed - {m})] or list(placed)
                worst = max(
                    candidates,
                    key=lambda m: (self.seats[m].count - self.seats[m].high, slots[m], m),
                )
                self._take(item, worst)

    def _respect_limits(self) -> None:
        """Where a limit was lowered, let go of items: those first that another member can take."""
        for seat in self.seats.values():
            while seat.count > seat.member.limit:
                room = [s for s in self.seats.values() if s.count < s.member.limit]
                movable = [i for i in seat.items if any(i not in other.items for other in room)]
                self._take(max(movable or seat.items), seat.member.id)

    def _fill_one(self, item: PlanItem) -> bool:
        """Give the item one more member that has room: one that spreads it over zones, then the least loaded."""
        placed = self.placed[item.id]
        candidates = [s for s in self.seats.values() if s.count < s.member.limit and item.id not in s.items]
        if not candidates:
            return False

        def cost(seat: _Seat) -> tuple[bool, tuple[int, float, MemberId]]:
            return (bool(placed) and not self._spread(item.id, placed | {seat.member.id}), seat.load)

        self._give(item.id, min(candidates, key=cost).member.id)
        return True

    def _augment(self, item: str) -> bool:
        """Make room where there is none: move other items along a chain that ends at a member with room.

        Finding none proves that the item cannot have another replica without taking one from another item.
        """
        starts = [id for id, seat in self.seats.items() if item not in seat.items]
        first = self._shift(
            starts,
            lambda seat: seat.count < seat.member.limit,
            lambda source, target: min(source.items - target.items, default=None),
        )
        if first is not None:
            self._give(item, first)
        return first is not None

    def _shift(
        self,
        starts: Iterable[MemberId],
        ends: Callable[[_Seat], bool],
        passing: Callable[[_Seat, _Seat], str | None],
    ) -> MemberId | None:
        """Pass one item on from member to member, along the shortest chain from one of `starts` to one that `ends`.

        Returns where the chain starts: there is one item fewer. None, and nothing changed, when there is no such chain.
        """
        came_from: dict[MemberId, tuple[MemberId, str] | None] = dict.fromkeys(starts)
        queue = deque(came_from)
        while queue:
            here = queue.popleft()
            if ends(self.seats[here]):
                while (step := came_from[here]) is not None:
                    before, item = step
                    self._swap(item, before, here)
                    here = before
                return here
            for there, seat in self.seats.items():
                if there not in came_from:
                    item_or_none = passing(self.seats[here], seat)
                    if item_or_none is not None:
                        came_from[there] = (here, item_or_none)
                        queue.append(there)
        return None

    def _spread_zones(self) -> bool:
        """Bring a second zone to items that live in one, while there is room in another. Whether anything moved."""
        moved = False
        for item in self.items:
            placed = self.placed[item]
            if len(placed) < 2 or self._spread(item, placed):
                continue
            (zone,) = {m.zone for m in placed}
            room = [s for s in self.seats.values() if s.member.id.zone != zone and s.count < s.member.limit]
            if room:
                coming = min(room, key=lambda s: s.load).member.id
                self._swap(item, max(placed, key=lambda m: (self.seats[m].count - self.seats[m].high, m)), coming)
                moved = True
        return moved

    def _choose_survivors(self) -> None:
        """An item that is on more members than it needs, in the middle of a move, may give up any of them. Choose those
        that leave members balanced: that costs nothing now, and the choice of `_keep_current` could cost a move."""
        loose = [
            item
            for item, spec in self.items.items()
            if sum(member in self.seats for member in self.held[item]) > spec.replication > 0
        ]
        if not loose:
            return

        def passing(source: _Seat, target: _Seat) -> str | None:
            leaving, coming = source.member.id, target.member.id
            for item in loose:
                possible = item in source.items and item not in target.items and coming in self.held[item]
                if possible and self._may_swap(item, leaving, coming):
                    return item
            return None

        for seat in self.seats.values():
            while seat.count > seat.high and self._shift([seat.member.id], lambda s: s.count < s.high, passing):
                pass
        for seat in self.seats.values():
            while seat.count > seat.low and self._shift([seat.member.id], lambda s: s.count < s.low, passing):
                pass

    def _may_swap(self, item: str, leaving: MemberId, coming: MemberId) -> bool:
        """Whether the item would not leave its second zone by moving."""
        placed = self.placed[item]
        return self._spread(item, (placed - {leaving}) | {coming}) or not self._spread(item, placed)

    def _balance(self) -> bool:
        """Move items from members above their share to members below it, the fewest that it takes. Whether any moved.

        No move takes an item out of its second zone, so this never undoes what spreading did.
        """
        ever = False
        while True:
            moved = 0
            above = [s for s in self.seats.values() if s.count > s.high]
            for seat in sorted(above, key=lambda s: s.load, reverse=True):
                others = [s for s in self.seats.values() if s.count < s.high]
                for other in sorted(others, key=lambda s: (s.count >= s.low, s.load)):
                    moved += self._pour(seat, other, down_to=seat.high, up_to=other.high)
            below = [s for s in self.seats.values() if s.count < s.low]
            for other in sorted(below, key=lambda s: s.load):
                sources = [s for s in self.seats.values() if s.count > s.low]
                for seat in sorted(sources, key=lambda s: s.load, reverse=True):
                    moved += self._pour(seat, other, down_to=seat.low, up_to=other.low)
            if not moved:
                return ever
            ever = True

    def _pour(self, source: _Seat, target: _Seat, *, down_to: int, up_to: int) -> int:
        """Move items while the source has more than `down_to` and the target fewer than `up_to`."""
        leaving, coming = source.member.id, target.member.id
        moved = 0
        for item in sorted(source.items - target.items):
            if source.count <= down_to or target.count >= up_to:
                break
            if self._may_swap(item, leaving, coming):
                self._swap(item, leaving, coming)
                moved += 1
        return moved

    def _retain_exiting(self) -> dict[str, set[MemberId]]:
        """What nobody else can take stays with exiting members that hold it: with the youngest, within their limits."""
        room = {id: m.limit for id, m in self.members.items() if m.exiting}
        retained: dict[str, set[MemberId]] = {}
        for item, spec in self.items.items():
            missing = spec.replication - len(self.placed[item])
            holders = [m for m in dict.fromkeys(self.held[item]) if room.get(m, 0) > 0]
            for member in sorted(holders, key=lambda m: (-self.members[m].create_revision, m))[: max(0, missing)]:
                retained.setdefault(item, set()).add(member)
                room[member] -= 1
        return retained
