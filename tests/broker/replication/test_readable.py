"""Visible content: content that every replica of the journal has, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.effects import LocalDisk
from coranto.errors import InvalidInput
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments import index
from coranto_broker.fragments.index import FragmentIndex
from coranto_broker.replication.peers import PeerStream
from coranto_broker.replication.replica import Replica
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.recovery import recover
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import empty_at
from tests.broker.running import ManualClock, RawClient, create, running_broker

J = "test/journal"
NONE = pb.LabelSet()
MakeSpec = Callable[..., pb.JournalSpec]


# -------------------------------------------------------------------------------------------------- one replica alone


class Replicated:
    """A replica's spool and index, and the proposals of a primary that sends readable offsets."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.folder = SpoolFolder(folder_of(path, J, 1), J, 1, LocalDisk(), self.clock)
        self.index = FragmentIndex(self.clock)
        self.index.refresh([], 0.0)
        self.sealed: list[Sealed] = []
        self.spool = DurableSpool(self.folder, self, Fsync.NEVER)

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        self.index.spool_commit(fragment, content)

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.sealed.append(sealed)
        self.index.spool_complete(sealed)

    def spool_skip(self, offset: int) -> None:
        self.index.note_head(offset)

    def spool_ahead(self, end: int) -> None:
        self.index.spool_ahead(end)

    def spool_readable(self, end: int) -> None:
        self.index.spool_readable(end)

    def commit(self, content: bytes) -> None:
        self.spool.write(0, content)
        self.spool.propose(self.spool.next_fragment(), NONE, primary=False)

    def roll(self) -> None:
        """Roll, as the next primary does, which does not know the last readable offset."""
        self.spool.propose(empty_at(self.spool.fragment, self.spool.end, Codec.NONE), NONE, primary=False)

    async def visible(self, offset: int = 0) -> int:
        """Return the end of the content that readers at an offset get."""
        found = await self.index.query(offset, block=False)
        return found.entry.end if found.entry is not None else offset


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replicated:
    monkeypatch.setattr(index, "READABLE_TIMEOUT_SECONDS", 0.0)
    return Replicated(tmp_path)


async def test_commits_are_shown_as_far_as_every_replica_has_them(replica: Replicated) -> None:
    for content in (b"abc", b"def", b"ghi"):
        replica.commit(content)
    assert (await replica.visible(), replica.index.head) == (0, 9)
    replica.spool.publish_through(5)
    assert await replica.visible() == 3
    (shown,) = replica.index.entries
    assert shown.fragment == Fragment(J, 0, 3, sum_of(b"abc"), Codec.NONE)
    replica.spool.publish_through(6)
    assert await replica.visible() == 6
    replica.spool.publish_through(9)
    assert (await replica.visible(), replica.index.head) == (9, 9)


async def test_a_completed_fragment_waits_too(replica: Replicated) -> None:
    replica.commit(b"abc")
    replica.spool.publish_through(3)
    replica.commit(b"def")
    replica.roll()
    assert [sealed.readable for sealed in replica.sealed] == [False]
    replica.index.refresh([], 1.0)
    assert (await replica.visible(), await replica.visible(4), replica.index.head) == (3, 4, 6)
    assert replica.index.sealed_files() == replica.sealed
    replica.spool.publish_through(6)
    assert await replica.visible() == 6


@pytest.mark.parametrize("stored", [False, True])
async def test_a_completed_fragment_is_shown_or_dropped_once_it_is_decided(replica: Replicated, stored: bool) -> None:
    replica.commit(b"abc")
    replica.roll()
    (sealed,) = replica.sealed
    if stored:
        replica.index.stored(sealed, replace(sealed.fragment, backing_store="file:///", mod_time=1))
    else:
        replica.index.forget(sealed)
    assert (await replica.visible(), replica.index.head) == ((3, 3) if stored else (0, 0))


async def test_a_restart_remembers_the_offset_shown_to_readers(replica: Replicated) -> None:
    for content in (b"abc", b"def"):
        replica.commit(content)
        replica.spool.publish_through(replica.spool.end)
    replica.commit(b"ghi")
    found = recover(replica.folder)
    assert found.spool.end == 9
    assert found.shown == Fragment(J, 0, 6, sum_of(b"abcdef"), Codec.NONE)
    # Without another record, the next pulse writes it.
    replica.spool.publish_through(9)
    replica.spool.propose(replica.spool.fragment, NONE, primary=False)
    assert recover(replica.folder).shown == replica.spool.fragment


# ------------------------------------------------------------------------------------------------------- real brokers


@pytest.fixture
async def pair(broker_settings: BrokerSettings, spec: MakeSpec) -> AsyncIterator[tuple[Replica, RawClient, RawClient]]:
    """A journal with content on two brokers: yields the replica that is not primary, its client, and the primary's."""
    async with AsyncExitStack() as stack:
        running: list[tuple[BrokerProcess, RawClient]] = []
        for name in ("broker-0", "broker-1"):
            settings = broker_settings.model_copy(update={"id": name, "data_dir": broker_settings.data_dir / name})
            running.append(await stack.enter_async_context(running_broker(settings)))
        wanted = spec()
        wanted.replication = 2
        await create(running[0][1], wanted)
        route = running[0][0].broker.keyspace.state.route_of(J)
        if route.members[route.primary].suffix == "broker-1":
            running.reverse()
        (_, primary), (process, follower) = running
        assert (await primary.append(J, b"first")).status == pb.OK
        assert (await primary.append(J, b"second")).status == pb.OK
        yield process.broker.resolver.local_replicas[0], follower, primary


async def test_acknowledged_content_is_readable_immediately_from_any_replica(
    pair: tuple[Replica, RawClient, RawClient],
) -> None:
    replica, follower, primary = pair
    await follower.content(J, 5, do_not_proxy=True)
    for number in range(50):
        content = b"%d" % number * 10
        appended = await primary.append(J, content)
        # Neither read waits longer than a message takes, nor gets an older head.
        assert await follower.content(J, appended.commit.begin, do_not_proxy=True) == content
        (head,) = await follower.read(J, -1, do_not_proxy=True)
        assert head.write_head >= appended.commit.end
    end = appended.commit.end
    waiting = [asyncio.create_task(follower.content(J, end, block=True, end_offset=end + 600)) for _ in range(3)]
    await primary.append(J, b"x" * 600)
    async with asyncio.timeout(10):
        assert set(await asyncio.gather(*waiting)) == {b"x" * 600}
    assert replica.index.head == end + 600


async def test_a_replica_without_readable_offsets_shows_nothing_and_reports_the_head(
    pair: tuple[Replica, RawClient, RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As when the primary dies between the acknowledgements and the readable offset.
    replica, follower, primary = pair
    monkeypatch.setattr(index, "READABLE_TIMEOUT_SECONDS", 0.05)
    with monkeypatch.context() as silent:
        silent.setattr(PeerStream, "readable", lambda *_: None)
        appended = await primary.append(J, b"third")
    (answer,) = await follower.read(J, appended.commit.begin, do_not_proxy=True)
    assert (answer.status, answer.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, appended.commit.end)
    assert await follower.content(J, do_not_proxy=True) == b"firstsecond"
    blocked = asyncio.create_task(follower.content(J, 11, block=True, end_offset=16, do_not_proxy=True))
    await asyncio.sleep(0)
    await primary.append(J, b"fourth")  # Any later message from the primary shows it.
    async with asyncio.timeout(10):
        assert await blocked == b"third"
    assert await follower.content(J, do_not_proxy=True) == b"firstsecondthirdfourth"
    assert replica.index.head == 22


# ------------------------------------------------------------------------------------------------------- on the wire


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ReplicateRequest(readable=-1), "readable"),
        (pb.ReplicateRequest(readable=1, content_delta=1), "content_delta"),
        (pb.ReplicateRequest(readable=1, acknowledge=True), "acknowledge"),
        (pb.ReplicateRequest(readable=1, content=b"x"), "readable"),
        (pb.ReplicateRequest(), ""),
    ],
)
def test_messages_with_readable_offsets_contain_nothing_else(request_: pb.ReplicateRequest, field: str) -> None:
    validate(pb.ReplicateRequest(readable=7))
    with pytest.raises(InvalidInput) as refused:
        validate(request_)
    assert field in str(refused.value)


def test_parsers_of_gazette_skip_our_fields() -> None:
    # A parser skips unknown fields: here, one that knows only later ones.
    encoded = pb.ReplicateRequest(acknowledge=True, readable=0).SerializeToString()
    assert encoded == pb.ReplicateRequest(acknowledge=True).SerializeToString() + b"\xa0\x06\x00"
    assert pb.ReplicateResponse(takes_readable=True).SerializeToString() == b"\xa0\x06\x01"
