"""The allocator on a real etcd: several members, with one leader that plans."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from coranto.coordination.allocator import AllocatorLoop, StatePlanner, may_drain, transactions
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import MAX_TXN_OPS, Delete, Put, unmodified
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import KeySpaceState
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import MemberSession, open_session
from coranto.wire import protocol_pb2 as pb

Journals = KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]
Mirror = KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]
WAIT_SECONDS = 120


def journal(name: str, replication: int = 1) -> bytes:
    spec = pb.JournalSpec(name=name, replication=replication)
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.refresh_interval.FromSeconds(60)
    return spec.SerializeToString()


def broker(member: MemberId, *, limit: int = 1000, exiting: bool = False) -> bytes:
    id = pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix)
    process = pb.ProcessSpec(id=id, endpoint=f"http://{member.suffix}:80")
    return pb.BrokerSpec(process_spec=process, journal_limit=limit, exiting=exiting).SerializeToString()


@dataclass
class Process:
    """The parts of a broker that the allocator needs: session, mirror and loop. It advertises Routes as primary."""

    member: MemberId
    session: MemberSession
    keyspace: Mirror
    tasks: list[asyncio.Task[None]]

    async def die(self, *, revoke: bool = True) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.keyspace.close()
        await self.session.close(revoke=revoke)


@asynccontextmanager
async def process(
    coordinator: EtcdCoordinator, layout: Layout, member: MemberId, *, limit: int = 1000, synchronizes: bool = True
) -> AsyncIterator[Process]:
    session = await open_session(coordinator, ttl_seconds=60)
    revision = await session.announce(layout.member_key(member), broker(member, limit=limit))
    keyspace = KeySpace(coordinator, layout, JournalEntities(), apply_delay_seconds=0.0)
    await keyspace.start(at_revision=revision)
    tasks = [asyncio.create_task(AllocatorLoop(keyspace, coordinator, member).run())]
    if synchronizes:
        tasks.append(asyncio.create_task(synchronize(keyspace, coordinator, member)))
    found = Process(member, session, keyspace, tasks)
    try:
        yield found
    finally:
        await found.die()


async def synchronize(keyspace: Mirror, coordinator: EtcdCoordinator, member: MemberId) -> None:
    """Write the Route to all assignments together, as a primary does after each synchronization of its pipeline."""
    while True:
        state = keyspace.state
        for mine in state.by_member.get(member, ()):
            if mine.slot == 0 and not state.consistent(mine.item):
                route = state.route_of(mine.item, endpoints=False).SerializeToString()
                found = state.assignments(mine.item)
                await coordinator.txn(
                    [unmodified(a.kv) for a in found], [Put(a.kv.key, route, keep_lease=True) for a in found]
                )
        await keyspace.wait_for_change(state)


def members(count: int, zones: int = 1) -> list[MemberId]:
    return [MemberId(f"zone-{i % zones}", f"broker-{i}") for i in range(count)]


async def put_journals(coordinator: EtcdCoordinator, layout: Layout, count: int, replication: int) -> None:
    for begin in range(0, count, MAX_TXN_OPS):
        names = [f"journal-{i:04}" for i in range(begin, min(count, begin + MAX_TXN_OPS))]
        await coordinator.txn([], [Put(layout.item_key(name), journal(name, replication)) for name in names])


def settled(journals: int, replication: int) -> Callable[[Journals], bool]:
    """Return a check that every journal has its replicas, consistent, with a primary and slots without gaps."""

    def check(state: Journals) -> bool:
        return len(state.items) == journals and all(
            [a.slot for a in state.assignments(item.id)] == list(range(replication)) and state.consistent(item.id)
            for item in state.items
        )

    return check


async def test_journals_are_spread_over_members_and_zones(coordinator: EtcdCoordinator, layout: Layout) -> None:
    await put_journals(coordinator, layout, 40, 2)
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(process(coordinator, layout, member)) for member in members(4, zones=2)
        ]
        for each in processes:
            state = await each.keyspace.wait_until(settled(40, 2), WAIT_SECONDS)
        state = await processes[0].keyspace.wait_until(
            lambda state: len({len(found) for found in state.by_member.values()}) == 1, WAIT_SECONDS
        )
        assert {member: len(found) for member, found in state.by_member.items()} == dict.fromkeys(
            members(4, zones=2), 20
        )
        for item in state.items:
            assert len({a.member.zone for a in state.assignments(item.id)}) == 2
        leases = {each.member: each.session.lease for each in processes}
        assert all(a.kv.lease == leases[a.member] for a in state.all_assignments)


async def test_the_oldest_member_leads_and_the_next_one_follows(coordinator: EtcdCoordinator, layout: Layout) -> None:
    first, second = members(2)
    async with process(coordinator, layout, first) as leader, process(coordinator, layout, second) as other:
        assert other.keyspace.state.leader is not None
        assert other.keyspace.state.leader.id == first
        await put_journals(coordinator, layout, 10, 1)
        await other.keyspace.wait_until(settled(10, 1), WAIT_SECONDS)
        await leader.die()
        state = await other.keyspace.wait_until(lambda state: len(state.by_member.get(second, ())) == 10, WAIT_SECONDS)
        assert list(state.by_member) == [second]
        await other.keyspace.wait_until(settled(10, 1), WAIT_SECONDS)


async def test_an_exiting_member_is_drained(coordinator: EtcdCoordinator, layout: Layout) -> None:
    first, second = members(2)
    async with process(coordinator, layout, first) as leaving:
        await put_journals(coordinator, layout, 10, 1)
        await leaving.keyspace.wait_until(settled(10, 1), WAIT_SECONDS)
        assert not may_drain(leaving.keyspace.state, first)
        await leaving.session.update(broker(first, exiting=True))
        async with process(coordinator, layout, second) as staying:
            state = await leaving.keyspace.wait_until(lambda state: first not in state.by_member, WAIT_SECONDS)
            assert len(state.by_member[second]) == 10
            await staying.keyspace.wait_until(settled(10, 1), WAIT_SECONDS)
            assert not may_drain(staying.keyspace.state, second)


async def test_members_keep_items_that_do_not_synchronize(coordinator: EtcdCoordinator, layout: Layout) -> None:
    first, second = members(2)
    async with process(coordinator, layout, first, synchronizes=False) as old:
        await put_journals(coordinator, layout, 4, 1)
        await old.keyspace.wait_until(lambda state: len(state.by_member.get(first, ())) == 4, WAIT_SECONDS)
        await old.session.update(broker(first, exiting=True))
        async with process(coordinator, layout, second, synchronizes=False) as new:
            state = await new.keyspace.wait_until(lambda state: len(state.by_member.get(second, ())) == 4, WAIT_SECONDS)
            assert len(state.by_member[first]) == 4
            assert all(state.route_of(item.id).primary >= 0 for item in state.items)
            assert StatePlanner().plan(state).items == ()


async def test_assignments_without_item_or_member_are_removed(coordinator: EtcdCoordinator, layout: Layout) -> None:
    (only,) = members(1)
    ghost = MemberId("zone-0", "ghost")
    await put_journals(coordinator, layout, 2, 1)
    await coordinator.txn(
        [],
        [
            Put(layout.assignment_key("journal-0000", ghost, 0), b""),
            Put(layout.assignment_key("no-such-journal", ghost, 0), b""),
            Put(layout.assignment_key("no-such-journal", only, 1), b""),
        ],
    )
    async with process(coordinator, layout, only) as alone:
        await alone.keyspace.wait_until(settled(2, 1), WAIT_SECONDS)
        await coordinator.txn([], [Delete(layout.item_key("journal-0001"))])
        state = await alone.keyspace.wait_until(
            lambda state: [(a.item, a.member, a.slot) for a in state.all_assignments] == [("journal-0000", only, 0)],
            WAIT_SECONDS,
        )
        assert state.route_of("journal-0000").primary == 0


async def test_undecodable_entries_do_not_block_other_items(coordinator: EtcdCoordinator, layout: Layout) -> None:
    (only,) = members(1)
    odd = MemberId("zone-9", "odd-broker")
    await put_journals(coordinator, layout, 3, 1)
    await coordinator.txn(
        [],
        [
            Put(layout.item_key("undecodable"), b"\xff"),
            Put(layout.assignment_key("undecodable", only, 0), b""),
            Put(layout.member_key(odd), b"\xff"),
            Put(layout.member_key(odd) + "#", b""),
            Put(layout.assignment_key("journal-0000", odd, 0), b""),
        ],
    )
    async with process(coordinator, layout, only) as alone:
        state = await alone.keyspace.wait_until(lambda state: len(state.by_member.get(only, ())) == 4, WAIT_SECONDS)
        assert [a.member for a in state.assignments("undecodable")] == [only]
        assert [a.member for a in state.assignments("journal-0000")] == [odd, only], (
            "not consistent, so nothing is removed"
        )


async def test_a_deposed_leader_changes_nothing(coordinator: EtcdCoordinator, layout: Layout) -> None:
    (only,) = members(1)
    async with process(coordinator, layout, only) as zombie:
        await put_journals(coordinator, layout, 5, 1)
        state = await zombie.keyspace.wait_until(settled(5, 1), WAIT_SECONDS)
    assert state.leader is not None
    leading = unmodified(state.leader.kv)
    stale = KeySpaceState(state.header, state.entries, layout, JournalEntities(max_replication=0))
    changes = list(transactions(stale, StatePlanner().plan(stale), leading))
    assert changes, "it would remove every assignment"
    before = await coordinator.range(layout.root)
    for change in changes:
        assert leading in change.compares
        assert not (await coordinator.txn([leading], change.ops)).succeeded, "the leader's condition must fail"
    assert (await coordinator.range(layout.root)).kvs == before.kvs


async def test_transactions_stay_within_the_limits_and_do_not_split_items(
    coordinator: EtcdCoordinator, layout: Layout
) -> None:
    await put_journals(coordinator, layout, 200, 3)
    leases = [await coordinator.lease_grant(60) for _ in range(3)]
    await coordinator.txn(
        [],
        [Put(layout.member_key(m), broker(m), lease=lease.id) for m, lease in zip(members(3), leases, strict=True)],
    )
    keyspace = KeySpace(coordinator, layout, JournalEntities())
    state = await keyspace.start()
    leader = state.leader
    assert leader is not None
    found = list(transactions(state, StatePlanner().plan(state), unmodified(leader.kv)))
    assert len(found) > 3
    journals: Counter[str] = Counter()
    for transaction in found:
        assert len(transaction.ops) <= MAX_TXN_OPS
        assert len(transaction.compares) <= MAX_TXN_OPS
        assert unmodified(leader.kv) in transaction.compares
        names = {op.key.split("#")[0] for op in transaction.ops}
        assert len(transaction.ops) == 3 * len(names)
        journals.update(names)
        assert (await coordinator.txn(transaction.compares, transaction.ops)).succeeded
    assert len(journals) == 200
    assert set(journals.values()) == {1}
    await keyspace.close()
    for lease in leases:
        await coordinator.lease_revoke(lease.id)
