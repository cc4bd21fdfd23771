"""Suspension, appends with an explicit offset after lost consistency, and the health of stores."""

from __future__ import annotations

import grpc
import pytest

from coranto.client import JournalClient, Suspend
from coranto.errors import (
    IndexHasGreaterOffset,
    InvalidInput,
    JournalSuspended,
    RpcFailed,
    StoreUnhealthy,
    WrongAppendOffset,
)
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb


async def test_an_append_chooses_the_fate_of_a_suspension(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    with pytest.raises(JournalSuspended):
        await client.append("test/journal", b"", suspend=Suspend.NOW)
    with pytest.raises(JournalSuspended):
        await client.append("test/journal", b"content", suspend=Suspend.NO_RESUME)
    assert (await client.append("test/journal", b"content")).end == 7
    assert journal.spec.suspend.level == pb.JournalSpec.Suspend.NONE
    assert [request.suspend for request in broker.requests] == [
        pb.AppendRequest.SUSPEND_NOW,
        pb.AppendRequest.SUSPEND_NO_RESUME,
        pb.AppendRequest.SUSPEND_RESUME,
    ]


async def test_an_explicit_offset_recovers_from_lost_consistency(client: JournalClient, journal: FakeJournal) -> None:
    journal.index_end = 1000
    with pytest.raises(IndexHasGreaterOffset):
        await client.append("test/journal", b"content")
    assert await client.head("test/journal") == 1000
    with pytest.raises(WrongAppendOffset):
        await client.append("test/journal", b"", offset=999, suspend=Suspend.KEEP)
    assert (await client.append("test/journal", b"", offset=1000, suspend=Suspend.KEEP)).end == 1000
    assert (await client.append("test/journal", b"content")).begin == 1000


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
