"""A replica's pulses: at intervals, sooner after a failure, and immediately if its journal's Route has changed.

Also its readers' view of the journal's end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from coranto.coordination.etcd import EtcdHeader
from coranto.coordination.layout import Layout, MemberId
from coranto.effects import Clock, LocalDisk, SystemClock
from coranto.errors import StoreError, Unavailable
from coranto.fragments.fragment import Codec, Fragment
from coranto.fragments.stores import StoreRegistry
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.journal_folders import JournalFolders
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.metrics import Metrics
from coranto_broker.ownership import Signal
from coranto_broker.priority_limiter import PriorityLimiter
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.replication.replica import PulseFailed, Replica
from coranto_broker.spool.durable_spool import Fsync, SpoolFolder
from tests.broker.running import eventually

J = "test/journal"


class _Etcd:
    """Has no records."""

    async def get(self, key: str) -> tuple[EtcdHeader, None]:
        return EtcdHeader(1, 1, 1, 1), None


def _replica(
    folder: Path,
    spec: pb.JournalSpec,
    pulse: Callable[[Replica], Awaitable[Signal | None]],
    clock: Clock = SystemClock(),
) -> Replica:
    etcd: Any = _Etcd()
    stores = StoreRegistry(folder)
    return Replica(
        SpoolFolder(folder / "spool", J, 1, LocalDisk(), clock),
        fsync=Fsync.NEVER,
        spec=lambda: spec,
        folders=JournalFolders(stores),
        persister=FragmentPersister(lambda journal, revision: None, stores, clock, Metrics()),
        records=InSyncRecords(etcd, Layout("/cluster"), MemberId("a", "b")),
        pulse=pulse,
    )


async def test_a_changed_route_ends_the_pause_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.replication.replica.PULSE_SECONDS", 6000.0)
    monkeypatch.setattr("coranto_broker.replication.replica.FAILURE_SECONDS", 60.0)
    routes = [Signal() for _ in range(7)]
    for changed_route in routes[:5]:
        changed_route.fire()
    pulses: asyncio.Queue[int] = asyncio.Queue()
    pending = iter(enumerate(routes, 1))

    async def pulse(replica: Replica) -> Signal | None:
        number, route = next(pending)
        pulses.put_nowait(number)
        # Pulses whose Route has changed since are repeated immediately. The sixth pauses for half an hour.
        raise PulseFailed("no luck", route)

    replica = _replica(tmp_path, pb.JournalSpec(name=J), pulse)
    replica.start()
    try:
        async with asyncio.timeout(30):
            while await pulses.get() < 6:
                pass
            routes[5].fire()
            assert await pulses.get() == 7
    finally:
        await replica.stop(drop=True)


async def test_unacknowledged_content_stays_invisible_when_the_replica_stops(tmp_path: Path) -> None:
    async def pulse(replica: Replica) -> Signal | None:
        return None

    spec = pb.JournalSpec(name=J)
    spec.fragment.stores.append("file:///")
    replica = _replica(tmp_path, spec, pulse)
    replica.start()
    spool = await replica.spool.take()
    spool.write(0, b"only here")
    spool.propose(spool.next_fragment(), pb.LabelSet(), primary=True, revision=1, settled=False)
    replica.spool.put(spool)
    await replica.index.wait_refreshed()
    reading = asyncio.ensure_future(replica.index.query(0, block=True))
    await asyncio.sleep(0)
    assert not reading.done()
    await replica.stop(drop=False)
    with pytest.raises(Unavailable):
        await reading
    assert spool.end == len(b"only here"), "it is kept until its outcome is known"


async def test_a_stopping_replica_holds_no_slot_while_it_waits_for_its_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pulse(replica: Replica) -> Signal | None:
        return None

    monkeypatch.setattr("coranto_broker.priority_limiter.SLOT_SECONDS", 600.0)  # No slot is lost on a slow machine.
    limiter = PriorityLimiter(1)
    held, free = (_replica(tmp_path / name, pb.JournalSpec(name=J), pulse) for name in ("held", "free"))
    for replica in (held, free):
        replica.start()
    spool = await held.spool.take()
    stopping = asyncio.create_task(held.stop(drop=False, slot=lambda: limiter.slot("held")))
    await asyncio.wait_for(free.stop(drop=False, slot=lambda: limiter.slot("free")), 60)
    assert not stopping.done()
    async with limiter.slot("something else"):
        held.spool.put(spool)
        await eventually(lambda: limiter.waiting == 1)
        assert not held.stopped.is_set()
    await asyncio.wait_for(stopping, 60)
    assert held.stopped.is_set()
    assert free.stopped.is_set()


async def test_waiting_for_a_store_that_cannot_be_listed_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pulse(replica: Replica) -> Signal | None:
        return None

    monkeypatch.setattr("coranto_broker.replication.replica.LISTING_ATTEMPTS", 2)
    spec = pb.JournalSpec(name=J, fragment=pb.JournalSpec.Fragment(stores=["file:///there/", "file:///?what=1"]))
    replica = _replica(tmp_path, spec, pulse)
    replica.start()
    try:
        for _ in range(2):  # The second fails immediately.
            with pytest.raises(StoreError, match="has the argument 'what'"):
                await asyncio.wait_for(replica.wait_refreshed(), 60)
        del spec.fragment.stores[1:]
        await asyncio.wait_for(replica.index.wait_refreshed(), 60)
        await replica.wait_refreshed()
    finally:
        await replica.stop(drop=True)


async def test_a_reader_at_a_gap_triggers_listings_at_increasing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pulse(replica: Replica) -> Signal | None:
        return None

    monkeypatch.setattr("coranto_broker.replication.replica.REFRESH_FOR_GAP_SECONDS", 0.01)
    begins: asyncio.Queue[float] = asyncio.Queue()

    class ReadClock(SystemClock):
        last = 0.0

        def monotonic(self) -> float:
            self.last = super().monotonic()
            return self.last

    clock = ReadClock()

    class Folders(JournalFolders):
        async def listed(self, spec: pb.JournalSpec, now: float) -> list[Fragment]:
            begins.put_nowait(clock.last)  # The replica has just read it as the begin of the listing.
            return await super().listed(spec, now)

        async def fragments(self, journal: str, urls: Iterable[str]) -> list[Fragment]:
            return listed[:]

    monkeypatch.setattr(f"{__name__}.JournalFolders", Folders)
    listed: list[Fragment] = []
    spec = pb.JournalSpec(name=J, fragment=pb.JournalSpec.Fragment(stores=["file:///"]))
    replica = _replica(tmp_path, spec, pulse, clock)
    replica.start()
    try:
        async with asyncio.timeout(60):
            await replica.index.wait_refreshed()
            replica.index.note_head(10)  # Another broker wrote it, and stores it later.
            reading = asyncio.ensure_future(replica.index.query(5, block=True))
            times = [await begins.get() for _ in range(5)]
            for number, (one, next_one) in enumerate(itertools.pairwise(times[1:])):
                assert next_one - one > 0.9 * 0.01 * 2 ** (number + 1), "listings get rarer"
            listed.append(Fragment(J, 0, 10, bytes(20), Codec.NONE, "file:///", 1))
            found = await reading
            assert found.entry is not None
            assert found.entry.fragment == listed[0]
    finally:
        await replica.stop(drop=True)
