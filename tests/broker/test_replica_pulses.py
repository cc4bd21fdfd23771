"""When a replica pulses: now and then, sooner after a failure, and at once when its journal's Route has changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from coranto.coordination.etcd import EtcdHeader
from coranto.coordination.layout import Layout, MemberId
from coranto.effects import LocalDisk, SystemClock
from coranto.stores import StoreRegistry
from coranto.wire import protocol_pb2 as pb
from coranto_broker.in_sync_records import InSyncRecords
from coranto_broker.metrics import Metrics
from coranto_broker.ownership import Signal
from coranto_broker.persister import FragmentPersister
from coranto_broker.replica import PulseFailed, Replica
from coranto_broker.spool_files import Fsync, SpoolFolder

J = "test/journal"


class _Etcd:
    """Has no records."""

    async def get(self, key: str) -> tuple[EtcdHeader, None]:
        return EtcdHeader(1, 1, 1, 1), None


async def test_a_changed_route_ends_the_pause_after_failures(tmp_path: Path) -> None:
    routes = [Signal() for _ in range(7)]
    for changed_meanwhile in routes[:5]:
        changed_meanwhile.fire()
    pulses: asyncio.Queue[int] = asyncio.Queue()
    pending = iter(enumerate(routes, 1))

    async def pulse(replica: Replica) -> Signal | None:
        number, route = next(pending)
        pulses.put_nowait(number)
        # Those whose Route has changed meanwhile are repeated at once. The sixth pauses for 8 seconds.
        raise PulseFailed("no luck", route)

    etcd: Any = _Etcd()
    clock, stores = SystemClock(), StoreRegistry(tmp_path)
    replica = Replica(
        SpoolFolder(tmp_path / "spool", J, 1, LocalDisk(), clock),
        fsync=Fsync.NEVER,
        spec=lambda: pb.JournalSpec(name=J),
        stores=stores,
        persister=FragmentPersister(lambda journal, revision: None, stores, clock, Metrics()),
        records=InSyncRecords(etcd, Layout("/cluster"), MemberId("a", "b")),
        pulse=pulse,
    )
    replica.start()
    try:
        async with asyncio.timeout(4):
            while await pulses.get() < 6:
                pass
            routes[5].fire()
            assert await pulses.get() == 7
    finally:
        await replica.stop(drop=True)
