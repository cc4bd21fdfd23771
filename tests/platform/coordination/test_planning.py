"""The planner, as properties: what must hold of every step and of the placement at which it comes to rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
from coranto.coordination.layout import MemberId
from coranto.coordination.placement import PlanItem, PlanMember
from coranto.coordination.planning import Add, Move, Plan, PlanAssignment, Remove, can_drain, plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st


@dataclass
class World:
    """Items, members and assignments; applies plans as etcd would, and checks each step's promises."""

    items: list[PlanItem]
    members: list[PlanMember]
    assignments: list[PlanAssignment]

    def plan(self) -> Plan:
        return plan(self.items, self.members, self.assignments)

    def apply(self, changes: Plan) -> None:
        before = {(a.item, a.member, a.slot): a for a in self.assignments}
        after = dict(before)
        replication = {item.id: item.replication for item in self.items}
        live = {m.id for m in self.members}
        touched = set()
        for item in changes.items:
            assert item.changes
            for change in item.changes:
                assert change.item == item.item
                match change:
                    case Add():
                        top = max((a.slot for a in before.values() if a.item == change.item), default=-1)
                        assert change.slot > top
                        assert change.member not in {a.member for a in before.values() if a.item == change.item}
                        after[change.item, change.member, change.slot] = PlanAssignment(
                            change.item, change.member, change.slot, False
                        )
                        touched.add(change.item)
                    case Remove():
                        del after[change.item, change.member, change.slot]
                        touched.add(change.item)
                    case Move():
                        old = after.pop((change.item, change.member, change.slot))
                        after[change.item, change.member, change.to_slot] = replace(old, slot=change.to_slot)
                        if change.to_slot == 0:
                            touched.add(change.item)
        for id, wanted in replication.items():
            was = {a.member for a in before.values() if a.item == id and a.consistent and a.member in live}
            now = {a.member for a in after.values() if a.item == id and a.member in was}
            assert was == now or len(now) >= wanted, "a consistent assignment went though it was needed"
        # As with journals: whenever the assignments of an item change, it has to synchronize again.
        self.assignments = [replace(a, consistent=a.consistent and a.item not in touched) for a in after.values()]
        self.check_limits(before.values())

    def check_limits(self, before: Iterable[PlanAssignment]) -> None:
        was, now = Counter(a.member for a in before), Counter(a.member for a in self.assignments)
        for member in self.members:
            assert now[member.id] <= max(member.limit, was[member.id]), "a member was filled above its limit"

    def synchronize(self, which: Callable[[str], bool] = lambda _: True) -> None:
        live = {m.id for m in self.members}
        dead = {a.item for a in self.assignments if a.member not in live}
        self.assignments = [
            replace(a, consistent=a.consistent or (which(a.item) and a.item not in dead)) for a in self.assignments
        ]

    def settle(self, rounds: int = 60) -> int:
        """Plan, apply and synchronize until nothing changes. Returns the number of assignments added."""
        added = 0
        for _ in range(rounds):
            self.synchronize()
            changes = self.plan()
            if not changes.items:
                return added
            added += sum(isinstance(c, Add) for item in changes.items for c in item.changes)
            self.apply(changes)
        raise AssertionError(f"does not settle: {self.plan()}")

    def of(self, item: str) -> list[PlanAssignment]:
        return sorted((a for a in self.assignments if a.item == item), key=lambda a: a.slot)

    def counts(self) -> Counter[MemberId]:
        return Counter(a.member for a in self.assignments)

    def check_settled(self) -> None:
        """What holds of any world at rest."""
        zones = {m.id.zone for m in self.members if not m.exiting and m.limit}
        roomy = all(m.limit >= len(self.items) for m in self.members if not m.exiting)
        for item in self.items:
            found = self.of(item.id)
            assert [a.slot for a in found] == list(range(len(found)))
            assert len({a.member for a in found}) == len(found)
            assert len(found) <= max(item.replication, 0)
            if roomy and len(zones) >= 2 and item.replication >= 2:
                assert len({a.member.zone for a in found}) >= 2
        assert {a.item for a in self.assignments} <= {i.id for i in self.items}
        assert {a.member for a in self.assignments} <= {m.id for m in self.members}


def members(count: int, *, zones: int = 1, limit: int = 1000) -> list[PlanMember]:
    return [
        PlanMember(MemberId(f"zone-{i % zones}", f"member-{i:03}"), limit, create_revision=i + 1) for i in range(count)
    ]


def items(count: int, replication: int) -> list[PlanItem]:
    return [PlanItem(f"item-{i:04}", replication) for i in range(count)]


member_ids = st.builds(MemberId, st.sampled_from(["a", "b", "c"]), st.sampled_from(["m-00", "m-01", "m-02", "m-03"]))
some_members = st.lists(
    st.builds(
        PlanMember,
        member_ids,
        limit=st.one_of(st.integers(0, 6), st.just(50)),
        exiting=st.booleans() | st.just(False),
        create_revision=st.integers(1, 9),
    ),
    unique_by=lambda m: m.id,
    max_size=7,
)
some_items = st.lists(
    st.builds(PlanItem, st.sampled_from([f"item-{i}" for i in range(9)]), st.integers(0, 4)),
    unique_by=lambda i: i.id,
    max_size=9,
)


@st.composite
def some_assignments(draw: st.DrawFn) -> list[PlanAssignment]:
    """Well-formed or not: vanished members and items, no primary, two of them, gaps in slots."""
    found = draw(
        st.lists(
            st.builds(
                PlanAssignment,
                st.sampled_from([f"item-{i}" for i in range(10)]),
                member_ids,
                st.integers(0, 5),
                st.booleans(),
            ),
            unique_by=lambda a: (a.item, a.member),
            max_size=20,
        )
    )
    return found


worlds = st.builds(World, some_items, some_members, some_assignments())


@given(worlds)
@settings(max_examples=200, deadline=None)
def test_any_world_settles_within_its_promises(world: World) -> None:
    world.settle()
    world.check_settled()
    assert world.plan().items == ()


@given(worlds, st.data())
@settings(max_examples=80, deadline=None)
def test_items_that_synchronize_at_any_pace_settle_too(world: World, data: st.DataObject) -> None:
    for _ in range(12):
        ready = data.draw(st.sets(st.sampled_from([f"item-{i}" for i in range(9)])))
        world.synchronize(lambda item, ready=ready: item in ready)  # type: ignore[misc]
        world.apply(world.plan())
    world.settle()
    world.check_settled()


@given(worlds, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_the_input_does_not_matter(world: World, random: object) -> None:
    def shuffled(values: Sequence[object]) -> list[object]:
        result = list(values)
        random.shuffle(result)  # type: ignore[attr-defined]
        return result

    assert world.plan() == plan(shuffled(world.items), shuffled(world.members), shuffled(world.assignments))  # type: ignore[arg-type]


@given(some_items, some_members)
@settings(max_examples=100, deadline=None)
def test_as_many_replicas_are_placed_as_any_placement_could(items: list[PlanItem], members: list[PlanMember]) -> None:
    members = [replace(m, exiting=False) for m in members]
    world = World(items, members, [])
    world.settle()
    assert len(world.assignments) == max_flow(items, members)
    assert world.plan().unplaced == sum(i.replication for i in items) - len(world.assignments)


def max_flow(items: list[PlanItem], members: list[PlanMember]) -> int:
    """Gale and Ryser: with every pair allowed once, the largest placement is a sum over the items by demand."""
    limits = [m.limit for m in members]
    demands = sorted((i.replication for i in items), reverse=True)
    # The minimum cut: k items on the far side, of those with the largest demand.
    return min(sum(min(k, limit) for limit in limits) + sum(demands[k:]) for k in range(len(demands) + 1))


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_members_that_join_or_leave_get_their_fair_share(count: int, replication: int, before: int, after: int) -> None:
    assume(min(before, after) >= replication)
    world = World(items(count, replication), members(before), [])
    world.settle()
    spread = world.counts()
    assert max(spread.values()) - min(spread[m.id] for m in world.members) <= 1

    remaining = {m.id for m in members(after)}
    lost = sum(spread[m] for m in spread if m not in remaining)
    world.members = members(after)
    world.assignments = [a for a in world.assignments if a.member in remaining]
    added = world.settle()
    now = world.counts()
    assert max(now.values()) - min(now[m.id] for m in world.members) <= 1
    # Stable: what is added is what was lost, or what newcomers take up to their share, and no more. A lost replica may
    # have to displace another where the member with room is one that holds the item already.
    needed = lost + sum(now[m.id] for m in world.members[before:])
    assert needed <= added <= needed + (lost if replication > 1 else 0)


def test_limits_share_in_proportion() -> None:
    big, small = PlanMember(MemberId("z", "big-"), 300), PlanMember(MemberId("z", "small"), 100)
    world = World(items(40, 1), [big, small], [])
    world.settle()
    assert world.counts() == {big.id: 30, small.id: 10}


def test_every_item_of_several_replicas_lives_in_two_zones() -> None:
    world = World(items(30, 3), members(1) + members(6, zones=3)[1:], [])
    world.settle()
    world.check_settled()
    one_zone = World(items(10, 2), members(4), [])
    one_zone.settle()
    one_zone.members += [PlanMember(MemberId("zone-new", "member-x"), 1000)]
    one_zone.settle()
    one_zone.check_settled()
    assert one_zone.counts()[MemberId("zone-new", "member-x")] == 10


def test_primaries_are_spread_over_members() -> None:
    world = World(items(30, 3), members(3), [])
    world.settle()
    assert set(Counter(a.member for a in world.assignments if a.slot == 0).values()) == {10}


def test_a_handover_adds_waits_removes_and_promotes() -> None:
    old, new = members(2)
    world = World(items(1, 1), [old], [])
    world.settle()
    world.members = [replace(old, exiting=True), new]
    world.apply(world.plan())
    assert [a.member for a in world.of("item-0000")] == [old.id, new.id]
    assert world.plan().items == (), "the newcomer is not consistent yet"
    world.synchronize()
    world.apply(world.plan())
    assert [(a.member, a.slot) for a in world.of("item-0000")] == [(new.id, 0)]


def test_a_lost_primary_is_replaced_by_a_consistent_replica() -> None:
    first, second, third = members(3)
    lagging = PlanAssignment("item-0000", second.id, 1, False)
    current = PlanAssignment("item-0000", third.id, 2, True)
    world = World(items(1, 2), [second, third], [lagging, current])
    assert world.plan().items[0].changes == (Move("item-0000", third.id, 2, 0),)
    assert first.id not in world.counts()


def test_a_restarted_item_without_assignments_starts_at_slot_zero() -> None:
    world = World(items(1, 3), members(3), [])
    (changes,) = world.plan().items
    assert [c.slot for c in changes.changes] == [0, 1, 2]


def test_exiting_members_are_drained_oldest_first_and_only_where_others_have_room() -> None:
    oldest, older, young = members(3, limit=10)
    world = World(items(10, 1), [oldest, older, young], [])
    world.settle()
    world.members = [replace(oldest, exiting=True), replace(older, exiting=True), replace(young, limit=7)]
    world.settle()
    counts = world.counts()
    assert counts[young.id] == 7
    assert counts[oldest.id] == 0
    assert counts[older.id] == 3
    assert len(world.assignments) == 10


def test_the_last_member_keeps_its_items_while_it_is_exiting() -> None:
    (only,) = members(1)
    world = World(items(5, 1), [only], [])
    world.settle()
    world.members = [replace(only, exiting=True)]
    assert world.settle() == 0
    assert world.counts()[only.id] == 5


def test_orphans_go_at_once_consistent_or_not() -> None:
    member, _ = members(2)
    gone = MemberId("zone-0", "gone")
    world = World(
        items(1, 1),
        [member],
        [
            PlanAssignment("item-0000", gone, 0, True),
            PlanAssignment("item-9999", member.id, 0, True),
            PlanAssignment("item-9999", member.id, 1, False),
        ],
    )
    changes = world.plan()
    assert [item.orphaned for item in changes.items] == [False, True]
    world.apply(changes)
    world.settle()
    assert [(a.item, a.member, a.slot) for a in world.assignments] == [("item-0000", member.id, 0)]


def test_two_slots_of_one_member_and_two_primaries_are_mended() -> None:
    a, b = members(2)
    world = World(
        items(1, 2),
        [a, b],
        [
            PlanAssignment("item-0000", a.id, 0, True),
            PlanAssignment("item-0000", a.id, 2, True),
            PlanAssignment("item-0000", b.id, 0, True),
        ],
    )
    world.settle()
    world.check_settled()


def test_a_suspended_item_gives_up_all_and_an_unplaceable_one_is_reported() -> None:
    world = World(items(1, 2), members(2), [])
    world.settle()
    world.items = items(1, 0)
    world.settle()
    assert world.assignments == []
    assert World(items(3, 2), members(1), []).plan().unplaced == 3


@pytest.mark.parametrize(
    ("others", "limit", "expected"), [(0, 100, False), (1, 100, False), (2, 100, True), (2, 4, False)]
)
def test_can_drain(others: int, limit: int, expected: bool) -> None:
    found = members(others + 1, limit=limit)
    assert can_drain(items(5, 2), found, found[0].id) is expected
