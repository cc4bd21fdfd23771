"""The mirror on a real etcd, with faults injected between the two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from coranto.coordination.etcd import Compare as EtcdCompare
from coranto.coordination.etcd import (
    Coordinator,
    Delete,
    EtcdHeader,
    GrantedLease,
    KeyValue,
    LeaseStatus,
    Op,
    Put,
    Snapshot,
    TxnResult,
    WatchBatch,
)
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.errors import CoordinationError, Unavailable, WatchReset
from coranto.wire import protocol_pb2 as pb
from tests.broker.running import eventually

Mirror = KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]
Make = Callable[[Coordinator], Mirror]
BROKER = MemberId("zone", "broker-1")
WAIT_SECONDS = 120.0


def journal(name: str, length: int = 1 << 20) -> bytes:
    spec = pb.JournalSpec(name=name, replication=1)
    spec.fragment.length = length
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.refresh_interval.FromSeconds(60)
    return spec.SerializeToString()


class Faulty:
    """A coordinator whose watches can be delayed, broken, or answered by another cluster."""

    def __init__(self, real: EtcdCoordinator) -> None:
        self.real = real
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.break_next = asyncio.Event()
        self.resets = 0
        self.unavailable = 0
        self.cluster_id = 0
        self.loses = 0
        self.lost = asyncio.Event()
        self.reconnects = 0
        self.proofs = 0
        self.proof_seconds = 0.0

    async def range(
        self, prefix: str, *, revision: int = 0, min_mod_revision: int = 0, limit: int = 0, keys_only: bool = False
    ) -> Snapshot:
        if self.unavailable:
            self.unavailable -= 1
            raise Unavailable("by the test")
        if min_mod_revision:
            self.proofs += 1
            await asyncio.sleep(self.proof_seconds)
        return await self.real.range(
            prefix, revision=revision, min_mod_revision=min_mod_revision, limit=limit, keys_only=keys_only
        )

    async def get(self, key: str) -> tuple[EtcdHeader, KeyValue | None]:
        return await self.real.get(key)

    async def txn(
        self, compares: Sequence[EtcdCompare], ops: Sequence[Op], *, otherwise: Sequence[str] = ()
    ) -> TxnResult:
        return await self.real.txn(compares, ops, otherwise=otherwise)

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        if self.resets:
            self.resets -= 1
            raise WatchReset("by the test")
        async for batch in self.real.watch(prefix, from_revision):
            await self.flowing.wait()
            if self.break_next.is_set():
                self.break_next.clear()
                raise WatchReset("by the test")
            if self.cluster_id:
                header = batch.header
                yield WatchBatch(
                    EtcdHeader(self.cluster_id, header.member_id, header.revision, header.raft_term), batch.events
                )
            if self.loses and batch.events:
                self.loses -= 1
                self.lost.set()
                continue
            yield batch
            if self.reconnects:
                self.reconnects -= 1
                yield WatchBatch(batch.header, (), reconnected=True)

    async def lease_grant(self, ttl_seconds: int) -> GrantedLease:
        return await self.real.lease_grant(ttl_seconds)

    async def lease_keepalive(self, lease: int) -> int:
        return await self.real.lease_keepalive(lease)

    async def lease_status(self, lease: int) -> LeaseStatus:
        return await self.real.lease_status(lease)

    async def lease_revoke(self, lease: int) -> None:
        await self.real.lease_revoke(lease)

    async def bytes_in_use(self) -> int:
        return await self.real.bytes_in_use()

    async def close(self) -> None:
        await self.real.close()


async def test_the_mirror_follows_changes(coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make) -> None:
    await coordinator.txn([], [Put(layout.item_key("first"), journal("first"))])
    keyspace = keyspace_of(coordinator)
    start = await keyspace.start()
    assert [item.id for item in start.items] == ["first"]
    result = await coordinator.txn(
        [], [Put(layout.item_key("other"), journal("other")), Delete(layout.item_key("first"))]
    )
    state = await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert [item.id for item in state.items] == ["other"]
    assert keyspace.header.revision == result.header.revision
    assert keyspace.header.cluster_id == result.header.cluster_id
    assert [item.id for item in start.items] == ["first"], "states are immutable"


async def test_the_mirror_starts_at_a_given_revision(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    first = await coordinator.txn([], [Put(layout.item_key("first"), journal("first"))])
    second = await coordinator.txn([], [Put(layout.item_key("second"), journal("second"))])
    keyspace = keyspace_of(coordinator)
    state = await keyspace.start(at_revision=first.header.revision)
    assert state.revision == first.header.revision
    assert [item.id for item in state.items] == ["first"]
    state = await keyspace.wait_for_revision(second.header.revision, timeout=WAIT_SECONDS)
    assert [item.id for item in state.items] == ["first", "second"]


async def test_a_state_lists_the_items_that_may_have_changed(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    await coordinator.txn([], [Put(layout.item_key(name), journal(name)) for name in ("first", "other", "third")])
    faulty = Faulty(coordinator)
    keyspace = keyspace_of(faulty)
    seen: list[frozenset[str] | None] = []
    keyspace.observe(lambda state: seen.append(state.changed))
    assert (await keyspace.start()).changed is None
    assert seen == [None], "all items may have changed after a full load"

    async def change(*ops: Op) -> frozenset[str] | None:
        seen.clear()
        result = await coordinator.txn([], ops)
        await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
        return frozenset[str]().union(*(each or () for each in seen)) if None not in seen else None

    assert await change(Put(layout.assignment_key("other", BROKER, 0), b"")) == {"other"}
    assert await change(Delete(layout.item_key("first")), Put(layout.item_key("new"), journal("new"))) == {
        "first",
        "new",
    }
    assert await change(Put(layout.member_key(BROKER), b"not a spec")) == set()
    faulty.break_next.set()  # The mirror loads all entries again, and cannot list the missed changes.
    assert await change(Delete(layout.assignment_key("other", BROKER, 0))) is None


async def test_keys_next_to_the_prefix_are_ignored(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    keyspace = keyspace_of(coordinator)
    before = await keyspace.start()
    await coordinator.txn([], [Put(layout.prefix + "0/items/stray", journal("stray"))])
    mine = await coordinator.txn([], [Put(layout.item_key("mine"), journal("mine"))])
    state = await keyspace.wait_for_change(before, timeout=WAIT_SECONDS)
    assert state.revision == mine.header.revision
    assert len(state.entries) == 1


async def test_bad_entries_are_omitted_until_they_are_corrected(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    bad = [
        Put(layout.item_key("bad-one"), b"\xff"),
        Put(layout.item_key("misnamed"), journal("other-name")),
        Put(layout.root + "unknown/key", b""),
        Put(layout.assignments + "item#zone#suffix#x", b""),
    ]
    await coordinator.txn([], [*bad, Put(layout.item_key("good"), journal("good"))])
    keyspace = keyspace_of(coordinator)
    assert [item.id for item in (await keyspace.start()).items] == ["good"]
    result = await coordinator.txn([], [Put(layout.item_key("bad-one"), journal("bad-one"))])
    state = await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert [item.id for item in state.items] == ["bad-one", "good"]


async def test_revisions_without_changes_below_the_prefix_are_reached(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    await coordinator.txn(
        [], [Put(layout.item_key("journal"), journal("journal")), Put(layout.root + "undecodable", b"")]
    )
    keyspace = keyspace_of(coordinator)
    before = await keyspace.start()
    elsewhere = await coordinator.txn([], [Put("/elsewhere", b"1")])
    waits = [keyspace.wait_for_revision(elsewhere.header.revision, timeout=WAIT_SECONDS) for _ in range(5)]
    assert await asyncio.gather(*waits) == [before] * 5
    assert keyspace.known_revision >= elsewhere.header.revision
    assert keyspace.header.revision == before.revision, "nothing changed here, so headers keep the revision"


async def test_a_wait_for_a_future_revision_times_out(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    keyspace = keyspace_of(coordinator)
    await keyspace.start()
    with pytest.raises(TimeoutError):
        await keyspace.wait_for_revision(1 << 40, timeout=0.3)


@pytest.mark.parametrize("hidden", ["put", "update", "delete", "replace"])
async def test_a_silent_watch_is_not_taken_for_an_unchanged_key_space(
    hidden: str, coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    old, new = layout.item_key("old-one"), layout.item_key("new-one")
    await coordinator.txn([], [Put(old, journal("old-one"))])
    faulty = Faulty(coordinator)
    keyspace = keyspace_of(faulty)
    before = await keyspace.start()
    faulty.flowing.clear()
    change: list[Op] = {
        "put": [Put(new, journal("new-one"))],
        "update": [Put(old, journal("old-one", 1 << 21))],
        "delete": [Delete(old)],
        "replace": [Delete(old), Put(new, journal("new-one"))],
    }[hidden]
    changed = await coordinator.txn([], change)
    later = await coordinator.txn([], [Put("/elsewhere", b"2")])
    for revision in (changed.header.revision, later.header.revision):
        with pytest.raises(TimeoutError):
            await keyspace.wait_for_revision(revision, timeout=0.4)
    assert keyspace.state is before
    faulty.flowing.set()
    state = await keyspace.wait_for_revision(later.header.revision, timeout=WAIT_SECONDS)
    assert state.revision == changed.header.revision


async def test_the_mirror_reloads_after_lost_history(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    await coordinator.txn([], [Put(layout.item_key("gone-one"), journal("gone-one"))])
    faulty = Faulty(coordinator)
    keyspace = keyspace_of(faulty)
    await keyspace.start()
    faulty.break_next.set()
    faulty.unavailable = 1
    await coordinator.txn([], [Delete(layout.item_key("gone-one"))])
    result = await coordinator.txn([], [Put(layout.item_key("new-one"), journal("new-one"))])
    state = await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert [item.id for item in state.items] == ["new-one"]
    result = await coordinator.txn([], [Put(layout.item_key("newer"), journal("newer"))])
    state = await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert [item.id for item in state.items] == ["new-one", "newer"]


async def test_a_reload_without_changes_keeps_the_revision_of_the_state(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    changed = await coordinator.txn([], [Put(layout.item_key("item-0"), journal("item-0"))])
    elsewhere = await coordinator.txn([], [Put(layout.prefix + ".not-below/it", b"")])
    faulty = Faulty(coordinator)
    faulty.resets = 1
    keyspace = keyspace_of(faulty)
    seen: list[int] = []
    keyspace.observe(lambda state: seen.append(state.revision))
    await keyspace.start(at_revision=changed.header.revision)
    await keyspace.wait_for_revision(elsewhere.header.revision, timeout=WAIT_SECONDS)
    result = await coordinator.txn([], [Put(layout.item_key("item-1"), journal("item-1"))])
    state = await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert faulty.resets == 0, "the mirror was reloaded"
    assert seen == [changed.header.revision, result.header.revision]
    assert [item.id for item in state.items] == ["item-0", "item-1"]


async def test_observers_get_every_state_in_order_despite_a_failing_observer(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    keyspace = keyspace_of(coordinator)
    await keyspace.start()
    seen: list[int] = []
    keyspace.observe(lambda state: 1 / 0)  # type: ignore[arg-type, return-value]
    stop = keyspace.observe(lambda state: seen.append(state.revision))
    revisions = []
    for i in range(3):
        result = await coordinator.txn([], [Put(layout.item_key(f"item-{i}"), journal(f"item-{i}"))])
        revisions.append(result.header.revision)
        await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert seen == revisions
    stop()
    stop()
    result = await coordinator.txn([], [Delete(layout.item_key("item-0"))])
    await keyspace.wait_for_revision(result.header.revision, timeout=WAIT_SECONDS)
    assert seen == revisions


async def test_another_etcd_at_the_same_address_is_fatal(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    faulty = Faulty(coordinator)
    keyspace = keyspace_of(faulty)
    await keyspace.start()
    waiting = asyncio.ensure_future(keyspace.wait_for_revision(1 << 40))
    faulty.cluster_id = 0xBAD
    await coordinator.txn([], [Put(layout.item_key("journal"), journal("journal"))])
    with pytest.raises(CoordinationError, match="0xbad"):
        await asyncio.wait_for(waiting, WAIT_SECONDS)
    assert "0xbad" in str(await keyspace.wait_failed())
    with pytest.raises(CoordinationError):
        await keyspace.wait_for_change(keyspace.state)


async def test_waits_fail_when_the_mirror_is_closed(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    keyspace = keyspace_of(coordinator)
    with pytest.raises(CoordinationError, match="not started"):
        _ = keyspace.state
    state = await keyspace.start()
    with pytest.raises(CoordinationError, match="started before"):
        await keyspace.start()
    waiting = [
        asyncio.ensure_future(keyspace.wait_for_revision(1 << 40)),
        asyncio.ensure_future(keyspace.wait_for_change(state)),
        asyncio.ensure_future(keyspace.wait_until(lambda state: False)),
    ]
    await asyncio.sleep(0)
    await keyspace.close()
    for wait in waiting:
        with pytest.raises(CoordinationError, match="closed"):
            await asyncio.wait_for(wait, WAIT_SECONDS)


async def test_members_appear_and_disappear_with_their_lease(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    keyspace = keyspace_of(coordinator)
    await keyspace.start()
    lease = await coordinator.lease_grant(60)
    id = pb.ProcessSpec.ID(zone=BROKER.zone, suffix=BROKER.suffix)
    spec = pb.BrokerSpec(process_spec=pb.ProcessSpec(id=id, endpoint="http://broker:80"), journal_limit=1)
    await coordinator.txn([], [Put(layout.member_key(BROKER), spec.SerializeToString(), lease=lease.id)])
    state = await keyspace.wait_until(lambda state: bool(state.members), timeout=WAIT_SECONDS)
    assert state.leader is not None
    assert (state.leader.id, state.leader.kv.lease) == (BROKER, lease.id)
    await coordinator.lease_revoke(lease.id)
    state = await keyspace.wait_until(lambda state: not state.members, timeout=WAIT_SECONDS)
    assert state.leader is None


async def test_waiters_share_proofs_at_a_limited_rate(
    coordinator: EtcdCoordinator, layout: Layout, keyspace_of: Make
) -> None:
    """A proof makes etcd scan all keys, so waiters must not each request one while the mirror lags."""
    faulty = Faulty(coordinator)
    keyspace = keyspace_of(faulty)
    await keyspace.start()
    elsewhere = await coordinator.txn([], [Put("/elsewhere", b"1")])
    await asyncio.gather(*(keyspace.wait_for_revision(elsewhere.header.revision) for _ in range(300)))
    assert faulty.proofs == 1
    faulty.flowing.clear()
    faulty.proof_seconds = 0.1
    changed = await coordinator.txn([], [Put(layout.item_key("new-one"), journal("new-one"))])
    began = asyncio.get_running_loop().time()
    waits = [asyncio.ensure_future(keyspace.wait_for_revision(changed.header.revision)) for _ in range(300)]
    await eventually(lambda: faulty.proofs > 3)
    assert not any(wait.done() for wait in waits)
    elapsed = asyncio.get_running_loop().time() - began
    assert faulty.proofs <= 3 + elapsed / 0.4, "after 0.05 s, and then at intervals of at least 0.4 s"
    faulty.flowing.set()
    assert {(await each).revision for each in waits} == {changed.header.revision}
