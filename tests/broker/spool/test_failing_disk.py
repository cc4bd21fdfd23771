"""Real brokers on disks that are full or fail: the clients' errors, and how the journal continues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio
import pytest

from coranto.client import JournalClient
from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Fsync
from tests.broker.running import FaultyDisk, RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FaultyDisk:
    disk = FaultyDisk()
    monkeypatch.setattr("coranto_broker.server.process.LocalDisk", lambda: disk)
    return disk


@pytest.mark.parametrize("full", [".content", ".commits"])
@pytest.mark.parametrize("policy", [Fsync.NEVER, Fsync.COMMIT])
async def test_an_append_on_a_full_disk_reports_that_nothing_was_applied(
    broker_settings: BrokerSettings, spec: MakeSpec, disk: FaultyDisk, full: str, policy: Fsync
) -> None:
    settings = broker_settings.model_copy(update={"fsync": policy})
    async with running_broker(settings) as (process, client):
        await create(client, spec())
        assert (await client.append(J, b"before")).status == pb.OK
        disk.full = full
        for chunks in ((b"small",), (b"streamed",) * 20, (b"x" * (1 << 17),)):
            with pytest.raises(grpc.aio.AioRpcError, match="disk is full, and nothing was applied") as refused:
                await client.append(J, *chunks)
            assert refused.value.code() is grpc.StatusCode.ABORTED
        both = await asyncio.gather(*(client.append(J, b"group") for _ in range(8)), return_exceptions=True)
        assert {each.code() for each in both if isinstance(each, grpc.aio.AioRpcError)} == {grpc.StatusCode.ABORTED}
        async with JournalClient(process.endpoint, retry_timeout=0.2) as ours:
            with pytest.raises(Unavailable, match="disk is full, and nothing was applied"):
                await ours.append(J, b"through the client")
        disk.full = None
        assert (await client.append_when_ready(J, b" after")).commit.begin == len(b"before")
        assert await client.content(J) == b"before after"


@pytest.mark.parametrize("failing", [".content", ".commits"])
async def test_a_journal_continues_by_itself_after_a_failed_sync(
    broker_settings: BrokerSettings, spec: MakeSpec, disk: FaultyDisk, failing: str
) -> None:
    async with running_broker(broker_settings.model_copy(update={"fsync": Fsync.COMMIT})) as (process, client):
        await create(client, spec())
        assert (await client.append(J, b"kept ")).status == pb.OK
        disk.failing = failing
        with pytest.raises(grpc.aio.AioRpcError, match="cannot write"):
            await client.append(J, b"unknown ")

        async def is_refused() -> bool:
            try:
                await client.append(J, b"refused ")
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE and "this broker's disk fails" in str(
                    error.details()
                )
            return False

        await eventually(is_refused)
        assert process.broker.metrics.disk_failures._value.get() >= 1
        disk.failing = None
        await eventually(lambda: works(client))
        content = await client.content(J)
        assert content.startswith(b"kept ")
        assert content.removeprefix(b"kept ").removeprefix(b"unknown ") == b"after "
        assert "distrusted" not in {path.name for path in broker_settings.data_dir.rglob("*")}
    async with running_broker(broker_settings) as (_, client):
        assert (await client.append_when_ready(J, b"again")).status == pb.OK
        assert await client.content(J) == content + b"again"


async def works(client: RawClient) -> bool:
    try:
        return (await client.append(J, b"after ")).status == pb.OK
    except grpc.aio.AioRpcError:
        return False


async def test_content_that_an_interval_could_not_sync_is_kept(
    broker_settings: BrokerSettings, spec: MakeSpec, disk: FaultyDisk
) -> None:
    settings = broker_settings.model_copy(update={"fsync": Fsync.INTERVAL, "fsync_interval": 0.05})
    async with running_broker(settings) as (process, client):
        await create(client, spec())
        assert (await client.append(J, b"acknowledged ")).status == pb.OK
        disk.failing = ".content"

        async def refused() -> bool:
            try:
                await client.append(J, b"more ")
            except grpc.aio.AioRpcError:
                return True
            return False

        await eventually(refused)
        disk.failing = None
        await eventually(lambda: works(client))
        content = await client.content(J)
        assert content.startswith(b"acknowledged ")
        assert content.endswith(b"after ")
        assert set(content.removeprefix(b"acknowledged ").removesuffix(b"after ").split()) <= {b"more"}
        assert process.broker.metrics.disk_failures._value.get() >= 1
