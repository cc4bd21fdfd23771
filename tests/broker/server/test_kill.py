"""`kill -9` of the only broker, at any moment: no acknowledged append is lost, and the next process continues."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
import pytest

from coranto import labels
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.fragments.fragment import parse_content_path
from coranto.fragments.stores import open_store
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from tests.broker.process import BrokerChild
from tests.broker.running import RawClient, eventually

pytestmark = pytest.mark.system

MakeSpec = Callable[..., pb.JournalSpec]


@pytest.fixture
def broker_settings(broker_settings: BrokerSettings) -> BrokerSettings:
    """With a lease that outlives a killed broker's absence, and no minimum rate for clients that stall."""
    return broker_settings.model_copy(update={"lease_seconds": 120.0, "min_append_rate": 0})


@pytest.fixture
def child(broker_settings: BrokerSettings, tmp_path: Path) -> Iterator[BrokerChild]:
    child = BrokerChild(broker_settings, tmp_path / "broker.log")
    child.start()
    try:
        yield child
    finally:
        child.close()


async def test_a_restarted_broker_reports_a_revision_that_its_peers_reach(
    broker_settings: BrokerSettings, child: BrokerChild, spec: MakeSpec
) -> None:
    """Gazette's peers answer a call only once a change of the prefix has brought them its revision.

    Records of the broker's use of etcd are outside the prefix, and a broker that resumes its lease changes nothing
    there.
    """
    client = await child.client()
    await client.apply(spec("test/journal"))
    await client.append_when_ready("test/journal", b"before")
    await client.close()
    child.end()
    child.start()
    client = await child.client()
    answer = await client.append_when_ready("test/journal", b"after")
    async with EtcdCoordinator(broker_settings.etcd) as coordinator:
        keys = (await coordinator.range(Layout(broker_settings.etcd_prefix).root)).kvs
    assert answer.header.etcd.revision <= max(kv.mod_revision for kv in keys)
    await client.close()


class Writer:
    """Appends unique content to a journal, one append at a time, and counts them in a register."""

    def __init__(self, journal: str, name: str, rng: random.Random) -> None:
        self.journal = journal
        self.name = name
        self.acknowledged: list[tuple[int, bytes]] = []
        self.unknown: list[bytes] = []
        self._count = 0
        self._rng = rng

    async def run(self, client: RawClient) -> None:
        """Append until the connection breaks."""
        try:
            while True:
                self._count += 1
                body = self._rng.randbytes(self._rng.choice([0, 10, 1000, 60_000])).hex()
                content = f"<{self.name} {self._count} {body}>".encode()
                self.unknown.append(content)
                half = len(content) // 2
                response = await client.append(
                    self.journal,
                    content[:half],
                    content[half:],
                    union_registers=labels.label_set({self.name: str(self._count)}),
                )
                assert response.status == pb.OK
                self.unknown.remove(content)
                self.acknowledged.append((response.commit.begin, content))
        except grpc.aio.AioRpcError:
            return


@pytest.mark.parametrize("fsync", ["never", "commit"])
async def test_no_acknowledged_append_is_lost(
    broker_settings: BrokerSettings, tmp_path: Path, spec: MakeSpec, fsync: str
) -> None:
    settings = broker_settings.model_copy(update={"fsync": type(broker_settings.fsync)(fsync)})
    child = BrokerChild(settings, tmp_path / "broker.log")
    rng = random.Random(7)
    stored, local = "test/stored", "test/local"
    fragment = {"length": 200_000, "compression_codec": pb.ZSTANDARD, "refresh_interval": 1}
    writers = [Writer(journal, f"writer-{n}", rng) for n, journal in enumerate([stored, stored, local, local])]
    child.start()
    try:
        for life in range(1, 5):
            client = await child.client()
            if life == 1:
                await client.apply(spec(stored, stores=("file:///frags/",), fragment=fragment), spec(local))
            for journal in (stored, local):
                await client.append_when_ready(journal)
                await check(client, journal, writers)
            if life == 4:
                await client.close()
                break
            goal = sum(len(writer.acknowledged) for writer in writers) + rng.randint(40, 120)
            tasks = [asyncio.create_task(writer.run(client)) for writer in writers]
            await eventually(lambda: sum(len(writer.acknowledged) for writer in writers) >= goal)  # noqa: B023
            child.end()
            await asyncio.gather(*tasks)
            await client.close()
            child.start()
    finally:
        child.close()
    assert len(child.events("lease.resumed")) == 3, "a killed broker resumes its lease"
    assert not child.events("spool.corrupt")


async def check(client: RawClient, journal: str, writers: list[Writer]) -> None:
    """Check that acknowledged content is at its offsets; the rest must be whole appends of unknown outcome."""
    whole = await client.content(journal)
    mine = [writer for writer in writers if writer.journal == journal]
    covered = 0
    for writer in mine:
        for begin, content in writer.acknowledged:
            assert whole[begin : begin + len(content)] == content
            covered += len(content)
        for content in list(writer.unknown):
            begin = whole.find(content)
            writer.unknown.remove(content)
            if begin >= 0:
                writer.acknowledged.append((begin, content))
                covered += len(content)
    assert covered == len(whole), "the journal holds bytes that no append wrote"
    (head,) = await client.read(journal, -1)
    assert head.write_head == len(whole)

    barrier = await client.append(journal)
    assert barrier.commit.begin == len(whole)
    registers = dict(labels.as_pairs(barrier.registers))
    for writer in mine:
        if writer.acknowledged:
            last = max(int(content.split()[1].rstrip(b">")) for _, content in writer.acknowledged)
            assert registers[writer.name] == str(last)


async def test_a_kill_during_an_append_rolls_it_back(
    child: BrokerChild, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    client = await child.client()
    await client.apply(spec())
    await client.append_when_ready("test/journal", b"committed")
    call = client.stub.Append()
    await call.write(pb.AppendRequest(journal="test/journal"))
    await call.write(pb.AppendRequest(content=b"x" * 100_000))
    spools = broker_settings.data_dir / "spools"
    await eventually(lambda: any(path.stat().st_size >= 100_000 for path in spools.rglob("*.content")))
    child.end()
    with pytest.raises(grpc.aio.AioRpcError):
        await call
    await client.close()
    child.start()
    client = await child.client()
    response = await client.append_when_ready("test/journal", b" and more")
    assert response.commit.begin == len(b"committed")
    assert await client.content("test/journal") == b"committed and more"
    await client.close()


async def test_sigterm_stores_and_exits(child: BrokerChild, broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    client = await child.client()
    await client.apply(spec(stores=("file:///frags/",)))
    await client.append_when_ready("test/journal", b"content")
    blocked = client.stub.Read(pb.ReadRequest(journal="test/journal", offset=7, block=True))
    reading = asyncio.ensure_future(blocked.read())
    assert child.end(signal.SIGTERM) == 0
    with pytest.raises(grpc.aio.AioRpcError):
        await reading
    await client.close()
    assert broker_settings.file_root is not None
    store = open_store("file:///frags/", file_root=broker_settings.file_root)
    (fragment,) = [each async for each in store.list("test/journal")]
    assert (fragment.begin, fragment.end) == (0, 7)
    assert await store.read(fragment) == b"content"
    assert parse_content_path("test/journal", fragment.content_name).end == 7

    child.start()
    client = await child.client()
    response = await client.append_when_ready("test/journal", b"!")
    assert response.commit.begin == 7
    await client.close()


async def test_two_brokers_cannot_share_a_data_directory(
    child: BrokerChild, broker_settings: BrokerSettings, tmp_path: Path
) -> None:
    await (await child.client()).close()
    second = BrokerChild(broker_settings, tmp_path / "second.log")
    second.start()
    try:
        assert await asyncio.to_thread(second.process.wait, 120) == 1
    finally:
        second.close()
    (event,) = second.events("member.cannot_run")
    assert "in use by process" in str(event["error"])
