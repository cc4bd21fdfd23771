"""Leases: kept alive, resumed after a crash, lost; and the member key attached to them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from coranto.cluster import EtcdServer
from coranto.coordination.etcd import Delete, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import LEASE_FILE, LeaseRecord, open_session
from coranto.effects import SystemClock
from coranto.errors import LeaseLost
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator, SimEtcd
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.network import Network
from coranto.testing.sim.timeline import Process

MEMBER = MemberId("zone", "broker-1")
WAIT_SECONDS = 120.0


def test_an_unreadable_record_is_ignored(tmp_path: Path) -> None:
    record = LeaseRecord.within(tmp_path)
    assert record.load() is None
    for content in ("", "[]", "{}", '{"cluster_id": 1}', '{"cluster_id": 1, "lease": "x"}'):
        (tmp_path / LEASE_FILE).write_text(content)
        assert record.load() is None
    record.save(1 << 63, 5)
    assert record.load() == (1 << 63, 5)
    record.clear()
    assert record.load() is None


def test_a_lease_lasts_while_it_is_kept_alive(layout: Layout) -> None:
    async def main(loop: SimLoop) -> None:
        network, process = Network(loop, loop.rng), Process(loop, "broker")
        etcd, clock = SimEtcd(loop, network), SimClock(loop, process)
        coordinator = SimCoordinator(etcd, network, "broker", process, clock)
        session = await open_session(coordinator, ttl_seconds=10, clock=clock)
        key = layout.member_key(MEMBER)
        await session.announce(key, b"spec")
        while loop.time() < 35:
            assert (await coordinator.lease_status(session.lease)).remaining > 5
            assert not session.lost.is_set()
            await asyncio.sleep(0.2)
        assert key in etcd.kvs
        await session.close(revoke=False)
        await asyncio.sleep(6)
        assert key in etcd.kvs
        await asyncio.sleep(5)
        assert key not in etcd.kvs, "it is no longer kept alive"

    with simulated(0) as loop:
        loop.run_until_complete(main(loop))


async def test_a_restarted_process_resumes_its_membership(
    coordinator: EtcdCoordinator, layout: Layout, tmp_path: Path
) -> None:
    key = layout.member_key(MEMBER)
    killed = await open_session(coordinator, ttl_seconds=30, record=LeaseRecord.within(tmp_path))
    announced = await killed.announce(key, b"http://old:1")
    assignment = layout.assignment_key("journal", MEMBER, 0)
    await coordinator.txn([], [Put(assignment, b"route", lease=killed.lease)])
    await killed.close(revoke=False)

    session = await open_session(coordinator, ttl_seconds=30, record=LeaseRecord.within(tmp_path))
    assert session.resumed
    assert session.lease == killed.lease
    assert session.ttl_seconds == 30
    later = await session.announce(key, b"http://new:2")
    kv = (await coordinator.get(key))[1]
    assert kv is not None
    assert (kv.value, kv.lease, kv.mod_revision) == (b"http://new:2", killed.lease, later)
    assert kv.create_revision == announced, "it keeps its place in the order of leaders"
    assert (await coordinator.get(assignment))[1] is not None
    assert await session.announce(key, b"http://new:2") > later, "watchers see each announcement"
    await session.close()
    assert (await coordinator.get(assignment))[1] is None
    assert not (tmp_path / LEASE_FILE).exists()


async def test_an_expired_lease_or_one_of_another_etcd_is_not_resumed(
    coordinator: EtcdCoordinator, tmp_path: Path
) -> None:
    record = LeaseRecord.within(tmp_path)
    first = await open_session(coordinator, ttl_seconds=30, record=record)
    await first.close(revoke=False)
    await coordinator.lease_revoke(first.lease)
    second = await open_session(coordinator, ttl_seconds=30, record=record)
    assert not second.resumed
    await second.close(revoke=False)
    content = json.loads((tmp_path / LEASE_FILE).read_text())
    (tmp_path / LEASE_FILE).write_text(json.dumps(content | {"cluster_id": content["cluster_id"] ^ 1}))
    third = await open_session(coordinator, ttl_seconds=30, record=record)
    assert not third.resumed
    await third.close()
    await coordinator.lease_revoke(second.lease)


async def test_an_announcement_waits_for_a_key_of_another_lease(coordinator: EtcdCoordinator, layout: Layout) -> None:
    key = layout.member_key(MEMBER)
    old = await open_session(coordinator, ttl_seconds=30)
    await old.announce(key, b"old")
    new = await open_session(coordinator, ttl_seconds=30)
    announcing = asyncio.ensure_future(new.announce(key, b"new"))
    neighbour = await coordinator.txn([], [Put(key + "0", b""), Put(layout.root + "x", b"")])
    await coordinator.txn([], [Delete(key + "0")])
    assert neighbour.succeeded
    done, _ = await asyncio.wait([announcing], timeout=0.2)
    assert not done, "the deletion of a longer key must not end the wait"
    await old.close()
    revision = await asyncio.wait_for(announcing, WAIT_SECONDS)
    kv = (await coordinator.get(key))[1]
    assert kv is not None
    assert (kv.value, kv.mod_revision) == (b"new", revision)
    await new.close()


async def test_a_lost_lease_is_reported_and_ends_announcements(coordinator: EtcdCoordinator, layout: Layout) -> None:
    key = layout.member_key(MEMBER)
    holder = await open_session(coordinator, ttl_seconds=30)
    await holder.announce(key, b"holder")
    session = await open_session(coordinator, ttl_seconds=1)
    announcing = asyncio.ensure_future(session.announce(key, b"never"))
    await coordinator.lease_revoke(session.lease)
    await asyncio.wait_for(session.lost.wait(), WAIT_SECONDS)
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(announcing, WAIT_SECONDS)
    await session.close()
    await holder.close()


class _PausedClock(SystemClock):
    """A clock that skips `paused` seconds. Its sleeps are short, so that a long lease is kept alive often."""

    paused = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.paused

    async def sleep(self, seconds: float) -> None:
        await super().sleep(min(seconds, 0.1))


async def test_a_lease_is_unconfirmed_after_a_pause_until_etcd_confirms_it(coordinator: EtcdCoordinator) -> None:
    clock = _PausedClock()
    session = await open_session(coordinator, ttl_seconds=60, clock=clock)
    await session.confirmed()
    clock.paused += 100
    confirmed = asyncio.ensure_future(session.confirmed())
    await asyncio.sleep(0)
    assert not confirmed.done()
    await asyncio.wait_for(confirmed, WAIT_SECONDS)
    assert not session.lost.is_set()

    await coordinator.lease_revoke(session.lease)
    clock.paused += 100
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(session.confirmed(), WAIT_SECONDS)
    await session.close(revoke=False)


async def test_updates_change_only_the_sessions_own_key(coordinator: EtcdCoordinator, layout: Layout) -> None:
    key = layout.member_key(MEMBER)
    session = await open_session(coordinator, ttl_seconds=30)
    with pytest.raises(LeaseLost):
        await session.update(b"too early")
    first = await session.announce(key, b"one")
    second = await session.update(b"two")
    kv = (await coordinator.get(key))[1]
    assert kv is not None
    assert (kv.value, kv.lease, kv.mod_revision, kv.create_revision) == (b"two", session.lease, second, first)
    assert session.revision == second
    await coordinator.txn([], [Put(key, b"stolen")])
    with pytest.raises(LeaseLost):
        await session.update(b"three")
    await session.close()
    await coordinator.txn([], [Delete(key)])


async def test_a_lease_is_lost_when_etcd_stays_unavailable_for_its_ttl(
    tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, etcd = _PausedClock(), EtcdServer(tmp_path, fsync=False)
    with etcd:
        async with EtcdCoordinator(etcd.endpoint, timeout_seconds=30) as coordinator:
            session = await open_session(coordinator, ttl_seconds=120, clock=clock)
            await session.announce(layout.member_key(MEMBER), b"spec")
            await asyncio.to_thread(etcd.kill)
            await asyncio.to_thread(etcd.start)
            assert await session.update(b"still here") > 0, "a restart within the time goes unnoticed"
            assert not session.lost.is_set()
            monkeypatch.setattr(coordinator, "_timeout", 0.2)
            await asyncio.to_thread(etcd.stop)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.lost.wait(), 0.5)
            clock.paused += session.ttl_seconds
            await asyncio.wait_for(session.lost.wait(), session.ttl_seconds / 2)
            await session.close(revoke=False)


def test_the_clock_advances_while_the_machine_sleeps() -> None:
    # CLOCK_MONOTONIC stops during sleep; /proc/uptime, like CLOCK_BOOTTIME, does not.
    before = SystemClock().monotonic()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert before - 1 < uptime < SystemClock().monotonic() + 1


async def test_a_lease_is_unconfirmed_after_the_machine_slept(coordinator: EtcdCoordinator) -> None:
    class Sleeper(SystemClock):
        """A clock that advances while a machine sleeps; sleeping tasks do not wake up."""

        slept = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.slept

        async def sleep(self, seconds: float) -> None:
            await asyncio.Event().wait()

    clock = Sleeper()
    session = await open_session(coordinator, ttl_seconds=60, clock=clock)
    await session.confirmed()
    clock.slept = 120.0
    async with asyncio.timeout(WAIT_SECONDS):
        await session.confirmed()  # etcd is queried immediately, and still has the lease.
    await coordinator.lease_revoke(session.lease)
    clock.slept = 240.0
    with pytest.raises(LeaseLost):
        async with asyncio.timeout(WAIT_SECONDS):
            await session.confirmed()
    assert session.lost.is_set()
    await session.close()


async def test_a_copied_record_resumes_nothing(coordinator: EtcdCoordinator, tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    first = await open_session(coordinator, ttl_seconds=30, record=LeaseRecord.within(original))
    copy.mkdir()
    (copy / LEASE_FILE).write_bytes((original / LEASE_FILE).read_bytes())
    second = await open_session(coordinator, ttl_seconds=30, record=LeaseRecord.within(copy))
    assert not second.resumed
    assert second.lease != first.lease
    assert LeaseRecord.within(original).resumable() == LeaseRecord.within(original).load()
    await first.close()
    await second.close()
