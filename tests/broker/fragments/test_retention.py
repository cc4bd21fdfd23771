"""Retention by real brokers, over a store of real files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from coranto.client import JournalClient
from coranto.errors import OffsetJump, StoreError
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import FragmentStore
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import RawClient, create, eventually, listed_again, running_broker, stored_files

J = "test/journal"
HOUR = 3600
MakeSpec = Callable[..., pb.JournalSpec]


def retained(spec: MakeSpec, **fields: Any) -> pb.JournalSpec:
    """Return a journal whose fragments are small, listed every second and kept for an hour."""
    made = spec(stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 1}, **fields)
    made.fragment.retention.FromSeconds(HOUR)
    return made


async def filled(client: RawClient, settings: BrokerSettings, fragments: int = 4) -> bytes:
    """Append until this many fragments are stored, and a bit more. Return the content."""
    pieces = [bytes([number]) * 1500 for number in range(fragments)] + [b"tail"]
    for piece in pieces:
        assert (await client.append(J, piece)).status == pb.OK
    await eventually(lambda: len(stored_files(settings)) == fragments)
    return b"".join(pieces)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
async def child(broker_settings: BrokerSettings, tmp_path: Path) -> AsyncIterator[BrokerChild]:
    child = BrokerChild(broker_settings.model_copy(update={"metrics_port": 0}), tmp_path / "broker.log")
    child.start()
    try:
        yield child
    finally:
        child.close()


async def test_a_broker_removes_fragments_beyond_retention(child: BrokerChild, spec: MakeSpec) -> None:
    settings = child.settings
    client = await child.client()
    await create(client, retained(spec))
    whole = await filled(client, settings)
    begin, second, third, _ = sorted(stored_files(settings))
    age(second, HOUR + 10)
    await asyncio.to_thread(lambda: age(third, HOUR + 10))
    files = stored_files(settings)
    # No fragment is removed behind a younger one; then all old ones are, up to the next young one.
    await eventually(lambda: child.metrics()['coranto_appends_total{outcome="finished"}'] > 0)
    assert stored_files(settings) == files
    age(begin, HOUR + 10)
    await eventually(lambda: not begin.exists() and not second.exists() and not third.exists())
    assert len(stored_files(settings)) == 1
    await eventually(lambda: child.metrics()["coranto_fragments_removed_total"] == 3)
    assert child.metrics()["coranto_fragment_bytes_removed_total"] == 4500
    await eventually(lambda: child.events("retention.removed"))
    (logged,) = child.events("retention.removed")
    assert (logged["journal"], logged["fragments"], logged["first_offset"]) == (J, 3, 4500)
    # Readers of removed content jump; the remaining content and the head are unchanged.
    (first, *_) = await client.read(J, 0)
    assert (first.offset, first.write_head) == (4500, len(whole))
    assert await client.content(J, 4500) == whole[4500:]
    async with JournalClient(str((await child.ready())["endpoint"])) as reader:
        with pytest.raises(OffsetJump):
            [chunk async for chunk in reader.read(J, 0, fail_on_jump=True)]
    age(*stored_files(settings), HOUR + 10)
    assert (await client.append(J, b"more")).commit.begin == len(whole)
    # The last fragment stays, however old: the next broker derives the head from it.
    child.end()
    child.start()
    again = await child.client()
    assert (await again.append_when_ready(J, b"x")).commit.begin == len(whole) + 4
    assert len(stored_files(settings)) == 1
    for each in (client, again):
        await each.close()


async def test_nothing_is_removed_without_retention_or_with_retention_off(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    for settings, kept in (
        (broker_settings.model_copy(update={"retention": False}), retained(spec)),
        (broker_settings, spec(stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 1})),
    ):
        async with running_broker(settings) as (process, client):
            change = pb.ApplyRequest.Change(upsert=kept, expect_mod_revision=-1)
            await client.stub.Apply(pb.ApplyRequest(changes=[change]))
            await client.append_when_ready(J)
            if not stored_files(settings):
                await filled(client, settings)
            for path in stored_files(settings):
                age(path, 2 * HOUR)
            await listed_again(process.broker.resolver.local_replicas)
            assert len(stored_files(settings)) >= 4


async def test_a_failing_store_ends_the_round_without_a_gap_and_the_next_continues(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = broker_settings.model_copy(update={"retention_rate": 1000.0})
    async with running_broker(settings) as (process, client):
        await create(client, retained(spec))
        await filled(client, settings, 5)
        store: FragmentStore = process.broker.stores.get("file:///frags/")
        remove, tried = store.remove, list[Fragment]()

        async def fail_at_first(fragment: Fragment) -> None:
            tried.append(fragment)
            if len(tried) == 2:
                raise StoreError("no")
            await remove(fragment)

        monkeypatch.setattr(store, "remove", fail_at_first)
        for path in stored_files(settings):
            age(path, 2 * HOUR)
        await eventually(lambda: len(stored_files(settings)) == 1)
        begins = [fragment.begin for fragment in tried]
        assert begins == [0, 1500, 1500, 3000, 4500]
        assert process.broker.metrics.removal_failures._value.get() == 1
        # The round ends just after its last file was removed.
        await eventually(lambda: not process.broker.retention._under_way)


async def test_reading_a_fragment_that_another_broker_removed_triggers_a_new_listing(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.replication.replica.REFRESH_FOR_GAP_SECONDS", 0.1)
    async with running_broker(broker_settings) as (process, client):
        made = retained(spec)
        made.fragment.refresh_interval.FromSeconds(HOUR)
        await create(client, made)
        whole = await filled(client, broker_settings, 2)
        (replica,) = process.broker.resolver.local_replicas
        await eventually(lambda: not replica.index.sealed_files())
        sorted(stored_files(broker_settings))[0].unlink()
        with pytest.raises(grpc.aio.AioRpcError, match="has no"):
            await client.read(J, 0)
        await eventually(lambda: replica.index.entries.begin_offset == 1500)
        (first, *_) = await client.read(J, 0)
        assert (first.offset, first.write_head) == (1500, len(whole))
