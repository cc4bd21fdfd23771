"""Brokers that find another etcd, prefix or name than their data directory says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coranto.coordination.etcd import Put
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.errors import MemberInUse
from coranto.wire import protocol_pb2 as pb
from coranto_broker.recovery import residence
from coranto_broker.recovery.identity import DirectoryUse, encode
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.recovery.wrong_etcds import CONTENT, MINE, refusal, write
from tests.broker.running import create, eventually, running_broker

pytestmark = pytest.mark.usefixtures("short_pauses")
MakeSpec = Callable[..., pb.JournalSpec]
J, K = "test/journal", "test/later"


def spools(settings: BrokerSettings) -> dict[str, bytes]:
    root = settings.data_dir / "spools"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


async def test_a_start_with_another_prefix_or_name_loses_nothing(
    broker_settings: BrokerSettings, child: BrokerChild, kept: pb.JournalSpec
) -> None:
    child.start()
    await write(child, kept)
    await child.expire()
    before = spools(broker_settings)
    other = broker_settings.etcd_prefix + "-other"
    message = await refusal(broker_settings, etcd_prefix=other)
    assert f"prefix {broker_settings.etcd_prefix}, and the prefix given is {other}" in message
    message = await refusal(broker_settings, id="another")
    assert "of broker local#broker-0, and the broker is to be local#another" in message
    assert spools(broker_settings) == before
    async with running_broker(broker_settings) as (_, client):
        assert (await client.append_when_ready(J)).registers == MINE
        assert await client.content(J) == CONTENT


async def test_a_directory_without_an_identity_is_checked_by_its_journals(
    broker_settings: BrokerSettings, child: BrokerChild, kept: pb.JournalSpec
) -> None:
    child.start()
    await write(child, kept)
    await child.expire()
    identity = broker_settings.data_dir / "identity.json"
    identity.unlink()
    message = await refusal(broker_settings, etcd_prefix=broker_settings.etcd_prefix + "-other")
    assert "none of the 1 journals that it holds" in message
    async with running_broker(broker_settings) as (_, client):
        await client.append_when_ready(J)
        assert await client.content(J) == CONTENT
    assert identity.exists()


async def test_a_copy_of_a_data_directory_does_not_serve(
    broker_settings: BrokerSettings, kept: pb.JournalSpec, tmp_path: Path
) -> None:
    settings = broker_settings.model_copy(update={"lease_seconds": 2.0, "exit_seconds": 0.5})
    copied = settings.model_copy(update={"data_dir": tmp_path / "copy"})
    async with running_broker(settings) as (original, client):
        await create(client, kept)
        shutil.copytree(settings.data_dir, copied.data_dir)
        with pytest.raises(MemberInUse, match="another process is alive as local#broker-0"):
            async with BrokerProcess(copied):
                raise AssertionError("it serves")
        assert not original.session.lost.is_set()
        assert (await client.append(J, CONTENT)).status == pb.OK
    # The original has been used since: the copy is outdated.
    async with running_broker(settings):
        pass
    assert "etcd's last use by this broker" in await refusal(copied)


async def test_a_broker_ends_if_another_process_uses_its_name(
    broker_settings: BrokerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residence, "CHECK_SECONDS", 0.05)
    async with running_broker(broker_settings) as (process, _):
        serving = asyncio.create_task(process.serve_until(asyncio.Event()))
        key = Layout(broker_settings.etcd_prefix).use_key(process.broker.member)
        async with EtcdCoordinator(broker_settings.etcd) as coordinator:
            await coordinator.txn([], [Put(key, encode(DirectoryUse("another")))])
        async with asyncio.timeout(60):
            assert await serving == 1


async def test_the_spool_of_a_deleted_journal_is_kept_for_a_while(
    broker_settings: BrokerSettings, kept: pb.JournalSpec
) -> None:
    async with running_broker(broker_settings) as (_, client):
        await create(client, kept)
        assert (await client.append(J, CONTENT)).status == pb.OK
        (listed,) = (await client.listing())[0].journals
        change = pb.ApplyRequest.Change(delete=J, expect_mod_revision=listed.mod_revision)
        assert (await client.stub.Apply(pb.ApplyRequest(changes=[change]))).status == pb.OK
        deleted = broker_settings.data_dir / "deleted"
        await eventually(lambda: list(deleted.rglob("deleted.json")))
        assert [path.read_bytes() for path in deleted.rglob("*.content")] == [CONTENT]
        assert spools(broker_settings) == {}
        await create(client, kept)  # It begins at 0, as its store is empty.
        assert (await client.append(J, b"new")).commit.begin == 0
