"""All brokers lose their disks, and a journal continues where its store ends: no reader skips new content."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.client.committed import async_committed_reader
from coranto.cluster import EmbeddedCluster
from coranto.errors import CorantoError, JournalRecreated
from coranto.labels import CONTENT_TYPE, CONTINUE, DATA_LOSS, JSON_LINES, label_set
from coranto.messages import JsonLines, ProducerClock, Publisher, Source, new_producer_id
from coranto.recovery.heads import reset_head
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores.sql import SqlStore
from tests.consumers.runtime.conftest import Sums
from tests.sampling import sampled

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

JOURNAL = "lost/disks"
LINES = JsonLines()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(600):
        if await condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("the condition did not become true")


async def publish(client: JournalClient, key: str, *numbers: int) -> int:
    publisher = Publisher(
        client.append, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=LINES
    )
    for n in numbers:
        await publisher.add(JOURNAL, {"key": key, "n": n, "padding": "x" * 100})
    await publisher.commit()
    return await client.head(JOURNAL)


async def read(client: JournalClient, source: Source, end: int) -> tuple[list[int], Source]:
    reader = async_committed_reader(client, JOURNAL, LINES, source, end=end)
    return [message.message["n"] async for message in reader], reader.source()


@pytest.mark.parametrize("brokers", sampled([2, 1], 2))
async def test_a_shard_and_a_reader_detect_lost_content(tmp_path: Path, brokers: int) -> None:
    spec = pb.JournalSpec(name=JOURNAL, replication=brokers, labels=label_set({CONTENT_TYPE: JSON_LINES}))
    spec.fragment.length = 1024
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.stores.append("file:///")
    spec.fragment.refresh_interval.FromSeconds(1)
    sums = Sums(SqlStore(f"sqlite:///{tmp_path}/store.db"))
    shard_of = shard_spec("shard-sums", [JOURNAL], max_seconds=5)
    with EmbeddedCluster(tmp_path / "cluster", brokers=brokers, lease_seconds=5, etcd_fsync=False) as cluster:
        async with JournalClient(cluster.info.endpoint, retry_timeout=60) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec)])

            async def is_ready() -> bool:
                head = (await client.heads(f"name={JOURNAL}")).by_name[JOURNAL]
                return head.is_end and head.in_sync and head.replicas == brokers

            await eventually(is_ready)
            kept = await publish(client, "kept", *range(10))
            await publish(client, "kept", *range(10, 20))  # It begins a fragment, so the one before is stored.

            async def is_stored() -> bool:
                return (await client.heads(f"name={JOURNAL}")).by_name[JOURNAL].persisted_head >= kept

            await eventually(is_stored)
            end = await publish(client, "lost", 100, 101, 102)
            async with running_shard(sums, shard_of, client) as shard:
                await shard.read_through({JOURNAL: end})
            numbers, behind = await read(client, Source(), end)
            assert numbers == [*range(20), 100, 101, 102]
            for index in range(brokers):  # All together, so that no broker replicates its last content to another one.
                cluster.signal_broker(index, signal.SIGSTOP)
            for index in range(brokers):
                shutil.rmtree(tmp_path / "cluster" / "brokers" / f"broker-{index}")
            for index in range(brokers):
                cluster.kill_broker(index)

            async def is_reset() -> bool:
                with contextlib.suppress(CorantoError):
                    return await reset_head(client, JOURNAL) != ""
                return False

            await eventually(is_reset)
            fell_to = await client.head(JOURNAL)
            assert kept <= fell_to < end
            head = await publish(client, "new", *range(200, 230))
            assert head > end

            with pytest.raises(JournalRecreated, match=f"lost its content from offset {fell_to} on"):
                await read(client, behind, head)
            there = Source(fell_to, journal_id=behind.journal_id)
            assert (await read(client, there, head))[0] == list(range(200, 230)), (
                "a reader that continues at the new head needs no confirmation"
            )
            before = sums.sums()
            with pytest.raises(JournalRecreated, match=f"would skip its messages from {fell_to} to {end}"):
                async with running_shard(sums, shard_of, client) as shard:
                    await shard.read_through({JOURNAL: head})
            assert sums.sums() == before
            shard_of.labels.CopyFrom(label_set({DATA_LOSS: CONTINUE}))
            async with running_shard(sums, shard_of, client) as shard:
                await shard.read_through({JOURNAL: head})
            assert sums.sums() == {**before, "new": (sum(range(200, 230)), 30)}
