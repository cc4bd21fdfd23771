"""Listing journals, applying changes, and listing fragments."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from coranto.client import JournalClient
from coranto.errors import (
    ApplyOutcomeUnknown,
    CorantoError,
    CorruptData,
    EtcdTransactionFailed,
    InvalidInput,
    JournalNotFound,
    NotAllowed,
    Outcome,
    RpcFailed,
    StoreUnhealthy,
    Unavailable,
)
from coranto.labels import label_set
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb


def change(name: str, revision: int = 0) -> pb.ApplyRequest.Change:
    spec = pb.JournalSpec(name=name, replication=1)
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.GZIP
    spec.fragment.refresh_interval.seconds = 30
    return pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision)


async def test_a_listing_is_assembled_from_its_messages(client: JournalClient, broker: FakeBroker) -> None:
    assert (await client.list()).journals == ()
    for part in range(5):
        broker.create(f"flights/part-{part:03}", labels=label_set(kind="even" if part % 2 == 0 else "odd"))
    listing = await client.list()
    assert listing.names == tuple(f"flights/part-{part:03}" for part in range(5))
    assert listing.header.etcd.revision == 6
    assert [info.create_revision for info in listing.journals] == [2, 3, 4, 5, 6]
    assert listing.journals[0].route.primary == 0
    assert (await client.list("kind=odd")).names == ("flights/part-001", "flights/part-003")


async def test_a_selector_is_validated_before_it_is_sent(client: JournalClient, broker: FakeBroker) -> None:
    with pytest.raises(InvalidInput):
        await client.list("(")
    assert broker.calls == []


async def test_a_listing_is_retried(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    broker.at(CallPoint.LIST, Break.CUT, grpc.StatusCode.UNAVAILABLE, pb.NO_JOURNAL_PRIMARY_BROKER)
    assert (await client.list()).names == ("test/journal",)
    assert broker.count("List") == 4
    broker.at(CallPoint.LIST, pb.NOT_ALLOWED)
    with pytest.raises(NotAllowed):
        await client.list()


async def test_closing_the_client_ends_its_calls(client: JournalClient, broker: FakeBroker) -> None:
    broker.at(CallPoint.LIST, Break.HANG)
    listing = asyncio.create_task(client.list())
    await broker.reached(CallPoint.LIST)
    await client.close()
    with pytest.raises(CorantoError, match="was closed"):
        await listing
    with pytest.raises(CorantoError, match="was closed"):
        await client.head("test/journal")


async def test_calls_without_a_listening_broker_are_unavailable(broker: FakeBroker) -> None:
    await broker.refuse()
    async with JournalClient(broker.endpoint, clock=HurriedClock(), retry_timeout=0.2) as client:
        with pytest.raises(Unavailable, match=broker.endpoint):
            await client.list()
        with pytest.raises(Unavailable, match="cannot connect") as caught:
            await client.apply([change("a/journal")])
        assert caught.value.outcome is Outcome.NOT_APPLIED


async def test_changes_are_applied_at_the_revision_they_expect(client: JournalClient, broker: FakeBroker) -> None:
    header = await client.apply([change("a/journal"), change("b/journal")])
    assert header.etcd.revision == 2
    with pytest.raises(EtcdTransactionFailed):
        await client.apply([change("c/journal"), change("a/journal")])
    await client.apply([change("a/journal", 2), pb.ApplyRequest.Change(delete="b/journal", expect_mod_revision=2)])
    assert set(broker.journals) == {"a/journal"}


async def test_invalid_changes_are_not_sent(client: JournalClient, broker: FakeBroker) -> None:
    wrong = change("a/journal")
    wrong.upsert.fragment.length = 3
    with pytest.raises(InvalidInput, match=r"fragment\.length"):
        await client.apply([wrong])
    assert broker.calls == []


@pytest.mark.parametrize("point", [CallPoint.APPLY, CallPoint.APPLIED], ids=lambda point: point.name)
async def test_a_lost_answer_to_an_apply_leaves_its_outcome_unknown(
    client: JournalClient, broker: FakeBroker, point: CallPoint
) -> None:
    broker.at(point, Break.CUT)
    with pytest.raises(ApplyOutcomeUnknown, match="List the journals") as caught:
        await client.apply([change("a/journal")])
    assert caught.value.outcome is Outcome.UNKNOWN
    assert broker.count("Apply") == 1
    assert ("a/journal" in broker.journals) == (point is CallPoint.APPLIED)


async def test_a_rejected_apply_is_an_error(client: JournalClient, broker: FakeBroker) -> None:
    broker.at(CallPoint.APPLY, grpc.StatusCode.UNAUTHENTICATED)
    with pytest.raises(RpcFailed, match=r"UNAUTHENTICATED.*CORANTO_AUTH_TOKEN"):
        await client.apply([change("a/journal")])


async def test_later_calls_see_applied_changes(client: JournalClient, broker: FakeBroker) -> None:
    header = await client.apply([change("a/journal")])
    await client.append("a/journal", b"content")
    assert await client.read_all("a/journal", 0, 7) == b"content"
    await client.head("a/journal")
    revisions = [request.min_etcd_revision for request in broker.requests[1:]]
    assert revisions == [header.etcd.revision] * 3


async def test_applied_revisions_are_tracked_for_each_etcd_cluster(
    client: JournalClient, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = broker._header()
    monkeypatch.setattr(broker, "_header", lambda: header)
    found = []
    for cluster, revision in ((1, 500), (1, 499), (2, 400), (2, 401)):  # The second cluster is a restored backup.
        header.etcd.cluster_id, header.etcd.revision = cluster, revision
        await client.apply([change("a/journal", -1)])
        found.append((client.applied_cluster, client.applied_revision))
    assert found == [(1, 500), (1, 500), (2, 400), (2, 401)]


async def test_fragments_of_all_pages_are_listed(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, tmp_path: Path
) -> None:
    assert list(await client.fragments("test/journal")) == []
    for _ in range(1001):
        await broker.write("test/journal", b"x")
        journal.roll()
    await broker.write("test/journal", b"persisted")
    journal.roll(tmp_path)
    await broker.write("test/journal", b"spool")
    broker.at(CallPoint.FRAGMENTS, pb.INSUFFICIENT_JOURNAL_BROKERS)
    found = await client.fragments("test/journal", signature_seconds=60)
    assert broker.count("ListFragments") == 4
    assert [item.fragment.begin for item in found] == [*range(1002), 1010]
    assert [item.persisted for item in found[-3:]] == [False, True, False]
    assert found[1001].signed_url.startswith("file:///")
    assert (await client.fragments("test/journal"))[1001].signed_url == ""


async def test_invalid_fragment_listings_are_refused(client: JournalClient, broker: FakeBroker) -> None:
    with pytest.raises(JournalNotFound):
        await client.fragments("no/such/journal")
    with pytest.raises(InvalidInput):
        await client.fragments("no/such/journal", begin_mod_time=5, end_mod_time=4)
    assert broker.count("ListFragments") == 1


async def test_an_answer_without_a_revision_is_refused(
    client: JournalClient, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "_header", pb.Header)
    with pytest.raises(CorruptData, match="violated the protocol"):
        await client.list()
    with pytest.raises(CorruptData, match="violated the protocol"):
        await client.apply([change("a/journal")])


async def test_the_health_of_a_store(client: JournalClient, broker: FakeBroker) -> None:
    await client.store_health("s3://bucket/path/", check_delete=True, check_delete_prefix="probe/")
    assert broker.requests[-1] == pb.FragmentStoreHealthRequest(
        fragment_store="s3://bucket/path/", check_delete=True, check_delete_prefix="probe/"
    )
    broker.at(CallPoint.STORE_HEALTH, pb.FRAGMENT_STORE_UNHEALTHY)
    with pytest.raises(StoreUnhealthy, match="asked for, of s3://bucket/path/") as caught:
        await client.store_health("s3://bucket/path/")
    assert caught.value.detail == "asked for, of s3://bucket/path/"
    broker.at(CallPoint.STORE_HEALTH, Break.CUT, grpc.StatusCode.UNAVAILABLE)
    await client.store_health("s3://bucket/path/")
    broker.at(CallPoint.STORE_HEALTH, grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(RpcFailed):
        await client.store_health("s3://bucket/path/")
    with pytest.raises(InvalidInput):
        await client.store_health("s3://bucket/path/", check_delete_prefix="probe/")
