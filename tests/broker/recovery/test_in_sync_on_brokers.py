"""Brokers that return too late, as processes: content that only they have is recovered or set aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.layout import Layout
from coranto.effects import LocalDisk, SystemClock
from coranto.fragments.fragment import Fragment
from coranto.labels import label_set
from coranto.wire import protocol_pb2 as pb
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool import in_sync
from coranto_broker.spool.durable_spool import Fsync, Sealed, SpoolFolder
from coranto_broker.spool.recovery import recover
from coranto_broker.spool.shared_file import SharedFile
from tests.broker.process import BrokerChild
from tests.broker.running import RawClient, eventually

pytestmark = pytest.mark.system

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]


class Children:
    """Broker processes by name. Only killed ones lose their lease, however slow the machine is."""

    def __init__(self, settings: BrokerSettings, folder: Path, exits: ExitStack) -> None:
        self.folder = folder
        self._settings = settings
        self._exits = exits
        self._children: dict[str, BrokerChild] = {}

    async def start(self, name: str) -> RawClient:
        if name not in self._children:
            own = {"id": name, "data_dir": self.folder / name, "lease_seconds": 60.0}
            self._children[name] = BrokerChild(self._settings.model_copy(update=own), self.folder / f"{name}.log")
            self._exits.callback(self._children[name].close)
        self._children[name].start()
        return await self._children[name].client()

    async def kill(self, name: str) -> None:
        """Kill a broker with `kill -9`, and end its lease."""
        await self._children[name].expire()

    def logged(self, name: str, event: str) -> bool:
        return bool(self._children[name].events(event))


@pytest.fixture
def children(broker_settings: BrokerSettings, tmp_path: Path) -> Iterator[Children]:
    with ExitStack() as exits:
        yield Children(broker_settings, tmp_path, exits)


async def members(client: RawClient) -> list[str]:
    """Return the ids of the brokers of the journal, the primary first."""
    (listing,) = await client.listing()
    route = listing.journals[0].route
    found = [member.suffix for member in route.members]
    return sorted(found, key=lambda name: route.primary < 0 or name != route.members[route.primary].suffix)


async def append(client: RawClient, content: bytes) -> pb.AppendResponse:
    """Append once the brokers agree on a primary."""
    while True:
        response = await client.append_when_ready(J, content)
        if response.status != pb.INDEX_HAS_GREATER_OFFSET:
            return response
        await asyncio.sleep(0.1)  # No event reports that the journal waits for its content.


async def test_a_journal_of_one_replica_waits_for_its_broker_and_then_continues(
    children: Children, spec: MakeSpec, broker_settings: BrokerSettings
) -> None:
    first = await children.start("broker-0")
    await first.apply(spec(J, stores=("file:///frags/",), fragment={"refresh_interval": 3600}))
    response = await first.append_when_ready(J, b"only here", union_registers=label_set(author="me"))
    assert response.status == pb.OK
    await children.kill("broker-0")
    second = await children.start("broker-1")

    async def taken_over() -> bool:
        return await members(second) == ["broker-1"]

    await eventually(taken_over)
    refused = await second.append_when_ready(J, b"too early")
    assert refused.status == pb.INDEX_HAS_GREATER_OFFSET
    assert (await second.append(J, b"guessed", offset=9)).status == pb.INDEX_HAS_GREATER_OFFSET

    await children.start("broker-0")
    async with asyncio.timeout(60):
        response = await append(second, b", and on")
    assert (response.status, response.commit.begin) == (pb.OK, 9)
    assert response.registers == label_set(author="me")
    assert children.logged("broker-0", "orphaned_spool.rescued")

    async def readable() -> bool:
        return await second.content(J) == b"only here, and on"

    await eventually(readable)  # A reader at a gap has the store listed again soon.
    async with EtcdCoordinator(broker_settings.etcd) as etcd:
        _, kv = await etcd.get(Layout(broker_settings.etcd_prefix).in_sync_key(J))
    assert kv is not None
    record = in_sync.decode(kv.value)
    assert (record.members, record.closed, record.epochs[-1].begin) == (("local#broker-1",), False, 9)


async def test_content_that_others_continued_without_is_set_aside(children: Children, spec: MakeSpec) -> None:
    clients = {name: await children.start(name) for name in ("broker-0", "broker-1", "broker-2")}
    made = spec(J, stores=("file:///frags/",))
    made.replication = 2
    await clients["broker-0"].apply(made)
    assert (await clients["broker-0"].append_when_ready(J, b"everybody's ")).status == pb.OK
    left, stayed = await members(clients["broker-0"])
    await children.kill(left)
    commit_alone(children.folder / left, b"nobody else's")
    other = clients[stayed]

    async def replaced() -> bool:
        return left not in await members(other)

    await eventually(replaced)
    async with asyncio.timeout(60):
        response = await append(other, b"the others'")
    assert (response.status, response.commit.begin) == (pb.OK, 12)
    again = await children.start(left)
    await eventually(lambda: list((children.folder / left).rglob("set-aside/*.content")))
    assert children.logged(left, "spool.set_aside")
    for client in (again, other):
        assert await client.content(J) == b"everybody's the others'"
    assert (await append(again, b", and on")).commit.begin == 23


def commit_alone(data: Path, content: bytes) -> None:
    """Have a spool of a stopped broker commit content that no other replica has received."""

    class NoObserver:
        def spool_commit(self, fragment: Fragment, content: SharedFile) -> None: ...
        def spool_complete(self, sealed: Sealed, *, primary: bool) -> None: ...
        def spool_skip(self, offset: int) -> None: ...
        def spool_ahead(self, end: int) -> None: ...
        def spool_readable(self, end: int) -> None: ...

    ((path,),) = [list(name.iterdir()) for name in (data / "spools").iterdir()]
    folder = SpoolFolder(path, J, int(path.name), LocalDisk(), SystemClock())
    spool = recover(folder).durable(folder, NoObserver(), Fsync.NEVER)
    assert spool.end == 12
    spool.write(0, content)
    spool.propose(spool.next_fragment(), spool.registers, primary=True)
    spool.close()
