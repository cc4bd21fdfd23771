"""Journals whose fragments are in an S3 server, from the append to the read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coranto.audit import audit_journal
from coranto.client import ClientConfig, JournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import StoreUnhealthy
from coranto.fragments.stores import StoreRegistry
from coranto.wire import protocol_pb2 as pb
from tests.servers.s3 import ANY_KEY, S3Server

pytestmark = pytest.mark.timeout(900)

BUCKET = "journals"
LEASE_S = 60
PIECES = [f"{number:05}".encode() * 2000 for number in range(16)]
CONTENT = b"".join(PIECES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, server: S3Server) -> None:
    for name, value in (ANY_KEY.environment | server.environment).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture
async def client(server: S3Server, data_dir: Path) -> AsyncIterator[JournalClient]:
    environment = ANY_KEY.environment | server.environment
    with EmbeddedCluster(data_dir, lease_seconds=LEASE_S, environment=environment, etcd_fsync=False) as cluster:
        async with JournalClient.of(ClientConfig(cluster.info.endpoint)) as client:
            yield client


def spec_of(name: str, store: str, codec: pb.CompressionCodec.ValueType) -> pb.JournalSpec:
    spec = pb.JournalSpec(name=name, replication=1)
    spec.fragment.length = 32 << 10
    spec.fragment.compression_codec = codec
    spec.fragment.refresh_interval.seconds = 1
    spec.fragment.stores.append(store)
    return spec


async def persisted_up_to(client: JournalClient, journal: str) -> int:
    """Return the end of the persisted content, once only the current spool is not persisted."""
    async with asyncio.timeout(180):
        while True:
            fragments = [info.fragment for info in await client.fragments(journal)]
            waiting = [each for each in fragments if not each.backing_store]
            if len(waiting) <= 1:
                return max(each.end for each in fragments if each.backing_store)
            await asyncio.sleep(0.05)


async def read(client: JournalClient, journal: str, *, direct: bool) -> bytes:
    return b"".join([chunk.content async for chunk in client.read(journal, direct=direct)])


def signed_gets(server: S3Server) -> int:
    """Return the number of fetches by a signed URL."""
    lines = server.process.log.read_text().splitlines()
    return sum("GET /" in line and "X-Amz-Signature=" in line for line in lines)


@pytest.mark.parametrize("codec", [pb.GZIP, pb.GZIP_OFFLOAD_DECOMPRESSION])
async def test_append_persist_and_read(
    client: JournalClient, server: S3Server, codec: pb.CompressionCodec.ValueType
) -> None:
    journal = f"s3/codec-{codec}"
    store = server.store_url(BUCKET, "p/", storageClass="STANDARD_IA", sse="AES256")
    await client.store_health(store, check_delete=True, check_delete_prefix="health/")
    await client.apply([pb.ApplyRequest.Change(upsert=spec_of(journal, store, codec))])
    for piece in PIECES:
        await client.append(journal, piece)
    assert await persisted_up_to(client, journal) > len(CONTENT) // 2

    before = signed_gets(server)
    assert await read(client, journal, direct=False) == CONTENT
    assert signed_gets(server) == before
    assert await read(client, journal, direct=True) == CONTENT
    assert signed_gets(server) > before
    audit = await audit_journal(client, StoreRegistry(), journal, first_offset=0)
    assert audit.problems == []
    assert sum(bool(each.fragment.backing_store) for each in audit.fragments) >= 3
    (first, *_) = [info.fragment for info in await client.fragments(journal)]
    headers = server.headers(BUCKET, f"p/{first.content_path}")
    assert headers["x-amz-storage-class"] == "STANDARD_IA"
    assert headers["x-amz-server-side-encryption"] == "AES256"


async def test_a_broker_without_spools_serves_stored_content(
    client: JournalClient, server: S3Server, tmp_path: Path
) -> None:
    journal, store = "s3/handed-over", server.store_url(BUCKET, "q/")
    await client.apply([pb.ApplyRequest.Change(upsert=spec_of(journal, store, pb.ZSTANDARD))])
    for piece in PIECES:
        await client.append(journal, piece)
    end = await persisted_up_to(client, journal)
    # Another cluster with only the store: its broker lists the fragments, and continues after them.
    environment = ANY_KEY.environment | server.environment
    with EmbeddedCluster(tmp_path / "other", lease_seconds=LEASE_S, environment=environment, etcd_fsync=False) as other:
        async with JournalClient.of(ClientConfig(other.info.endpoint)) as successor:
            await successor.apply([pb.ApplyRequest.Change(upsert=spec_of(journal, store, pb.ZSTANDARD))])
            result = await successor.append(journal, b"more", offset=end)
            assert result.begin == end
            for direct in (False, True):
                assert await read(successor, journal, direct=direct) == CONTENT[:end] + b"more"


async def test_a_missing_bucket_is_reported(client: JournalClient, server: S3Server) -> None:
    with pytest.raises(StoreUnhealthy, match="no such bucket"):
        await client.store_health(server.store_url("elsewhere"))
