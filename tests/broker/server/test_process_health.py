"""A broker's reports on its condition: /metrics, /ready and /live."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import structlog

from coranto.client.config import ClientConfig
from coranto.client.connection import Connection
from coranto.effects import LocalDisk
from coranto.wire import protocol_pb2 as pb
from coranto_broker.handlers.heads import VERSION
from coranto_broker.priority_limiter import PriorityLimiter
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import RawClient, create, eventually, running_broker

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


@pytest.fixture
def watched(broker_settings: BrokerSettings) -> BrokerSettings:
    return broker_settings.model_copy(update={"metrics_port": 0})


async def get(process: BrokerProcess, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{process.metrics_endpoint}{path}") as response:
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else await response.text()


async def test_a_broker_that_serves_is_ready_and_alive(watched: BrokerSettings, spec: MakeSpec) -> None:
    async with running_broker(watched) as (process, client):
        assert await get(process, "/live") == (200, {"alive": True})
        well = {"started": True, "lease": True, "announced": True, "staying": True, "spools": True}
        assert await get(process, "/ready") == (200, {"ready": True, "checks": well})
        await create(client, spec())
        await client.append(J, b"content")
        status, text = await get(process, "/metrics")
        assert status == 200
        assert "coranto_append_bytes_total 7.0" in text
        assert 'coranto_appends_total{outcome="finished"}' in text
        for line in (
            f'coranto_broker_info{{fsync="never",id="broker-0",version="{VERSION}",zone="local"}} 1.0',
            "coranto_journals 1.0",
            "coranto_fragments_pending 0.0",
            'coranto_calls{method="Append"} 0.0',
        ):
            assert line in text
        assert "process_open_fds" in text
        assert "coranto_tasks" in text
        assert (await get(process, "/else"))[0] == 404


async def test_a_broker_without_its_lease_or_exiting_is_not_ready_but_alive(watched: BrokerSettings) -> None:
    async with running_broker(watched) as (process, _):
        process.session.lost.set()
        status, body = await get(process, "/ready")
        assert (status, body["checks"]["lease"]) == (503, False)
        process.session.lost.clear()
        await process.exit_gracefully()
        status, body = await get(process, "/ready")
        assert (status, body["ready"], body["checks"]["staying"]) == (503, False, False)
        assert (await get(process, "/live"))[0] == 200


async def test_a_broker_that_waits_for_its_old_lease_is_alive_and_not_ready(watched: BrokerSettings) -> None:
    async with running_broker(watched) as (first, _):
        other = BrokerProcess(watched.model_copy(update={"data_dir": watched.data_dir / "other"}))
        starting = asyncio.ensure_future(other.__aenter__())
        await eventually(lambda: bool(other.metrics_endpoint))
        assert (await get(other, "/ready"))[0] == 503
        assert (await get(other, "/live"))[0] == 200
        assert not starting.done()
        await first.broker.coordinator.lease_revoke(first.session.lease)
        await asyncio.wait_for(starting, 60)
        await eventually(lambda: all(other.readiness().values()))
        await other.__aexit__()
        # The port is freed when the process ends.
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(other, "/live")


async def test_log_entries_of_a_call_name_its_journal(broker: tuple[BrokerProcess, RawClient], spec: MakeSpec) -> None:
    _, client = broker
    with structlog.testing.capture_logs() as logs:
        await create(client, spec())
        for offset in (-5, 1 << 40):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.append(J, b"x", offset=offset)
        with pytest.raises(grpc.aio.AioRpcError):
            await client.append_messages(pb.AppendRequest(journal=J), pb.AppendRequest(content=b"x"))
    (failed,) = [entry for entry in logs if entry["event"] == "call.failed" and "EOF" in entry["error"]]
    assert (failed["method"], failed["journal"], failed["code"]) == ("Append", J, "INVALID_ARGUMENT")
    assert "client_name" not in failed
    (started,) = [entry for entry in logs if entry["event"] == "replica.starting"]
    assert started["journal"] == J


async def test_log_entries_of_a_call_name_its_client(broker: tuple[BrokerProcess, RawClient], spec: MakeSpec) -> None:
    process, client = broker
    await create(client, spec())
    connection = Connection(ClientConfig(process.endpoint, name="nightly/orders"))
    with structlog.testing.capture_logs() as logs:
        with pytest.raises(grpc.aio.AioRpcError):
            await connection.stub.Append(iter([pb.AppendRequest(journal=J), pb.AppendRequest(content=b"x")]))
    await connection.close()
    [failed] = [entry for entry in logs if entry["event"] == "call.failed"]
    assert failed["client_name"] == "nightly/orders"


async def test_a_broker_listens_on_ipv6(watched: BrokerSettings) -> None:
    both = watched.model_copy(update={"host": "::1", "http_port": 0})
    async with running_broker(both) as (process, client):
        for url in (process.endpoint, process.http_endpoint, process.metrics_endpoint):
            assert url.startswith("http://[::1]:")
        assert await client.listing()
        assert (await get(process, "/ready"))[0] == 200


async def test_without_a_port_there_is_no_endpoint(broker: tuple[BrokerProcess, RawClient]) -> None:
    process, _ = broker
    assert (process.metrics_endpoint, process.http_endpoint) == ("", "")


async def test_an_unreadable_spool_is_reported_and_retried_and_blocks_no_other(
    watched: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(LocalDisk):
        """A disk with a bad sector in a spool, for a while."""

        refuses = True

        def read(self, path: Path) -> bytes:
            if self.refuses and path.suffix == ".commits" and path.exists():
                raise OSError(errno.EIO, "input/output error", str(path))
            return super().read(path)

    async with running_broker(watched) as (_, client):
        await create(client, spec())
        assert (await client.append(J, b"content")).status == pb.OK
    disk = Refusing()
    monkeypatch.setattr("coranto_broker.server.process.LocalDisk", lambda: disk)
    monkeypatch.setattr("coranto_broker.replication.replica_host.PriorityLimiter", lambda: PriorityLimiter(1, most=1))
    async with running_broker(watched) as (process, client):
        await eventually(lambda: process.broker.replicas.unreadable_spools)
        status, found = await get(process, "/ready")
        assert (status, found["checks"]["spools"]) == (503, False)
        assert "coranto_spools_unreadable 1.0" in (await get(process, "/metrics"))[1]
        await create(client, spec(name="test/other"))
        assert (await client.append_when_ready("test/other", b"content")).status == pb.OK
        disk.refuses = False
        await eventually(lambda: not process.broker.replicas.unreadable_spools)
        assert (await client.append_when_ready(J, b", and more")).status == pb.OK
        assert await client.content(J) == b"content, and more"
        assert (await get(process, "/ready"))[0] == 200
        assert "coranto_spools_unreadable 0.0" in (await get(process, "/metrics"))[1]
