"""Journals whose names nest, as Gazette's brokers let them: real brokers keep what is stored of them apart."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from coranto.coordination.etcd import EtcdCoordinator, Put
from coranto.coordination.layout import Layout
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.testing import RawClient, eventually, stored_files

pytestmark = pytest.mark.integration

OUTER, INNER = "shop/events", "shop/events/eu"
HOUR = 3600
MakeSpec = Callable[..., pb.JournalSpec]


def stored(spec: MakeSpec, name: str, **fields: Any) -> pb.JournalSpec:
    """A journal of small fragments, listed every second."""
    return spec(name, stores=("file:///frags/",), fragment={"length": 1024, "refresh_interval": 1, **fields})


async def put(process: BrokerProcess, settings: BrokerSettings, *specs: pb.JournalSpec) -> None:
    """Write specs into etcd, as Gazette's brokers do, and wait until the broker serves the journals."""
    puts = [Put(Layout(settings.etcd_prefix).item_key(each.name), each.SerializeToString()) for each in specs]
    async with EtcdCoordinator(settings.etcd) as coordinator:
        done = await coordinator.txn([], puts)
    await process.broker.keyspace.wait_for_revision(done.header.revision)


async def write(client: RawClient, settings: BrokerSettings, journal: str, count: int, byte: bytes) -> bytes:
    """Append so much that so many fragments are stored in the journal's own folder, and a bit more."""
    for piece in [byte * 1500] * count + [b"tail"]:
        assert (await client.append_when_ready(journal, piece)).status == pb.OK
    folder = settings.file_root / "frags" / journal  # type: ignore[operator]
    await eventually(lambda: len(list(folder.glob("0*"))) == count)
    return byte * 1500 * count + b"tail"


async def listed_again(process: BrokerProcess) -> None:
    """Return once all journals' stores have been listed twice more."""
    before = {each: each._refreshed_at for each in process.broker.resolver.local_replicas}
    await eventually(lambda: all(each._refreshed_at > at + 1 for each, at in before.items()))


async def test_neither_shows_nor_counts_what_the_other_has(
    broker: tuple[BrokerProcess, RawClient], broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    await put(process, broker_settings, stored(spec, OUTER), stored(spec, INNER))
    inner = await write(client, broker_settings, INNER, 4, b"i")
    outer = await write(client, broker_settings, OUTER, 2, b"o")
    await listed_again(process)
    assert await client.content(OUTER) == outer
    assert await client.content(INNER) == inner
    again = await client.append(OUTER, b"more")
    assert (again.status, again.commit.begin) == (pb.OK, len(outer))
    assert (await client.append(INNER, b"more")).commit.begin == len(inner)
    fragments = await client.stub.ListFragments(pb.FragmentsRequest(journal=OUTER))
    assert {each.spec.path_postfix for each in fragments.fragments} == {""}
    assert [each.spec.begin for each in fragments.fragments] == [0, 1500, 3000]
    assert not list((broker_settings.data_dir / "spools").rglob("set-aside"))


async def test_retention_leaves_the_others_fragments_alone(
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
    await eventually(lambda: len(list((broker_settings.file_root / "frags" / OUTER).glob("0*"))) == 1)
    await listed_again(process)
    assert len(stored_files(broker_settings, INNER)) == 4
    assert await client.content(INNER) == inner
