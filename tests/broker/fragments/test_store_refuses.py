"""Real brokers with a store that accepts probes and refuses fragments, and with disks that damage waiting fragments."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from coranto.audit import AuditStatus, audit_journal
from coranto.client import JournalClient
from coranto.errors import StoreDenied
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import Content, FileFragments
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments import persister
from coranto_broker.fragments.backlog import FAILING_ATTEMPTS
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker, stored_files

J, URL = "test/journal", "file:///frags/"
MakeSpec = Callable[..., pb.JournalSpec]


class Refusals:
    """Stores accept probes and refuse fragments, while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        self.count = 0
        real = FileFragments.put

        async def put(store: FileFragments, fragment: Fragment, content: Content) -> None:
            if self.on and not fragment.journal.startswith(".test/"):
                self.count += 1
                raise StoreDenied("403: no objects but probes")
            await real(store, fragment, content)

        monkeypatch.setattr(FileFragments, "put", put)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(monkeypatch)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have attempts repeated soon, and appends wait only briefly."""
    for name in ("_BACKOFF_SECONDS", "_LATER_SECONDS", "_HELD_SECONDS"):
        value: Any = (0.05,) * 5 if name == "_BACKOFF_SECONDS" else 0.05
        monkeypatch.setattr(persister, name, value)
    monkeypatch.setattr(persister, "_OPEN_SECONDS", 0.1)
    monkeypatch.setattr("coranto_broker.fragments.backlog.TIMEOUT_SECONDS", 0.1)


def small(spec: MakeSpec, name: str = J, **fields: Any) -> pb.JournalSpec:
    """Return a journal whose appends of at least a KiB are separate fragments."""
    return spec(name, stores=(URL,), fragment={"length": 1024, "refresh_interval": 1}, **fields)


async def refused(client: RawClient, journal: str = J, size: int = 1500) -> tuple[pb.AppendResponse, int]:
    """Append until an append is refused. Return its response, and the bytes of earlier appends."""
    total = 0
    while True:
        response = await client.append(journal, bytes(size))
        if response.status != pb.OK:
            return response, total
        total += size
        assert total < 1 << 20, "the backlog is not bounded"


async def test_appends_are_refused_while_the_backlog_is_too_large_and_then_continue(
    broker_settings: BrokerSettings, spec: MakeSpec, refusals: Refusals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coranto_broker.fragments.backlog.TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(persister, "_HELD_SECONDS", 0.1)
    bounded = broker_settings.model_copy(update={"max_unpersisted_journal_bytes": 10_000})
    async with running_broker(bounded) as (process, client):
        await create(client, small(spec))
        response, total = await refused(client)
        assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
        assert "bytes of test/journal wait to be stored in file:///frags/" in response.store_health_error
        assert "10000" in response.store_health_error
        # A fragment more than the bound, and the growing one.
        assert 10_000 < total <= 10_000 + 2 * 3000
        # On each path of appends: inline, in a batch, in pieces, or empty.
        several = await asyncio.gather(*(client.append(J, b"x" * n) for n in range(1, 9)))
        pieces = await client.append(J, *[bytes(100_000)] * 3)
        assert {each.status for each in (*several, pieces, await client.append(J))} == {pb.FRAGMENT_STORE_UNHEALTHY}
        # Neither other journals nor readers are held back.
        await create(client, small(spec, "test/other"))
        assert (await client.append("test/other", b"x")).status == pb.OK
        assert await client.content(J) == bytes(total)
        unpersisted = process.broker.replicas.unpersisted
        assert total <= unpersisted.size <= total + 1
        assert (process.broker.store_watch.backlog.held, unpersisted.age > 0) == (1, True)

        refusals.on = False
        waiting = await client.append(J, b"x")
        while waiting.status != pb.OK:  # The client only tries again.
            assert waiting.status == pb.FRAGMENT_STORE_UNHEALTHY
            waiting = await client.append(J, b"x")
        assert (waiting.commit.begin, process.broker.store_watch.backlog.held) == (total, 0)
        assert await client.content(J) == bytes(total) + b"x"


async def test_failed_attempts_to_store_count_as_an_unhealthy_store(
    broker_settings: BrokerSettings, spec: MakeSpec, refusals: Refusals, hasty: None
) -> None:
    async with running_broker(broker_settings) as (process, client):
        health = pb.FragmentStoreHealthRequest(fragment_store=URL)
        await create(client, small(spec))
        assert (await client.stub.FragmentStoreHealth(health)).status == pb.OK
        response, _ = await refused(client)
        assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
        assert "403: no objects but probes" in response.store_health_error
        assert refusals.count >= FAILING_ATTEMPTS
        answer = await client.stub.FragmentStoreHealth(health)
        assert (answer.status, "cannot store fragments of 1 journals" in answer.store_health_error) == (
            pb.FRAGMENT_STORE_UNHEALTHY,
            True,
        )
        gauge = process.broker.metrics.stores_healthy.labels(URL)
        assert gauge._value.get() == 0
        # Another store in its place is not affected.
        ((listing,),) = [each.journals for each in await client.listing()]
        moved = small(spec)
        moved.fragment.stores[:] = ["file:///moved/", URL]
        await client.apply(moved, revision=listing.mod_revision)
        refusals.on = False
        await eventually(lambda: gauge._value.get() == 1)
        assert (await client.append(J, b"x")).status == pb.OK
        assert (await client.stub.FragmentStoreHealth(health)).status == pb.OK


async def test_journals_without_a_store_are_not_held_back(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    bounded = broker_settings.model_copy(update={"max_unpersisted_journal_bytes": 1, "max_unpersisted_bytes": 1})
    async with running_broker(bounded) as (process, client):
        await create(client, spec(fragment={"length": 1024}))
        for _ in range(20):
            assert (await client.append(J, bytes(1500))).status == pb.OK
        assert process.broker.replicas.unpersisted == (0, 0.0)


async def test_a_file_truncated_by_its_store_is_stored_again_and_read_locally(
    broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, cut = FileFragments.put, list[Path]()

    async def put(store: FileFragments, fragment: Fragment, content: Content) -> None:
        await real(store, fragment, content)
        if not cut and not fragment.journal.startswith(".test/"):
            assert broker_settings.file_root is not None
            cut.append(broker_settings.file_root / "frags" / fragment.content_path)
            os.truncate(cut[0], fragment.length - 1)

    monkeypatch.setattr(FileFragments, "put", put)
    async with running_broker(broker_settings) as (process, client):
        await create(client, small(spec))
        for byte in b"ab":
            assert (await client.append(J, bytes([byte]) * 1500)).status == pb.OK
        await eventually(lambda: cut and cut[0].stat().st_size == 1500)
        (replica,) = process.broker.resolver.local_replicas
        await eventually(lambda: not replica.index.sealed_files())
        assert await client.content(J) == b"a" * 1500 + b"b" * 1500


async def test_the_head_stays_when_stored_fragments_are_deleted(
    broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    async with running_broker(broker_settings) as (process, client):
        await create(client, small(spec))
        for _ in range(3):
            await client.append(J, bytes(1500))
        await client.append(J, suspend=pb.AppendRequest.SUSPEND_NOW)  # Rolls the growing fragment.
        await client.append(J)
        (replica,) = process.broker.resolver.local_replicas
        await eventually(lambda: len(stored_files(broker_settings)) >= 3 and not replica.index.sealed_files())
        assert broker_settings.file_root is not None
        shutil.rmtree(broker_settings.file_root / "frags" / J)
        await eventually(lambda: not len(replica.index.entries))
        (found,) = await client.read(J, offset=-1)
        assert (found.status, found.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 4500)
        response = await client.append(J, b"more")
        assert (response.status, response.commit.begin) == (pb.OK, 4500)


# -- Damaged local files ---------------------------------------------------------------------------------------------


@pytest.fixture
async def pair(broker_settings: BrokerSettings, hasty: None) -> AsyncIterator[list[tuple[BrokerProcess, RawClient]]]:
    one, two = (
        broker_settings.model_copy(update={"id": f"broker-{n}", "data_dir": broker_settings.data_dir / str(n)})
        for n in range(2)
    )
    async with running_broker(one) as first, running_broker(two) as second:
        yield [first, second]


async def primary_of(pair: list[tuple[BrokerProcess, RawClient]]) -> int:
    response = await pair[0][1].append_when_ready(J)
    while response.status != pb.OK:
        response = await pair[0][1].append_when_ready(J)
    return int(response.header.route.members[response.header.route.primary].suffix[-1])


def damage(settings: BrokerSettings) -> Path:
    """Flip a bit of the first complete fragment of the journal's spool. Return its path."""
    path = min(settings.data_dir.glob("spools/*/*/*.content"))
    data = bytearray(path.read_bytes())
    data[700] ^= 0x10
    path.write_bytes(data)
    return path


async def test_a_flipped_bit_of_the_primary_is_repaired_from_a_replica(
    pair: list[tuple[BrokerProcess, RawClient]],
    broker_settings: BrokerSettings,
    spec: MakeSpec,
    refusals: Refusals,
    hasty: None,
) -> None:
    replicated = small(spec)
    replicated.replication = 2
    await pair[0][1].apply(replicated)
    number = await primary_of(pair)
    process, client = pair[number]
    for byte in b"ab":
        assert (await client.append(J, bytes([byte]) * 1500)).status == pb.OK
    await eventually(lambda: refusals.count)
    path = damage(process.broker.settings)
    refusals.on = False
    # The audit compares the stored content with its sum. In an earlier version, the damaged content was stored.
    await eventually(lambda: stored_files(broker_settings))
    (replica,) = process.broker.resolver.local_replicas
    await eventually(lambda: not replica.index.sealed_files())
    async with JournalClient(process.endpoint, file_root=broker_settings.file_root) as reader:
        audit = await audit_journal(reader, process.broker.stores, J)
    assert audit.problems == []
    assert await client.content(J) == b"a" * 1500 + b"b" * 1500
    metrics = process.broker.metrics
    assert (metrics.damaged._value.get(), metrics.restored._value.get()) == (1, 1)
    (aside,) = (path.parent / "set-aside").iterdir()
    assert aside.read_bytes()[700] == ord("a") ^ 0x10
    assert not path.exists()


async def test_content_without_another_copy_is_neither_stored_nor_served(
    broker_settings: BrokerSettings, spec: MakeSpec, refusals: Refusals, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(broker_settings) as (process, client):
        await create(client, small(spec))
        for byte in b"abc":
            assert (await client.append(J, bytes([byte]) * 1500)).status == pb.OK
        await eventually(lambda: refusals.count)
        damage(process.broker.settings)
        refusals.on = False
        await eventually(lambda: process.broker.persister.damaged)
        async with JournalClient(process.endpoint, retry_timeout=0.1) as reader:
            audit = await audit_journal(reader, process.broker.stores, J)
        statuses = {found.fragment.begin: found.status for found in audit.fragments}
        assert statuses[0] is AuditStatus.UNREADABLE
        assert "damaged" in audit.fragments[0].problem
        assert await client.content(J, 1500) == b"b" * 1500 + b"c" * 1500
        assert all(fragment.begin > 0 for fragment in stored_files(broker_settings).values())
        # An operator has a copy, and puts it into the store.
        (replica,) = process.broker.resolver.local_replicas
        first = replica.index.entries[0].fragment
        assert broker_settings.file_root is not None
        place = broker_settings.file_root / "frags" / first.content_path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"a" * 1500)
        await eventually(lambda: not process.broker.persister.pending)
        assert await client.content(J) == b"a" * 1500 + b"b" * 1500 + b"c" * 1500
