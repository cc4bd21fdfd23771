"""Journals with nested names, which Gazette's brokers allow: real brokers keep their stored fragments apart."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from coranto import labels
from coranto.client import JournalClient
from coranto.coordination.etcd import Delete, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.effects import SystemClock
from coranto.errors import JournalNotFound, RpcFailed, StoreError
from coranto.fragments.journal_folders import MARKER
from coranto.security.tokens import BearerToken, Capability, Claims, Keys, Secret, sign
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, eventually, listed_again, stored_files

OUTER, INNER = "shop/events", "shop/events/eu"
HOUR = 3600
MakeSpec = Callable[..., pb.JournalSpec]


def stored(spec: MakeSpec, name: str, **fields: Any) -> pb.JournalSpec:
    """Return a journal of small fragments, listed every second."""
    return spec(name, stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 1, **fields})


async def put(process: BrokerProcess, settings: BrokerSettings, *specs: pb.JournalSpec) -> None:
    """Write specs into etcd, as Gazette's brokers do, and wait until the broker serves the journals."""
    puts = [Put(Layout(settings.etcd_prefix).item_key(each.name), each.SerializeToString()) for each in specs]
    async with EtcdCoordinator(settings.etcd) as coordinator:
        done = await coordinator.txn([], puts)
    await process.broker.keyspace.wait_for_revision(done.header.revision)


async def delete(process: BrokerProcess, settings: BrokerSettings, journal: str) -> None:
    """Remove a journal from etcd, and wait until the broker has given it up."""
    async with EtcdCoordinator(settings.etcd) as coordinator:
        await coordinator.txn([], [Delete(Layout(settings.etcd_prefix).item_key(journal))])
    resolver = process.broker.resolver
    await eventually(lambda: all(each.journal != journal for each in resolver.local_replicas))


def folder_of(settings: BrokerSettings, journal: str) -> Path:
    assert settings.file_root is not None
    return settings.file_root / "frags" / journal


async def write(client: RawClient, settings: BrokerSettings, journal: str, count: int, byte: bytes) -> bytes:
    """Append until this many fragments are stored in the journal's own folder, and a bit more. Return the content."""
    for piece in [byte * 1500] * count + [b"tail"]:
        assert (await client.append_when_ready(journal, piece)).status == pb.OK
    await eventually(lambda: len(list(folder_of(settings, journal).glob("0*"))) >= count)
    return byte * 1500 * count + b"tail"


async def test_neither_journal_shows_or_counts_the_others_fragments(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    await put(process, broker_settings, stored(spec, OUTER), stored(spec, INNER))
    assert (await client.append_when_ready(OUTER, b"first")).status == pb.OK
    inner = await write(client, broker_settings, INNER, 4, b"i")
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content(OUTER) == b"first"
    outer = b"first" + await write(client, broker_settings, OUTER, 2, b"o")
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content(OUTER) == outer
    assert await client.content(INNER) == inner
    again = await client.append(OUTER, b"more")
    assert (again.status, again.commit.begin) == (pb.OK, len(outer))
    assert (await client.append(INNER, b"more")).commit.begin == len(inner)
    fragments = await client.stub.ListFragments(pb.FragmentsRequest(journal=OUTER))
    assert {each.spec.path_postfix for each in fragments.fragments} == {""}
    assert [each.spec.begin for each in fragments.fragments] == [0, 5, 1505, 3005]
    assert not list((broker_settings.data_dir / "spools").rglob("set-aside"))


async def test_retention_keeps_the_other_journals_fragments(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    brief = stored(spec, OUTER)
    brief.fragment.retention.FromSeconds(HOUR)
    await put(process, broker_settings, brief, stored(spec, INNER))
    inner = await write(client, broker_settings, INNER, 4, b"i")
    await write(client, broker_settings, OUTER, 2, b"o")
    then = time.time() - 2 * HOUR
    for path in stored_files(broker_settings, OUTER):
        os.utime(path, (then, then))
    await eventually(lambda: len(list(folder_of(broker_settings, OUTER).glob("0*"))) == 1)
    await listed_again(process.broker.resolver.local_replicas)
    assert len(stored_files(broker_settings, INNER)) == 4
    assert await client.content(INNER) == inner


async def test_fragments_of_a_deleted_journal_stay_separate(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    await put(process, broker_settings, stored(spec, OUTER), stored(spec, INNER))
    await write(client, broker_settings, INNER, 4, b"i")
    outer = await write(client, broker_settings, OUTER, 2, b"o")
    await delete(process, broker_settings, INNER)
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content(OUTER) == outer
    assert (await client.append(OUTER, b"more")).status == pb.OK
    # They are not the beginning of a journal that is created after the deletion either.
    left = stored(spec, "left/part/one")
    assert (await client.apply(left)).status == pb.OK
    await write(client, broker_settings, left.name, 2, b"i")
    await delete(process, broker_settings, left.name)
    assert (await client.apply(stored(spec, "left/part"))).status == pb.OK
    assert (await client.append_when_ready("left/part", b"first")).commit.begin == 0
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content("left/part") == b"first"


async def test_fragments_of_earlier_versions_without_markers_are_distinguished_and_marked(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    await put(process, broker_settings, stored(spec, OUTER), stored(spec, INNER))
    await write(client, broker_settings, INNER, 2, b"i")
    outer = await write(client, broker_settings, OUTER, 2, b"o")
    markers = [folder_of(broker_settings, each) / MARKER for each in (OUTER, INNER)]
    for marker in markers:
        marker.unlink()
    await eventually(lambda: all(marker.exists() for marker in markers))
    assert await client.content(OUTER) == outer


async def test_fragments_under_earlier_templates_still_belong_to_the_journal(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    written = b""
    for template in ("eu", "date=2024-01-01/hour={{ .Spool.Begin }}", "", "other"):
        made = stored(spec, OUTER, path_postfix_template=template)
        change = pb.ApplyRequest.Change(upsert=made, expect_mod_revision=-1)
        assert (await client.stub.Apply(pb.ApplyRequest(changes=[change]))).status == pb.OK
        count = len(stored_files(broker_settings, OUTER))
        for _ in range(2):
            assert (await client.append_when_ready(OUTER, template.encode()[:1] * 1500 or b"-" * 1500)).status == pb.OK
            written += template.encode()[:1] * 1500 or b"-" * 1500
        await eventually(lambda count=count: len(stored_files(broker_settings, OUTER)) > count)  # type: ignore[misc]
    postfixes = {fragment.path_postfix for fragment in stored_files(broker_settings, OUTER).values()}
    assert {"eu", "", "other"} < postfixes
    assert len(postfixes) >= 4
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content(OUTER) == written
    (replica,) = process.broker.resolver.local_replicas
    assert len([entry for entry in replica.index.entries if entry.content is None]) >= 4, "read from the store alone"


async def test_a_postfix_that_is_another_journals_name_is_not_used(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    clashing = stored(spec, OUTER, path_postfix_template="eu/part")
    await put(process, broker_settings, clashing, stored(spec, INNER))
    outer = await write(client, broker_settings, OUTER, 2, b"o")
    inner = await write(client, broker_settings, INNER, 2, b"i")
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content(OUTER) == outer
    assert await client.content(INNER) == inner
    # The same for a deleted journal that has left its marker.
    await delete(process, broker_settings, INNER)
    await listed_again(process.broker.resolver.local_replicas)
    more = await write_on(client, broker_settings, OUTER, 4, b"p")
    await listed_again(process.broker.resolver.local_replicas)
    assert await client.content(OUTER) == outer + more


async def write_on(client: RawClient, settings: BrokerSettings, journal: str, total: int, byte: bytes) -> bytes:
    """Append more, until the journal's own folder has this many fragments. Return the appended content."""
    written = b""
    while len(list(folder_of(settings, journal).glob("0*"))) < total:
        assert (await client.append(journal, byte * 1500)).status == pb.OK
        written += byte * 1500
        await asyncio.sleep(0.05)
    return written


async def test_local_files_outlive_a_listing_that_only_covers_their_offsets(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    # The listed fragments are of another cluster that shares the store, and whose brokers write no markers.
    process, client = broker
    assert (await client.apply(stored(spec, "theirs/journal"))).status == pb.OK
    await write(client, broker_settings, "theirs/journal", 3, b"t")
    fragment = {"length": 1 << 20, "refresh_interval": 1}
    ours = spec(OUTER, stores=("file:///frags/",), fragment=fragment)
    assert (await client.apply(ours)).status == pb.OK
    assert (await client.append_when_ready(OUTER, b"o" * 4000)).status == pb.OK
    (replica,) = [each for each in process.broker.resolver.local_replicas if each.journal == OUTER]
    store = process.broker.stores.get("file:///frags/")

    async def fail(*_: object) -> None:
        raise StoreError("no")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "put", fail)
        ours.fragment.length = 1024
        change = pb.ApplyRequest.Change(upsert=ours, expect_mod_revision=-1)
        assert (await client.stub.Apply(pb.ApplyRequest(changes=[change]))).status == pb.OK
        assert (await client.append(OUTER, b"o" * 100)).status == pb.OK
        await eventually(lambda: replica.index.sealed_files())
        theirs = folder_of(broker_settings, "theirs/journal")
        await asyncio.to_thread(shutil.copytree, theirs, folder_of(broker_settings, INNER))
        (folder_of(broker_settings, INNER) / MARKER).unlink()
        await listed_again([replica])
        (sealed,) = replica.index.sealed_files()
        assert sealed.content.path.exists()
    # With a marker, the fragments belong to the other journal again.
    (folder_of(broker_settings, INNER) / MARKER).touch()
    await listed_again([replica])
    assert await client.content(OUTER) == b"o" * 4100


async def test_a_token_for_one_journal_cannot_read_the_other(broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    keys = Keys.parse(base64.b64encode(b"k" * 32).decode())
    secret = SecretStr(base64.b64encode(b"k" * 32).decode())

    def token(selector: str) -> BearerToken:
        now = SystemClock().now()
        claims = Claims(Capability.ALL, labels.parse_selector(selector), now - 10, now + 600)
        return BearerToken(Secret(sign(claims, keys)))

    settings = broker_settings.model_copy(update={"auth_keys": secret})
    async with BrokerProcess(settings) as process, JournalClient(process.endpoint, auth=keys) as everything:
        await put(process, settings, stored(spec, OUTER), stored(spec, INNER))
        for piece in [b"secret" * 300] * 3 + [b"tail"]:
            await everything.append(INNER, piece)
        await eventually(lambda: len(stored_files(settings, INNER)) == 3)
        await everything.append(OUTER, b"open")
        await listed_again(process.broker.resolver.local_replicas)
        async with JournalClient(process.endpoint, auth=token(f"name={OUTER}"), retry_timeout=1.0) as client:
            assert await client.head(OUTER) == 4
            assert [chunk.content async for chunk in client.read(OUTER, 0)] == [b"open"]
            assert [each.fragment.end for each in await client.fragments(OUTER)] == [4]
            with pytest.raises(JournalNotFound):
                await client.head(INNER)
        # A refusal because of a nested name does not reveal journals that the token does not cover.
        async with JournalClient(process.endpoint, auth=token("name=shop")) as client:
            change = pb.ApplyRequest.Change(upsert=stored(spec, "shop"))
            with pytest.raises(RpcFailed, match="a journal that the token does not cover") as refused:
                await client.apply([change])
            assert "events" not in str(refused.value)
