"""Watched listings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc
import pytest

from coranto.client import JournalClient, Listing, SyncJournalClient
from coranto.client.watch import SnapshotBuilder
from coranto.errors import CorruptData, InvalidInput, NotAllowed, Unavailable
from coranto.labels import label_set
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker
from coranto.wire import protocol_pb2 as pb


async def names(snapshots: AsyncGenerator[Listing]) -> tuple[str, ...]:
    async with asyncio.timeout(120):
        listing = await anext(snapshots)
    return listing.names


async def test_every_change_of_matching_journals_is_reported(client: JournalClient, broker: FakeBroker) -> None:
    for part in range(5):
        broker.create(f"flights/part-{part:03}")
    five = tuple(f"flights/part-{part:03}" for part in range(5))
    async with contextlib.aclosing(client.watch("name:prefix=flights/")) as snapshots:
        assert await names(snapshots) == five
        broker.create("flights/part-005", labels=label_set(kind="late"))
        assert await names(snapshots) == (*five, "flights/part-005")
        revision = broker.journals["flights/part-005"].revision
        await client.apply([pb.ApplyRequest.Change(delete="flights/part-005", expect_mod_revision=revision)])
        assert await names(snapshots) == five
    assert broker.count("List") == 1


@pytest.mark.parametrize("failure", [Break.CUT, grpc.StatusCode.UNAVAILABLE, Break.END], ids=str)
async def test_a_watch_resumes_at_its_last_snapshot(
    client: JournalClient, broker: FakeBroker, failure: Break | grpc.StatusCode
) -> None:
    broker.create("a/journal")
    async with contextlib.aclosing(client.watch()) as snapshots:
        assert await names(snapshots) == ("a/journal",)
        broker.at(CallPoint.SNAPSHOT, failure)
        broker.create("b/journal")
        assert await names(snapshots) == ("a/journal", "b/journal")
    assert [request.HasField("watch_resume") for request in broker.requests] == [False, True]
    assert broker.requests[1].watch_resume.etcd.revision == 2


async def test_other_changes_are_not_reported_after_a_resume(client: JournalClient, broker: FakeBroker) -> None:
    broker.create("a/journal")
    async with contextlib.aclosing(client.watch("name:prefix=a/")) as snapshots:
        assert await names(snapshots) == ("a/journal",)
        broker.at(CallPoint.SNAPSHOT, Break.CUT)
        broker.create("b/journal")
        waiting = asyncio.ensure_future(names(snapshots))
        async with asyncio.timeout(120):
            await broker.reached(CallPoint.LIST, 2)
        broker.create("a/other")
        assert await waiting == ("a/journal", "a/other")


async def test_the_retry_timeout_applies_to_the_first_snapshot(broker: FakeBroker) -> None:
    await broker.refuse()
    async with (
        JournalClient(broker.endpoint, retry_timeout=0.1) as client,
        contextlib.aclosing(client.watch()) as snapshots,
    ):
        with pytest.raises(Unavailable):
            await names(snapshots)


async def test_refusals_end_a_watch(client: JournalClient, broker: FakeBroker) -> None:
    broker.at(CallPoint.LIST, pb.NOT_ALLOWED)
    with pytest.raises(NotAllowed):
        await names(client.watch())
    with pytest.raises(InvalidInput):
        await names(client.watch("(("))


def test_misplaced_messages_are_refused() -> None:
    header = pb.Header(route=pb.Route(primary=-1))
    header.etcd.CopyFrom(pb.Header.Etcd(cluster_id=1, member_id=2, revision=3, raft_term=4))
    entry = pb.ListResponse.Journal(spec=pb.JournalSpec(name="a/journal"))
    with pytest.raises(CorruptData, match="before its begin"):
        SnapshotBuilder().accept(pb.ListResponse())
    for second in (pb.ListResponse(header=header), pb.ListResponse(header=header, journals=[entry])):
        builder = SnapshotBuilder()
        assert builder.accept(pb.ListResponse(header=header)) is None
        with pytest.raises(CorruptData, match="no journals"):
            builder.accept(second)
    builder = SnapshotBuilder()
    builder.accept(pb.ListResponse(header=header, journals=[entry]))
    builder.accept(pb.ListResponse(journals=[entry]))
    complete = builder.accept(pb.ListResponse())
    assert complete is not None
    assert complete.names == ("a/journal", "a/journal")


@pytest.mark.parametrize("blank", [b"", bytes.fromhex("12060a0012001a00")], ids=["absent", "as Gazette writes it"])
def test_a_blank_header_counts_as_absent(blank: bytes) -> None:
    header = pb.Header(route=pb.Route(primary=-1))
    header.etcd.CopyFrom(pb.Header.Etcd(cluster_id=1, member_id=2, revision=3, raft_term=4))
    more = pb.ListResponse.FromString(blank)
    more.journals.add().spec.name = "a/journal"
    builder = SnapshotBuilder()
    for _ in range(2):
        assert builder.accept(pb.ListResponse(header=header)) is None
        assert builder.accept(more) is None
        complete = builder.accept(pb.ListResponse.FromString(blank))
        assert complete is not None
        assert complete.names == ("a/journal",)


async def test_watches_of_the_blocking_client(broker: FakeBroker) -> None:
    broker.create("a/journal")

    def watch() -> list[tuple[str, ...]]:
        found = []
        with SyncJournalClient(broker.endpoint) as client:
            for listing in client.watch():
                found.append(listing.names)
                if len(found) == 2:
                    break
                broker.create("b/journal")
        return found

    async with asyncio.timeout(120):
        assert await asyncio.to_thread(watch) == [("a/journal",), ("a/journal", "b/journal")]
