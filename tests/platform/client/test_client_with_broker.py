"""The clients against real brokers and a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coranto.client import AppendService, JournalClient, SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.errors import (
    EtcdTransactionFailed,
    InvalidInput,
    JournalNotFound,
    OffsetNotYetAvailable,
    RegisterMismatch,
    Unavailable,
    WrongAppendOffset,
)
from coranto.fragments.fragment import ZERO_SUM, sum_of
from coranto.labels import label_selector, label_set
from coranto.wire import protocol_pb2 as pb


def change(name: str, *, length: int = 1 << 20, revision: int = 0) -> pb.ApplyRequest.Change:
    spec = pb.JournalSpec(name=name, replication=1, labels=label_set(kind="test"))
    spec.fragment.length = length
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.stores.append("file:///")
    spec.fragment.refresh_interval.seconds = 1
    return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), brokers=2, etcd_fsync=False) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: EmbeddedCluster) -> AsyncIterator[JournalClient]:
    async with JournalClient(cluster.info.endpoint, file_root=cluster.info.file_root) as client:
        yield client


@pytest.fixture
async def journal(client: JournalClient, request: pytest.FixtureRequest) -> str:
    """A new journal whose fragments are complete at 64 KiB."""
    name = f"{request.node.name.replace('[', '/').replace(']', '')}/part-000"
    await client.apply([change(name, length=1 << 16)])
    # A barrier is retried until the journal has a primary; an appender is not.
    await client.append(name, b"")
    return name


async def read(client: JournalClient, journal: str, begin: int = 0, end: int = 0, *, direct: bool = True) -> bytes:
    content = bytearray()
    async for chunk in client.read(journal, begin, end_offset=end, direct=direct):
        assert chunk.offset == begin + len(content)
        content += chunk.content
    return bytes(content)


async def append_once(client: JournalClient, journal: str, content: bytes, offset: int) -> None:
    """Append at an offset even if answers are lost: the offset prevents a second application."""
    try:
        await client.append(journal, content, offset=offset, retry_unknown=True)
    except WrongAppendOffset:
        assert await client.head(journal) == offset + len(content)


async def persisted(client: JournalClient, journal: str, offset: int) -> None:
    """Wait until brokers report that content up to `offset` is persisted."""
    async with asyncio.timeout(120):
        while True:
            if any(item.persisted and item.fragment.end >= offset for item in await client.fragments(journal)):
                return
            await asyncio.sleep(0.1)


async def test_specs_are_applied_listed_and_deleted(client: JournalClient, journal: str) -> None:
    listing = await client.list(f"name={journal}, kind=test")
    assert listing.names == (journal,)
    info = listing.journals[0]
    assert info.mod_revision == info.create_revision > 0
    assert info.spec == change(journal, length=1 << 16).upsert
    with pytest.raises(EtcdTransactionFailed):
        await client.apply([change(journal)])
    await client.apply([change(journal, revision=info.mod_revision)])
    deletion = pb.ApplyRequest.Change(delete=journal, expect_mod_revision=-1)
    await client.apply([deletion])
    assert (await client.list(f"name={journal}")).names == ()
    with pytest.raises(JournalNotFound):
        await client.append(journal, b"late")


async def test_content_of_every_size_is_read_back(client: JournalClient, journal: str) -> None:
    expected = b""
    for size in (1, 100, (1 << 16) - 7, 1 << 20, 3_333_333, 0):
        content = os.urandom(size)
        result = await client.append(journal, content)
        assert (result.begin, result.end) == (len(expected), len(expected) + size)
        assert result.sum == (sum_of(content) if content else ZERO_SUM)
        expected += content
    assert await client.head(journal) == len(expected)
    assert await read(client, journal) == expected
    assert await client.read_all(journal, 50, 70_000) == expected[50:70_000]
    with pytest.raises(OffsetNotYetAvailable):
        await client.read_all(journal, 0, len(expected) + 1)
    with pytest.raises(OffsetNotYetAvailable):
        await read(client, journal, len(expected) + 1)


async def test_persisted_content_is_the_same_directly_and_through_brokers(
    cluster: EmbeddedCluster, client: JournalClient, journal: str
) -> None:
    expected = b"".join([b"line %07d\n" % number for number in range(30_000)])
    for begin in range(0, len(expected), 40_000):
        await client.append(journal, expected[begin : begin + 40_000])
    await persisted(client, journal, len(expected) - 200_000)
    async with JournalClient(cluster.info.endpoint) as without_files:
        for begin, end in ((0, 0), (1, 65_537), (100_000, 250_001)):
            wanted = expected[begin : end or None]
            assert await read(client, journal, begin, end) == wanted
            assert await read(client, journal, begin, end, direct=False) == wanted
            assert await read(without_files, journal, begin, end) == wanted


async def test_uncommitted_content_is_never_visible(client: JournalClient, journal: str) -> None:
    async with client.appender(journal) as append:
        await append.write(b"never seen")
    abandoned = client.appender(journal)
    with contextlib.suppress(Unavailable):  # A stalled append is rolled back as too slow.
        await abandoned.write(bytes(3 << 20))
    abandoned.abort()
    assert (await client.append(journal, b"seen")).begin == 0
    assert await read(client, journal) == b"seen"


async def test_registers_fence_writers(client: JournalClient, journal: str) -> None:
    def mine(author: str) -> pb.LabelSelector:
        return label_selector(include={"author": author}.items())

    await client.append(journal, b"1", union_registers=label_set(author="one"))
    await client.append(journal, b"2", check_registers=mine("one"), union_registers=label_set(author="two"))
    with pytest.raises(RegisterMismatch) as caught:
        await client.append(journal, b"3", check_registers=mine("one"))
    assert caught.value.registers == label_set(author="two")
    assert await read(client, journal) == b"12"


async def test_an_explicit_offset_makes_an_append_happen_once(client: JournalClient, journal: str) -> None:
    await client.append(journal, b"0123")
    await client.append(journal, b"4567", offset=4)
    with pytest.raises(WrongAppendOffset):
        await client.append(journal, b"4567", offset=4)
    assert await read(client, journal) == b"01234567"


async def test_any_broker_serves_any_journal(cluster: EmbeddedCluster, client: JournalClient) -> None:
    names = [f"spread/part-{part:03}" for part in range(6)]
    await client.apply([change(name) for name in names])
    for endpoint in cluster.info.endpoints:
        async with JournalClient(endpoint, file_root=cluster.info.file_root) as other:
            await asyncio.gather(*(other.append(name, name.encode()) for name in names))
    listing = await client.list("name:prefix=spread/")
    assert {info.route.members[info.route.primary].suffix for info in listing.journals} == {"broker-0", "broker-1"}
    for endpoint in cluster.info.endpoints:
        async with JournalClient(endpoint, file_root=cluster.info.file_root) as other:
            for name in names:
                assert await read(other, name) == name.encode() * 2


async def test_a_blocking_read_gets_later_appends(client: JournalClient, journal: str) -> None:
    await client.append(journal, b"before")
    async with asyncio.timeout(120), contextlib.aclosing(client.read(journal, -1, block=True)) as tail:
        waiting = asyncio.ensure_future(anext(tail))
        while not waiting.done():  # The read begins at the end of the journal when it starts.
            await client.append(journal, b"after ")
            await asyncio.wait([waiting], timeout=0.1)
        assert set((await waiting).content.split()) == {b"after"}
        end = (await client.append(journal, b"later")).end
        async for chunk in tail:
            if chunk.end == end:
                assert chunk.content.endswith(b"later")
                break


async def test_batched_appends(client: JournalClient, journal: str) -> None:
    async with AppendService(client, batch_bytes=10_000) as service:
        placed = [await service.append(journal, b"%05d\n" % number) for number in range(5000)]
    content = await read(client, journal)
    assert content == b"".join(b"%05d\n" % number for number in range(5000))
    assert [future.result().begin for future in placed] == list(range(0, 30_000, 6))


def test_the_blocking_client(cluster: EmbeddedCluster) -> None:
    name = "blocking/client"
    with SyncJournalClient(cluster.info.endpoint, file_root=cluster.info.file_root) as client:
        client.apply([change(name)])
        client.append(name, b"")  # A barrier is retried until the journal has a primary; an appender is not.
        content = os.urandom(5 << 20)
        with client.appender(name) as append:
            append.write(content)
            assert append.commit().end == len(content)
        assert b"".join(chunk.content for chunk in client.read(name)) == content
        with pytest.raises(InvalidInput):
            client.append("bad name", b"")


@pytest.mark.system
async def test_a_blocking_read_survives_a_killed_broker(tmp_path: Path) -> None:
    name = "killed/part-000"
    with EmbeddedCluster(tmp_path, etcd_fsync=False) as cluster:
        async with JournalClient(cluster.info.endpoint, file_root=cluster.info.file_root, retry_timeout=180) as client:
            await client.apply([change(name, length=1 << 12)])
            expected = b"".join(b"%08d\n" % number for number in range(3000))

            async def write() -> None:
                for begin in range(0, len(expected), 1000):
                    await append_once(client, name, expected[begin : begin + 1000], begin)
                    if begin in (7000, 17000):
                        await asyncio.to_thread(cluster.kill_broker, 0)

            async def tail() -> bytes:
                content = bytearray()
                async for chunk in client.read(name, 0, block=True, end_offset=len(expected)):
                    assert chunk.offset == len(content)
                    content += chunk.content
                return bytes(content)

            async with asyncio.timeout(240):
                found, _ = await asyncio.gather(tail(), write())
            assert found == expected
