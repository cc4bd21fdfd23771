"""Brokers that exit when no other can take over: others continue immediately where they ended. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from coranto.client import JournalClient
from coranto.errors import IndexHasGreaterOffset
from coranto.labels import label_set
from coranto.testing import Cluster
from coranto.testing.machines import LAYOUT
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import in_sync

JOURNALS = ["test/one", "test/two", "test/three"]
MINE = label_set(author="me")


def virtually(main: Callable[[SimLoop], Coroutine[Any, Any, None]]) -> None:
    with simulated(0, shuffle=False) as loop:
        loop.run_until_complete(main(loop))
        assert not loop.problems
        assert not loop.unnoticed()


def record_of(cluster: Cluster, journal: str) -> in_sync.InSyncRecord:
    return in_sync.decode(cluster._world.etcd.kvs[LAYOUT.in_sync_key(journal)].value)


async def primary_of(client: JournalClient, journal: str) -> int:
    """Return the number of the journal's primary."""
    (listed,) = [each for each in (await client.list()).journals if each.spec.name == journal]
    return int(listed.route.members[listed.route.primary].suffix.rpartition("-")[2])


def test_journals_of_one_replica_continue_immediately_through_rolling_restarts() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=2) as cluster:
            client = cluster.client()
            for journal in JOURNALS:
                await cluster.create(journal, replication=1)
            handed_over = alone = 0
            for number in range(12):
                for journal in JOURNALS:
                    begun = loop.time()
                    assert (await client.append(journal, b"+")).begin == number
                    assert loop.time() - begun < 0.5
                    assert record_of(cluster, journal).members
                # Half of the time the other broker is stopped, too.
                exits = (0, 1) if number % 2 else (number // 2 % 2,)
                for each in exits:
                    await cluster.stop(each)
                    records = [record_of(cluster, journal) for journal in JOURNALS]
                    assert not any(record.members == (f"local#broker-{each}",) for record in records)
                    handed_over += sum(not record.closed for record in records)
                    alone += sum(record.closed for record in records)
                for each in exits:
                    await cluster.start(each)
            assert handed_over
            assert alone
            for journal in JOURNALS:
                assert await client.read_all(journal, 0, 12) == b"+" * 12

    virtually(main)


def test_the_next_broker_continues_where_the_only_broker_exited_for_good() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=2) as cluster:
            client = cluster.client()
            await cluster.stop(1)
            for journal in JOURNALS:
                await cluster.create(journal, replication=1)
            await client.append(JOURNALS[0], b"all is stored", union_registers=MINE)
            await cluster.stop(0)
            record = record_of(cluster, JOURNALS[0])
            assert (record.closed, record.end, record.registers) == (True, 13, MINE)
            await cluster.start(1)
            begun = loop.time()
            result = await client.append(JOURNALS[0], b", and on", check_registers=pb.LabelSelector(include=MINE))
            assert (result.begin, result.registers) == (13, MINE)
            assert (await client.append(JOURNALS[1], b"first")).begin == 0
            assert loop.time() - begun < 0.5
            assert await client.read_all(JOURNALS[0], 0, 21) == b"all is stored, and on"

    virtually(main)


@pytest.mark.parametrize("replication", [2, 3])
@pytest.mark.parametrize("order", ["together", "the primary first", "the primary last"])
def test_a_whole_cluster_is_replaced_without_its_disks(replication: int, order: str) -> None:
    old, new = range(replication), range(replication, 2 * replication)

    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=2 * replication) as cluster:
            client = cluster.client()
            for number in new:
                await cluster.stop(number)
            for journal in JOURNALS:
                await cluster.create(journal, replication=replication)
            await client.append(JOURNALS[0], b"all is stored", union_registers=MINE)
            await client.append(JOURNALS[1], b"too")
            primary = await primary_of(client, JOURNALS[0])
            others = [number for number in old if number != primary]
            if order == "together":
                await asyncio.gather(*map(cluster.stop, old))
            else:
                for number in [primary, *others] if order == "the primary first" else [*others, primary]:
                    await cluster.stop(number)
            for number in new:
                await cluster.start(number)
            await cluster.ready(*JOURNALS)
            begun = loop.time()
            result = await client.append(JOURNALS[0], b", and on", check_registers=pb.LabelSelector(include=MINE))
            assert (result.begin, result.registers) == (13, MINE)
            assert (await client.append(JOURNALS[1], b"!")).begin == 3
            assert (await client.append(JOURNALS[2], b"first")).begin == 0
            assert loop.time() - begun < 0.5
            assert await client.read_all(JOURNALS[0], 0, 21) == b"all is stored, and on"
            assert await client.read_all(JOURNALS[1], 0, 4) == b"too!"

    virtually(main)


def test_others_continue_where_a_member_left_if_the_last_disk_is_lost() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=4) as cluster:
            client = cluster.client()
            for number in (2, 3):
                await cluster.stop(number)
            await cluster.create(JOURNALS[0], replication=2)
            await client.append(JOURNALS[0], b"all is stored")
            primary = await primary_of(client, JOURNALS[0])
            await cluster.stop(primary)
            record = record_of(cluster, JOURNALS[0])
            assert (record.members, record.left, record.end) == ((f"local#broker-{1 - primary}",), True, 13)
            await cluster.kill(1 - primary, expire=True)
            for number in (2, 3):
                await cluster.start(number)
            await cluster.ready(JOURNALS[0])
            assert (await client.append(JOURNALS[0], b", and on")).begin == 13
            await cluster.start(1 - primary)
            assert (await client.append(JOURNALS[0], b".")).begin == 21
            assert await client.read_all(JOURNALS[0], 0, 22) == b"all is stored, and on."

    virtually(main)


def test_unstored_content_is_waited_for_and_recovered_immediately() -> None:
    async def main(loop: SimLoop) -> None:
        async with Cluster(brokers=2) as cluster:
            client = cluster.client()
            await cluster.stop(1)
            await cluster.create(JOURNALS[0], replication=1)
            await client.append(JOURNALS[0], b"only here")
            cluster.cut(0, "store")
            await cluster.stop(0)
            assert record_of(cluster, JOURNALS[0]).members == ("local#broker-0",)
            await cluster.start(1)
            with pytest.raises(IndexHasGreaterOffset):
                await client.append(JOURNALS[0], b"too early")
            cluster.heal()
            await cluster.start(0)
            begun = loop.time()
            await cluster._world.until(lambda: record_of(cluster, JOURNALS[0]).closed)
            assert loop.time() - begun < 1.5
            assert (await client.append(JOURNALS[0], b", and on")).begin == 9
            assert await client.read_all(JOURNALS[0], 0, 17) == b"only here, and on"

    virtually(main)
