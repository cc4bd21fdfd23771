"""Certificates that are replaced in the files of running brokers and clients, also by another authority."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from coranto.client import ClientConfig, JournalClient
from coranto.errors import Unavailable
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from tests.broker.running import eventually
from tests.platform.security.files import Files, authority

MakeSpec = Callable[..., pb.JournalSpec]


async def test_a_whole_cluster_moves_to_another_authority_without_a_restart(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are trusted at first; then all use certificates of the new one, which alone is trusted at the end.

    Existing connections continue; to use new ones, brokers are made to connect to each other again.
    """
    monkeypatch.setattr("coranto.security.certificates.CHECK_SECONDS", 0.0)
    old, new = authority(), authority()
    held = [Files(tmp_path / name) for name in ("one", "two", "client")]
    for files in held:
        files.issue(old, old)
    async with contextlib.AsyncExitStack() as stack:
        brokers = []
        for number, files in enumerate(held[:2]):
            own = {"id": f"broker-{number}", "data_dir": broker_settings.data_dir / str(number), **files.settings}
            settings = broker_settings.model_copy(update={**own, "http_port": 0})
            brokers.append(await stack.enter_async_context(BrokerProcess(settings)))
        config = ClientConfig(brokers[0].endpoint, tls=held[2].tls, route_cache=0)
        client = await stack.enter_async_context(JournalClient.of(config))
        replicated = spec("test/journal")
        replicated.replication = 2
        await client.apply([pb.ApplyRequest.Change(upsert=replicated)])
        end = (await client.append("test/journal", b"content")).end
        for issuer, trusted in ((old, (old, new)), (new, (old, new)), (new, (new,))):
            for files in held:
                files.issue(issuer, *trusted)
            for broker in brokers:
                broker.broker.peers._channels.get(broker.endpoint)  # As the next call would.
            # The same client continues, and so does one that reads only the current files.
            end = (await client.append("test/journal", b"content")).end
            async with JournalClient.of(ClientConfig(brokers[1].endpoint, tls=held[2].tls)) as late:
                assert await late.read_all("test/journal", 0, end) == b"content" * (end // 7)
            for broker in brokers:
                assert await http_status(broker, held[2]) == 404
        assert end == 28
        # Certificates of the old authority are refused, over gRPC and HTTP.
        gone = Files(tmp_path / "gone")
        gone.issue(old, new)
        for broker in brokers:
            async with JournalClient.of(ClientConfig(broker.endpoint, tls=gone.tls, retry_timeout=0.0)) as refused:
                with pytest.raises(Unavailable):
                    await refused.list()
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await http_status(broker, gone)


async def http_status(broker: BrokerProcess, files: Files) -> int:
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"{broker.http_endpoint}/no/journal") as answer:
            return answer.status


async def test_brokers_present_the_certificates_in_the_files_when_they_connect(
    broker_settings: BrokerSettings, spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connected broker connects again after the other has restarted, with its current certificate."""
    monkeypatch.setattr("coranto.security.certificates.CHECK_SECONDS", 0.0)
    old, new = authority(), authority()
    one, two, reader = (Files(tmp_path / name) for name in ("one", "two", "client"))
    for files in (one, two, reader):
        files.issue(old, old, new)
    first = broker_settings.model_copy(update={"id": "broker-0", **one.settings})
    second = broker_settings.model_copy(
        update={"id": "broker-1", "data_dir": broker_settings.data_dir / "1", **two.settings, "lease_seconds": 5.0}
    )
    async with contextlib.AsyncExitStack() as stack:
        staying = await stack.enter_async_context(BrokerProcess(first))
        client = await stack.enter_async_context(
            JournalClient.of(ClientConfig(staying.endpoint, tls=reader.tls, route_cache=0))
        )
        replicated = spec("test/journal")
        replicated.replication = 2
        async with BrokerProcess(second) as leaving:
            await client.apply([pb.ApplyRequest.Change(upsert=replicated)])
            assert (await client.append("test/journal", b"content")).end == 7
            port = int(leaving.endpoint.rpartition(":")[2])
        # The other returns, and trusts only the new authority.
        one.issue(new, old, new)
        two.issue(new, new)
        reader.issue(new, new)
        again = second.model_copy(update={"port": port})
        back = await stack.enter_async_context(BrokerProcess(again))
        await eventually(functools.partial(appended, client), 120)
        async with JournalClient.of(ClientConfig(back.endpoint, tls=reader.tls)) as other:
            assert (await other.read_all("test/journal", 0, 14)) == b"content" * 2


async def appended(client: JournalClient) -> bool:
    """Return True if both replicas accepted an append. A single one refuses it."""
    try:
        return (await client.append("test/journal", b"content", offset=7)).end == 14
    except Unavailable:
        return False
