"""The flow network finds the placement of least cost, like an exhaustive search."""

from __future__ import annotations

import random

import networkx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coranto.coordination.flow_network import Cost, FlowNetwork
from tests.platform.coordination.allocation import least_cost


@st.composite
def networks(draw: st.DrawFn) -> FlowNetwork:
    """Return small networks with any initial placement within the limits."""
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
                network.assign(item, member)
    return network


@given(networks())
@settings(max_examples=150, deadline=None)
def test_the_placement_costs_no_more_than_the_best_one(network: FlowNetwork) -> None:
    network.optimize()
    assert network.cost() == least_cost(network)
    for placed, wanted in zip(network.placed, network.replication, strict=True):
        assert len(set(placed)) == len(placed) <= wanted
    assert network.counts == [sum(m in placed for placed in network.placed) for m in range(len(network.limits))]
    assert all(count <= limit for count, limit in zip(network.counts, network.limits, strict=True))


@given(networks())
@settings(max_examples=100, deadline=None)
def test_the_cost_bound_is_never_above_the_cost(network: FlowNetwork) -> None:
    bound, best = network.cost_bound(), least_cost(network)
    assert (bound.unplaced, bound.single_zoned, bound.over_share, bound.moves) <= (
        best.unplaced,
        best.single_zoned,
        best.over_share,
        best.moves,
    )


def test_full_members_pass_items_along_a_chain() -> None:
    # The third item can only be placed on member 0, which is full. Items of 0 fit on 1, which is full; items of 1 fit
    # on 2.
    network = FlowNetwork([1, 1, 2], [[0], [1], [2]], [0, 0, 0], [1, 1, 2], [1, 1, 2])
    for item, member in ((0, 0), (1, 1), (2, 2)):
        network.assign(item, member)
    network.optimize()
    assert network.cost() == Cost(unplaced=0, single_zoned=0, over_share=0, moves=2)
    assert sorted(network.placed[2]) in ([0, 2], [1, 2])


def test_full_members_exchange_items_to_bring_each_a_second_zone() -> None:
    network = FlowNetwork([2, 2], [[0, 1], [2, 3]], [0, 0, 1, 1], [1] * 4, [1] * 4)
    for member in range(4):
        network.assign(member // 2, member)
    network.optimize()
    assert network.cost() == Cost(unplaced=0, single_zoned=0, over_share=0, moves=2)


def test_an_item_gains_only_once_from_a_cycle_that_passes_it_twice() -> None:
    # Each replica of the item may change its zone, one at a time: changing both gains nothing.
    network = FlowNetwork([2, 1, 1], [[0, 1], [2], [3]], [0, 0, 1, 1], [1] * 4, [1] * 4)
    for item, member in ((0, 0), (0, 1), (1, 2), (2, 3)):
        network.assign(item, member)
    network.optimize()
    assert network.cost() == least_cost(network) == Cost(unplaced=0, single_zoned=0, over_share=0, moves=2)


def test_one_cycle_may_move_an_item_within_two_zones() -> None:
    # The moves are independent. As moves between zones, they would bring all replicas into one zone.
    network = FlowNetwork(
        [1, 2, 0, 4],
        [[], [2, 3, 1], [1, 0, 2], [0, 2]],
        [1, 1, 0, 0, 1],
        [5, 1, 5, 1, 2],
        [2, 1, 0, 1, 2],
    )
    for item, members in enumerate([[4], [1, 2], [], [3, 0, 2, 4]]):
        for member in members:
            network.assign(item, member)
    assert network.optimize() == network.cost() == least_cost(network)


def test_the_cost_bound_is_reached_by_necessary_moves() -> None:
    # A member joined: two items are above the others' shares. One item is in a single zone. One has no member.
    network = FlowNetwork(
        [1, 1, 1, 1, 1, 1, 2, 1],
        [[0], [0], [0], [1], [1], [1], [0, 1], []],
        [0, 0, 1],
        [9, 9, 9],
        [3, 3, 3],
    )
    assert network.cost_bound() == Cost(unplaced=0, single_zoned=0, over_share=0, moves=3)
    for item, member in enumerate([0, 0, 2, 1, 1, 1, 0, 2]):
        network.assign(item, member)
    network.assign(6, 2)
    assert network.optimize() == network.cost_bound() == least_cost(network)
    # No member is above its share, but an item needs a second zone.
    network = FlowNetwork([2], [[0, 1]], [0, 0, 1], [9, 9, 9], [1, 1, 1])
    assert network.cost_bound().moves == 1


@given(networks())
@example(FlowNetwork([], [], [0], [1], [1]))
@example(FlowNetwork([2], [[]], [], [], []))
@settings(max_examples=30, deadline=None)
def test_an_optimal_placement_is_left_unchanged(network: FlowNetwork) -> None:
    network.optimize()
    placed = [list(members) for members in network.placed]
    network.optimize()
    assert network.placed == placed


UNPLACED, SINGLE, OVER, MOVE = 10**12, 10**8, 10**4, 1
"""Weights of an oracle network: at the sizes tested, no sum of a later weight reaches an earlier one."""


def cost_by_networkx(network: FlowNetwork) -> int:
    """Return the least cost of the module's network by a general solver of minimum-cost flows."""
    graph = networkx.MultiDiGraph()
    wanted = sum(network.replication)
    graph.add_node("source", demand=-wanted)
    graph.add_node("sink", demand=wanted)
    graph.add_edge("source", "sink", capacity=wanted, weight=UNPLACED)
    for item, replication in enumerate(network.replication):
        graph.add_edge("source", ("item", item), capacity=replication, weight=0)
        for zone in set(network.zones):
            free = replication - 1 if network.spreads(item) else replication
            graph.add_edge(("item", item), ("zone", item, zone), capacity=free, weight=0)
            graph.add_edge(("item", item), ("zone", item, zone), capacity=replication - free, weight=SINGLE)
        for member, zone in enumerate(network.zones):
            weight = 0 if member in network.held[item] else MOVE
            graph.add_edge(("zone", item, zone), ("member", member), capacity=1, weight=weight)
    for member, (limit, share) in enumerate(zip(network.limits, network.shares, strict=True)):
        graph.add_edge(("member", member), "sink", capacity=min(share, limit), weight=0)
        graph.add_edge(("member", member), "sink", capacity=max(0, limit - share), weight=OVER)
    least, _ = networkx.network_simplex(graph)
    assert isinstance(least, int)
    return least


@pytest.mark.parametrize("seed", range(30))
def test_a_general_flow_solver_finds_the_same_cost(seed: int) -> None:
    rng = random.Random(seed)
    members, items = rng.randint(3, 12), rng.randint(10, 60)
    limits = [rng.choice((0, 5, 10, 30)) for _ in range(members)]
    network = FlowNetwork(
        [rng.randint(1, 3) for _ in range(items)],
        [rng.sample(range(members), rng.randint(0, min(3, members))) for _ in range(items)],
        [rng.randrange(rng.choice((1, 2, 3))) for _ in range(members)],
        limits,
        [min(limit, rng.randint(0, 12)) for limit in limits],
    )
    network.optimize()
    cost = network.cost()
    total = cost.unplaced * UNPLACED + cost.single_zoned * SINGLE + cost.over_share * OVER + cost.moves * MOVE
    assert total == cost_by_networkx(network)
