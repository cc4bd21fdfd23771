"""The replicas of a broker: they wait for their predecessors, and their spools are flushed and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coranto import labels
from coranto.specs.durability import FSYNC
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Fsync
from tests.broker.running import create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


async def test_a_replica_waits_for_users_of_its_journals_files(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with running_broker(broker_settings) as (process, client):
        await create(client, spec())
        assert (await client.append(J, b"first")).status == pb.OK
        host, done = process.broker.replicas, asyncio.Event()

        async def use() -> None:
            await done.wait()

        using = host.exclusively(J, use)
        (replica,) = host.resolver.local_replicas
        host.resolver.restart(replica)
        (successor,) = host.resolver.local_replicas
        assert successor is not replica
        appending = asyncio.create_task(client.append_when_ready(J, b", second"))
        await asyncio.sleep(0)
        assert host.stopping
        assert successor.committed is None
        assert host.is_used(successor.folder.path)
        done.set()
        await using
        assert (await appending).status == pb.OK
        assert await client.content(J) == b"first, second"
        await eventually(lambda: not host.stopping)
        await eventually(replica.stopped.is_set)


async def test_the_label_of_a_journal_sets_the_flush_of_its_spool(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    settings = broker_settings.model_copy(update={"fsync": Fsync.NEVER, "fsync_interval": 0.01})
    async with running_broker(settings) as (process, client):
        wanted = spec()
        wanted.labels.CopyFrom(labels.label_set({FSYNC: "interval"}))
        await create(client, wanted)
        assert (await client.append(J, b"content")).status == pb.OK
        (replica,) = process.broker.resolver.local_replicas
        assert replica.fsync is Fsync.INTERVAL
        assert not process.broker.replicas.syncs_commits(J)
        spool = replica._spool
        assert spool is not None
        await eventually(lambda: spool.is_on_disk(spool.version))


async def test_unstored_content_is_counted(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    async with running_broker(broker_settings) as (process, client):
        await create(client, spec())
        for content in (b"first", b"second"):  # The first fragment is completed early.
            assert (await client.append(J, content)).status == pb.OK
        host = process.broker.replicas
        await eventually(lambda: host.unpersisted.size <= len(b"firstsecond"))
        assert host.unpersisted.age >= 0.0
        assert host.unreadable_spools == 0
