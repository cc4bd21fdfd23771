"""The flow network finds the placement of least cost: the same that trying all of them finds."""

from __future__ import annotations

from itertools import combinations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto.coordination.flow_network import Cost, FlowNetwork

Counts = tuple[int, ...]


def least_cost(network: FlowNetwork) -> Cost:
    """Every item on every set of members, by what members then hold: the cheapest way to each of these states."""
    usable = [member for member, limit in enumerate(network.limits) if limit]
    several = len({network.zones[member] for member in usable}) > 1
    states: dict[Counts, tuple[int, int, int]] = {(0,) * len(network.limits): (0, 0, 0)}
    for wanted, held in zip(network.replication, network.held, strict=True):
        after: dict[Counts, tuple[int, int, int]] = {}
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
    return Cost(
        *min(
            (
                unplaced,
                single_zoned,
                sum(max(0, count - share) for count, share in zip(counts, network.shares, strict=True)),
                moved,
            )
            for counts, (unplaced, single_zoned, moved) in states.items()
        )
    )


@st.composite
def networks(draw: st.DrawFn) -> FlowNetwork:
    """Small networks, with a placement to start from that is anything within limits."""
    members = draw(st.integers(1, 5))
    limits = [draw(st.sampled_from([0, 1, 2, 3, 5])) for _ in range(members)]
    usable = [member for member, limit in enumerate(limits) if limit]
    some_members = st.lists(st.sampled_from(usable), unique=True) if usable else st.just([])
    replication = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    network = FlowNetwork(
        replication,
        [draw(some_members) for _ in replication],
        [draw(st.integers(0, 2)) for _ in limits],
        limits,
        [min(limit, draw(st.integers(0, 3))) for limit in limits],
    )
    for item, wanted in enumerate(replication):
        for member in draw(some_members)[:wanted]:
            if network.counts[member] < limits[member]:
                network.give(item, member)
    return network


@given(networks())
@settings(max_examples=250, deadline=None)
def test_no_placement_costs_less(network: FlowNetwork) -> None:
    network.optimize()
    assert network.cost() == least_cost(network)
    for placed, wanted in zip(network.placed, network.replication, strict=True):
        assert len(set(placed)) == len(placed) <= wanted
    assert network.counts == [sum(m in placed for placed in network.placed) for m in range(len(network.limits))]
    assert all(count <= limit for count, limit in zip(network.counts, network.limits, strict=True))


@given(networks())
@settings(max_examples=100, deadline=None)
def test_the_bound_is_one(network: FlowNetwork) -> None:
    bound, best = network.cost_bound(), least_cost(network)
    assert (bound.unplaced, bound.single_zoned, bound.over_share, bound.moves) <= (
        best.unplaced,
        best.single_zoned,
        best.over_share,
        best.moves,
    )


def test_a_full_member_passes_items_on_along_a_chain() -> None:
    # The third item can only go to member 0, which is full; its items can go to 1, which is full; and those of 1 to 2.
    network = FlowNetwork([1, 1, 2], [[0], [1], [2]], [0, 0, 0], [1, 1, 2], [1, 1, 2])
    for item, member in ((0, 0), (1, 1), (2, 2)):
        network.give(item, member)
    network.optimize()
    assert network.cost() == Cost(unplaced=0, single_zoned=0, over_share=0, moves=2)
    assert sorted(network.placed[2]) in ([0, 2], [1, 2])


def test_full_members_exchange_items_to_bring_each_a_second_zone() -> None:
    network = FlowNetwork([2, 2], [[0, 1], [2, 3]], [0, 0, 1, 1], [1] * 4, [1] * 4)
    for member in range(4):
        network.give(member // 2, member)
    network.optimize()
    assert network.cost() == Cost(unplaced=0, single_zoned=0, over_share=0, moves=2)


def test_an_item_that_a_cycle_passes_through_twice_gains_only_once() -> None:
    # Both replicas of the item may change zones, one at a time: to change both gains nothing.
    network = FlowNetwork([2, 1, 1], [[0, 1], [2], [3]], [0, 0, 1, 1], [1] * 4, [1] * 4)
    for item, member in ((0, 0), (0, 1), (1, 2), (2, 3)):
        network.give(item, member)
    network.optimize()
    assert network.cost() == least_cost(network) == Cost(unplaced=0, single_zoned=0, over_share=0, moves=2)


@given(networks())
@example(FlowNetwork([], [], [0], [1], [1]))
@example(FlowNetwork([2], [[]], [], [], []))
@settings(max_examples=30, deadline=None)
def test_what_is_best_is_left_as_it_is(network: FlowNetwork) -> None:
    network.optimize()
    placed = [list(members) for members in network.placed]
    network.optimize()
    assert network.placed == placed
