"""Journals on brokers in virtual time, damage that tests inject, and audits of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.audit import AuditOptions, Depth, JournalsCheck, Kind, Report, Severity, Subject, run_checks
from coranto.audit.memory import AuditMemory
from coranto.client import JournalClient
from coranto.fragments.fragment import Fragment
from coranto.labels import label_set
from coranto.testing.cluster import STORE_URL, Cluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.object_store import SimStores, StoredObject
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb

J = "shop/orders"
PIECE = bytes(range(256)) * 5
LENGTH = len(PIECE)
REPLICATIONS = pytest.mark.parametrize("replication", [1, 3])


class Damaged:
    """A journal with seven appends on brokers, the last of them not stored, and operations that damage it."""

    def __init__(self, cluster: Cluster, replication: int) -> None:
        self.cluster = cluster
        self.world = cluster._world
        self.replication = replication
        self.client: JournalClient = cluster.client(retry_timeout=3)
        self.process = Process(self.world.timeline, "audit")
        self.stores = SimStores(self.world.store, self.world.network, "client", self.process)
        self.clock = SimClock(self.world.timeline)
        self.head = 0

    def spec(self, name: str = J, **fields: Any) -> pb.JournalSpec:
        fragment = pb.JournalSpec.Fragment(
            length=1024, compression_codec=pb.NONE, stores=[STORE_URL], refresh_interval=Duration(seconds=2)
        )
        fragment.MergeFrom(pb.JournalSpec.Fragment(**fields))
        return pb.JournalSpec(name=name, replication=self.replication, flags=pb.JournalSpec.O_RDWR, fragment=fragment)

    async def fill(self, appends: int = 7, name: str = J, content: bytes = PIECE) -> None:
        for _ in range(appends):
            self.head = (await self.client.append(name, content)).end
        await asyncio.sleep(6)

    async def audit(self, selector: str = "name:prefix=shop/", **options: Any) -> Report:
        check = JournalsCheck(
            self.client, self.stores, selector, AuditOptions(**options), clock=self.clock, at_replicas=False
        )
        return await run_checks(selector, [check], depth=check._options.depth, clock=self.clock)

    async def audit_with(self, memory: AuditMemory, selector: str = f"name={J}") -> Report:
        """Audit with records in this memory only."""
        check = JournalsCheck(
            self.client, self.stores, selector, AuditOptions(), clock=self.clock, memory=memory, at_replicas=False
        )
        return await run_checks(selector, [check], clock=self.clock)

    async def deep(self, **options: Any) -> Report:
        return await self.audit(depth=Depth.DEEP, **options)

    async def later(self) -> None:
        """Wait until brokers have listed the stores again."""
        await asyncio.sleep(8)

    @property
    def objects(self) -> list[StoredObject]:
        found = [each for each in self.world.store.objects.values() if each.fragment.journal == J]
        return sorted(found, key=lambda each: each.fragment.begin)

    def delete(self, *fragments: Fragment) -> None:
        for fragment in fragments:
            del self.world.store.objects[fragment.content_path]

    def put(self, fragment: Fragment, data: bytes) -> None:
        now = self.world.timeline.time()
        self.world.store.objects[fragment.content_path] = StoredObject(fragment, data, now)

    async def change(self, **fields: Any) -> None:
        (info,) = (await self.client.list(f"name={J}")).journals
        info.spec.fragment.MergeFrom(pb.JournalSpec.Fragment(**fields))
        await self.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])

    async def label(self, pairs: Mapping[str, str]) -> None:
        """Replace the labels of the journal."""
        (info,) = (await self.client.list(f"name={J}")).journals
        info.spec.labels.CopyFrom(label_set(pairs))
        await self.client.apply([pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)])

    def wipe(self, number: int) -> None:
        machine = self.cluster._machine(number)
        disk = machine.disk.for_process(Process(self.world.timeline, "wiper"))
        for path in machine.disk.paths():
            disk.remove(Path(path))


Play = Callable[[int, Callable[[Damaged], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play() -> Play:
    """Runs a story on as many brokers as the journal has replicas, in virtual time."""

    def run(replication: int, story: Callable[[Damaged], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with Cluster(brokers=replication) as cluster:
                damaged = Damaged(cluster, replication)
                await cluster.create(damaged.spec())
                await damaged.fill()
                await story(damaged)

        with simulated(0, shuffle=False) as loop:
            loop.run_until_complete(main())
            assert isinstance(loop, SimLoop)
            assert not loop.problems

    return run


def kinds(report: Report) -> set[Kind]:
    """Return the kinds of a report's errors and warnings."""
    return {each.kind for each in report.findings if each.severity is not Severity.INFO}


def one(report: Report, kind: Kind) -> dict[str, object]:
    (found,) = [each for each in report.findings if each.kind is kind]
    assert found.subject == Subject.journal(J)
    return dict(found.facts)
