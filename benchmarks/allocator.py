"""Planning and convergence of assignments, against encoding and decoding the keys of the same assignments.

The floor encodes the key of each assignment and decodes it, as a mirror of the key space must do. The benchmark also
counts the work after a change of the topology: the replicas that moved; the required moves, of replicas that are new,
lost, or above a member's share; and the rounds of planning until the cluster converged. These counts are the same on
every machine. They are printed, and are in the figures' notes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.runner import Figure, measure_pairs
from coranto.cluster import EtcdServer
from coranto.coordination.allocator import AllocatorLoop
from coranto.coordination.capacity import effective_limits, fair_shares
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import MAX_TXN_OPS, Op, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.flow_network import FlowNetwork
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.planning import AllocationPlan, PlanAssignment, PlanItem, PlanMember, Planner
from coranto.wire import protocol_pb2 as pb
from tests.platform.coordination.allocation import AllocationWorld, Effort, plan

SIZES = (1_000, 10_000, 100_000)
ITEMS = 10_000
MEMBERS = 100
ZONES = 3
REPLICATION = 3
LIMIT = 100_000
LARGE_ROUNDS = 2  # A round of 100,000 items is slow.
LAYOUT = Layout("/bench/allocator")

Timed = Callable[[], float]
Change = Callable[[AllocationWorld], None]


def members(first: int, count: int) -> list[PlanMember]:
    return [
        PlanMember(MemberId(f"zone-{number % ZONES}", f"member-{number:03}"), LIMIT, create_revision=number + 1)
        for number in range(first, first + count)
    ]


def items(count: int) -> list[PlanItem]:
    return [PlanItem(f"journals/{number:06}", REPLICATION) for number in range(count)]


class _Stopwatch:
    """Plans with one planner that keeps its state, as the leader does, and sums the time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._planner = Planner()

    def plan(
        self, items: Iterable[PlanItem], members: Iterable[PlanMember], assignments: Iterable[PlanAssignment]
    ) -> AllocationPlan:
        given = (list(items), list(members), list(assignments))
        begun = time.perf_counter()
        changes = self._planner.plan(*given)
        self.seconds += time.perf_counter() - begun
        return changes


def _settled(count: int) -> AllocationWorld:
    world = AllocationWorld(items(count), members(0, MEMBERS), planning=Planner().plan)
    world.converge()
    return world


def _floor(assignments: Sequence[PlanAssignment]) -> Timed:
    """Measure assignments per second of encoding and decoding their keys."""

    def once() -> float:
        begun = time.perf_counter()
        for assignment in assignments:
            LAYOUT.decode(LAYOUT.assignment_key(assignment.item, assignment.member, assignment.slot))
        return len(assignments) / (time.perf_counter() - begun)

    return once


def _planned(world: AllocationWorld, assignments: Sequence[PlanAssignment]) -> Timed:
    """Measure replicas per second that a new leader places, or finds already placed."""
    given = (list(world.items.values()), list(world.members.values()), list(assignments))
    replicas = sum(item.replication for item in given[0])

    def once() -> float:
        begun = time.perf_counter()
        plan(*given)
        return replicas / (time.perf_counter() - begun)

    return once


# --- changes of the topology -----------------------------------------------------------------------------------------


def _no_items(world: AllocationWorld) -> None:
    world.assignments = {}


def _member_exits(world: AllocationWorld) -> None:
    world.put_members(dataclasses.replace(members(7, 1)[0], exiting=True))


def _member_dies(world: AllocationWorld) -> None:
    world.lose_members(members(7, 1)[0].id)


def _member_joins(world: AllocationWorld) -> None:
    world.put_members(*members(MEMBERS, 1))


def _ten_join(world: AllocationWorld) -> None:
    world.put_members(*members(MEMBERS, 10))


def _tenth_of_members_is_replaced(world: AllocationWorld) -> None:
    world.put_members(*members(MEMBERS, 10))
    world.put_members(*[dataclasses.replace(member, exiting=True) for member in members(0, 10)])


def _zone_dies(world: AllocationWorld) -> None:
    world.lose_members(*[member for member in world.members if member.zone == "zone-1"])


def _two_for_a_tenth(world: AllocationWorld) -> None:
    world.put_items(*[PlanItem(item, 2) for item in list(world.items)[::10]])


def _four_for_a_tenth(world: AllocationWorld) -> None:
    world.put_items(*[PlanItem(item, 4) for item in list(world.items)[::10]])


def _tenth_more_items(world: AllocationWorld) -> None:
    world.put_items(*[PlanItem(f"{item.id}/more", REPLICATION) for item in items(len(world.items) // 10)])


def _limits_tighten(world: AllocationWorld) -> None:
    """Halve the limits of ten members, and limit the others to 10 % above the average load."""
    share = len(world.items) * REPLICATION // MEMBERS
    world.put_members(
        *[
            dataclasses.replace(member, limit=share // 2 if number < 10 else share + share // 10)
            for number, member in enumerate(members(0, MEMBERS))
        ]
    )


CHANGES: tuple[tuple[str, Change], ...] = (
    ("all items are new", _no_items),
    ("a member exits", _member_exits),
    ("a member dies", _member_dies),
    ("a member joins", _member_joins),
    ("10 members join", _ten_join),
    ("10 members are replaced by others", _tenth_of_members_is_replaced),
    ("a zone of 33 members dies", _zone_dies),
    ("every tenth item wants 2 replicas", _two_for_a_tenth),
    ("every tenth item wants 4 replicas", _four_for_a_tenth),
    ("a tenth more items", _tenth_more_items),
    ("limits tighten", _limits_tighten),
)


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeCost:
    """The cost of one change of the topology. `needed` is the number of replicas that fair shares force to move."""

    change: str
    needed: int
    effort: Effort
    seconds: float

    @property
    def note(self) -> str:
        effort = self.effort
        return (
            f"{effort.added} replicas placed ({self.needed} required), {effort.removed} removed, "
            f"{effort.promoted} promoted, {effort.packed} slots packed, in {effort.rounds} rounds"
        )


def _converged(name: str, change: Change, assignments: Sequence[PlanAssignment], outcomes: list[ChangeCost]) -> Timed:
    """Measure replicas per second of a cluster that converges after a change, counting only the time of planning."""

    def once() -> float:
        outcomes.append(_converge(name, change, assignments))
        return len(assignments) / outcomes[-1].seconds

    return once


def _converge(name: str, change: Change, assignments: Sequence[PlanAssignment]) -> ChangeCost:
    watch = _Stopwatch()
    world = AllocationWorld(items(ITEMS), members(0, MEMBERS), assignments, planning=watch.plan)
    change(world)
    needed = _moves_needed(world)
    effort = world.converge()
    return ChangeCost(name, needed, effort, watch.seconds)


def _moves_needed(world: AllocationWorld) -> int:
    wanted, found = list(world.items.values()), sorted(world.members.values(), key=lambda member: member.id)
    numbers = {member.id: number for number, member in enumerate(found)}
    zones = [int(member.id.zone.removeprefix("zone-")) for member in found]
    limits = effective_limits(wanted, found)
    held = [[number for member in world.members_of(item) if limits[number := numbers[member]]] for item in world.items]
    shares = fair_shares(wanted, zones, limits)
    return FlowNetwork([item.replication for item in wanted], held, zones, limits, shares).cost_bound().moves


def _show(outcomes: Iterable[ChangeCost]) -> None:
    table = Table(title=f"{ITEMS:,} items × {MEMBERS} members × R={REPLICATION}", title_justify="left")
    table.add_column("change")
    for column in ("placed", "required", "removed", "promoted", "slots packed", "rounds", "seconds of planning"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        effort = outcome.effort
        numbers = (effort.added, outcome.needed, effort.removed, effort.promoted, effort.packed, effort.rounds)
        table.add_row(outcome.change, *(f"{number:,}" for number in numbers), f"{outcome.seconds:.2f}")
    Console(width=150).print(table)


# --- through etcd ----------------------------------------------------------------------------------------------------


async def _transact(coordinator: EtcdCoordinator, ops: Sequence[Op]) -> None:
    for begin in range(0, len(ops), MAX_TXN_OPS):
        await coordinator.txn([], ops[begin : begin + MAX_TXN_OPS])


@asynccontextmanager
async def _empty_cluster(endpoint: str) -> AsyncIterator[tuple[EtcdCoordinator, int]]:
    """Yield a cluster of journals and brokers, registered under one lease, without assignments."""
    async with EtcdCoordinator(endpoint) as coordinator:
        lease = (await coordinator.lease_grant(3600)).id
        ops: list[Op] = []
        for item in items(ITEMS):
            spec = pb.JournalSpec(name=item.id, replication=item.replication)
            spec.fragment.length = 1 << 20
            spec.fragment.compression_codec = pb.NONE
            spec.fragment.refresh_interval.FromSeconds(60)
            ops.append(Put(LAYOUT.item_key(item.id), spec.SerializeToString()))
        for member in members(0, MEMBERS):
            id = pb.ProcessSpec.ID(zone=member.id.zone, suffix=member.id.suffix)
            broker = pb.BrokerSpec(process_spec=pb.ProcessSpec(id=id, endpoint="http://broker:80"), journal_limit=LIMIT)
            ops.append(Put(LAYOUT.member_key(member.id), broker.SerializeToString(), lease=lease))
        await _transact(coordinator, ops)
        try:
            yield coordinator, lease
        finally:
            await coordinator.lease_revoke(lease)


def _allocated(endpoint: str) -> Timed:
    """Measure assignments per second of a leader, from its first state until its mirror has all assignments."""

    async def once() -> float:
        async with _empty_cluster(endpoint) as (coordinator, _):
            keyspace = KeySpace(coordinator, LAYOUT, JournalEntities())
            state = await keyspace.start()
            assert state.leader is not None
            begun = time.perf_counter()
            loop = asyncio.create_task(AllocatorLoop(keyspace, coordinator, state.leader.id).run())
            await keyspace.wait_until(lambda state: len(state.entries) == ITEMS + MEMBERS + ITEMS * REPLICATION)
            seconds = time.perf_counter() - begun
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            await keyspace.close()
            return ITEMS * REPLICATION / seconds

    return lambda: asyncio.run(once())


def _written(endpoint: str, assignments: Sequence[PlanAssignment]) -> Timed:
    """Measure writes of the same assignments in consecutive transactions."""

    async def once() -> float:
        async with _empty_cluster(endpoint) as (coordinator, lease):
            keys = [LAYOUT.assignment_key(a.item, a.member, a.slot) for a in assignments]
            begun = time.perf_counter()
            await _transact(coordinator, [Put(key, b"", lease=lease) for key in keys])
            return len(assignments) / (time.perf_counter() - begun)

    return lambda: asyncio.run(once())


def run(rounds: int) -> list[Figure]:
    figures: list[Figure] = []
    floor_name = "writing and reading the keys of these assignments once"
    for size in SIZES:
        world = _settled(size)
        assignments = list(world)
        turns = min(rounds, LARGE_ROUNDS) if size > ITEMS else rounds
        for name, held in (("all new", []), ("nothing to change", assignments)):
            subjects, floors = measure_pairs(turns, _floor(assignments), _planned(world, held))
            title = f"plan {size:,} items, {name}"
            figures.append(Figure(title, "replicas/s", subjects, floors, floor_name))

    assignments = list(_settled(ITEMS))
    outcomes: list[ChangeCost] = []
    for name, change in CHANGES:
        found: list[ChangeCost] = []
        subjects, floors = measure_pairs(rounds, _floor(assignments), _converged(name, change, assignments, found))
        title = f"converge {ITEMS:,} items: {name}"
        figures.append(Figure(title, "replicas/s", subjects, floors, floor_name, found[-1].note))
        outcomes.append(found[-1])
    _show(outcomes)

    with tempfile.TemporaryDirectory() as folder, EtcdServer(Path(folder), fsync=False) as etcd:
        subjects, floors = measure_pairs(rounds, _written(etcd.endpoint, assignments), _allocated(etcd.endpoint))
    name = f"allocate {ITEMS:,} items through etcd"
    figures.append(Figure(name, "replicas/s", subjects, floors, "the same keys in bare transactions"))
    return figures
