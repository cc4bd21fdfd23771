"""The Replicate RPC, driven by hand: the test acts as the primary `broker-9`, the broker is its replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.coordination.etcd import Delete, Put
from coranto.coordination.layout import MemberId
from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment, sum_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments import index
from coranto_broker.server.process import BrokerProcess
from tests.broker.running import RawClient, eventually

J = "test/journal"
PRIMARY = MemberId("local", "broker-9")
NONE = pb.LabelSet()


class Primary:
    """Opens replication streams to the broker."""

    def __init__(self, process: BrokerProcess, client: RawClient) -> None:
        self.process = process
        self.client = client

    async def header(self) -> pb.Header:
        state = self.process.broker.keyspace.state
        header = pb.Header(route=state.route_of(J), etcd=state.header.to_wire())
        header.process_id.zone, header.process_id.suffix = "local", "broker-0"
        return header

    def stream(self) -> Any:
        return self.client.stub.Replicate()

    async def opened(self, proposal: Fragment, registers: pb.LabelSet = NONE) -> tuple[Any, pb.ReplicateResponse]:
        stream = self.stream()
        await stream.write(propose(proposal, registers, header=await self.header()))
        return stream, await stream.read()

    async def read(self, offset: int = 0) -> bytes:
        return await self.client.content(J, offset, do_not_proxy=True)


def propose(
    proposal: Fragment,
    registers: pb.LabelSet = NONE,
    *,
    acknowledge: bool = True,
    header: pb.Header | None = None,
    content: bytes = b"",
    content_delta: int = 0,
) -> pb.ReplicateRequest:
    request = pb.ReplicateRequest(
        proposal=proposal.to_wire(), acknowledge=acknowledge, content=content, content_delta=content_delta
    )
    request.registers.CopyFrom(registers)
    if header is not None:
        request.header.CopyFrom(header)
    return request


def fragment(begin: int, end: int, content: bytes = b"") -> Fragment:
    return Fragment(J, begin, end, sum_of(content) if content else ZERO_SUM, Codec.NONE)


@pytest.fixture
async def primary(broker: tuple[BrokerProcess, RawClient], spec: Callable[..., pb.JournalSpec]) -> Primary:
    """Return the primary of a journal of two replicas, which exists only in etcd."""
    process, client = broker
    layout, coordinator = process.broker.keyspace.layout, process.broker.coordinator
    lease = (await coordinator.lease_grant(60)).id
    process_spec = pb.ProcessSpec(id=pb.ProcessSpec.ID(zone="local", suffix="broker-9"), endpoint="http://127.0.0.1:9")
    member = pb.BrokerSpec(process_spec=process_spec, journal_limit=10)
    journal = spec()
    journal.replication = 2
    await coordinator.txn(
        [],
        [
            Put(layout.member_key(PRIMARY), member.SerializeToString(), lease=lease),
            Put(layout.item_key(J), journal.SerializeToString()),
            Put(layout.assignment_key(J, PRIMARY, 0), b"", lease=lease),
            Put(layout.assignment_key(J, process.broker.member, 1), b"", lease=process.session.lease),
        ],
    )
    await process.broker.keyspace.wait_until(lambda state: len(state.assignments(J)) == 2)
    return Primary(process, client)


async def test_content_is_visible_only_after_its_commit(primary: Primary) -> None:
    stream, response = await primary.opened(fragment(0, 0))
    assert response.status == pb.OK
    assert response.header.process_id.suffix == "broker-0", "the first answer says who answers"
    await stream.write(pb.ReplicateRequest(content=b"foo"))
    await stream.write(pb.ReplicateRequest(content=b"bar", content_delta=3))
    (answer,) = await primary.client.read(J, do_not_proxy=True)
    assert (answer.status, answer.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 0)

    mine = labels.label_set(author="me")
    await stream.write(propose(fragment(0, 6, b"foobar"), mine))
    assert await stream.read() == pb.ReplicateResponse(status=pb.OK)
    assert await primary.read() == b"foobar"

    # Later content is rolled back: by proposals, and by the end of the stream.
    await stream.write(pb.ReplicateRequest(content=b"baz"))
    await stream.write(propose(fragment(0, 6, b"foobar"), mine))
    assert (await stream.read()).status == pb.OK
    await stream.write(propose(fragment(0, 6, b"foobar"), mine, content=b"baz"))
    assert (await stream.read()).status == pb.OK
    await stream.write(pb.ReplicateRequest(content=b"qux"))
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    again, response = await primary.opened(fragment(0, 6, b"foobar"), mine)
    assert response.status == pb.OK
    again.cancel()


async def test_content_is_sent_with_the_proposal_that_commits_it(primary: Primary) -> None:
    stream, response = await primary.opened(fragment(0, 0))
    assert response.takes_content_with_proposal
    await stream.write(propose(fragment(0, 3, b"foo"), content=b"foo"))
    assert await stream.read() == pb.ReplicateResponse(status=pb.OK)
    await stream.write(pb.ReplicateRequest(content=b"bar"))
    await stream.write(propose(fragment(0, 9, b"foobarbaz"), content=b"baz", content_delta=3))
    assert await stream.read() == pb.ReplicateResponse(status=pb.OK)
    await stream.write(propose(fragment(0, 12, b"foobarbazqux"), content=b"not"))
    assert (await stream.read()).status == pb.PROPOSAL_MISMATCH
    assert await primary.read() == b"foobarbaz"
    await stream.write(propose(fragment(0, 12, b"foobarbazqux"), content=b"qux"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # The content follows bytes that the replica does not have.
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_readers_wait_for_a_primary_that_sends_readable_offsets(
    primary: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "READABLE_TIMEOUT_SECONDS", 0.0)
    stream = primary.stream()
    first = propose(fragment(0, 0), header=await primary.header())
    first.readable = 0
    await stream.write(first)
    assert (await stream.read()).takes_readable
    committed = b""
    for content in (b"foo", b"bar", b"baz"):
        await stream.write(pb.ReplicateRequest(content=content))
        committed += content
        proposal = propose(fragment(0, len(committed), committed))
        if content == b"baz":
            proposal.readable = 3  # With the next proposal but one.
        await stream.write(proposal)
        assert await stream.read() == pb.ReplicateResponse(status=pb.OK), "only the first says more"
    assert await primary.read() == b"foo"
    (head,) = await primary.client.read(J, 3, do_not_proxy=True)
    assert (head.status, head.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 9)
    blocked = asyncio.create_task(primary.client.content(J, 3, block=True, end_offset=6, do_not_proxy=True))
    await stream.write(pb.ReplicateRequest(readable=6))
    assert await blocked == b"bar"
    assert await primary.read() == b"foobar"
    # The primary dies. The next one may be Gazette's, and rolls; or it sends later readable offsets.
    stream.cancel()
    again, response = await primary.opened(fragment(9, 9))
    assert response.status == pb.OK
    assert await primary.read() == b"foobarbaz"
    again.cancel()


async def test_a_replica_that_disagrees_reports_its_content(primary: Primary) -> None:
    stream, response = await primary.opened(fragment(5, 9, b"more"), labels.label_set(author="me"))
    assert response.status == pb.PROPOSAL_MISMATCH
    assert (response.fragment.begin, response.fragment.end) == (9, 9), "it has rolled to where the primary is"
    assert response.registers == labels.label_set(author="me")
    await stream.write(propose(fragment(9, 9), labels.label_set(author="me")))
    assert (await stream.read()).status == pb.OK
    await stream.write(propose(fragment(0, 3, b"abc")))
    behind = await stream.read()
    assert (behind.status, behind.fragment.end) == (pb.PROPOSAL_MISMATCH, 9)
    stream.cancel()


async def test_a_mismatch_without_an_acknowledgement_ends_the_stream(primary: Primary) -> None:
    stream, _ = await primary.opened(fragment(0, 0))
    await stream.write(pb.ReplicateRequest(content=b"foo"))
    await stream.write(propose(fragment(0, 3, b"fop"), acknowledge=False))
    with pytest.raises(grpc.aio.AioRpcError, match="does not fit"):
        await stream.read()


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (pb.ReplicateRequest(content=b"content"), "proposal with a header"),
        (propose(fragment(0, 0)), "proposal with a header"),
        (pb.ReplicateRequest(), "ReplicateRequest"),
    ],
)
async def test_a_stream_begins_with_a_proposal_and_a_header(
    primary: Primary, first: pb.ReplicateRequest, problem: str
) -> None:
    stream = primary.stream()
    await stream.write(first)
    with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_content_at_a_wrong_delta_ends_the_stream(primary: Primary) -> None:
    stream, _ = await primary.opened(fragment(0, 0))
    await stream.write(pb.ReplicateRequest(content=b"foo", content_delta=1))
    with pytest.raises(grpc.aio.AioRpcError, match="at delta 1 but this spool expects 0"):
        await stream.read()


async def test_wrong_routes_and_journals_are_refused(primary: Primary) -> None:
    stream = primary.stream()
    header = await primary.header()
    del header.route.members[1:]
    del header.route.endpoints[1:]
    header.route.primary = 0
    await stream.write(propose(fragment(0, 0), header=header))
    response = await stream.read()
    assert response.status == pb.WRONG_ROUTE
    assert len(response.header.route.members) == 2

    stream = primary.stream()
    other = Fragment("no/such/journal", 0, 0, ZERO_SUM, Codec.NONE)
    await stream.write(propose(other, header=await primary.header()))
    assert (await stream.read()).status == pb.JOURNAL_NOT_FOUND


async def test_a_second_stream_waits_for_the_first(primary: Primary) -> None:
    first, _ = await primary.opened(fragment(0, 0))
    await first.write(pb.ReplicateRequest(content=b"uncommitted"))
    second = asyncio.create_task(primary.opened(fragment(0, 0)))
    (replica,) = primary.process.broker.resolver.local_replicas
    await eventually(lambda: replica.spool._waiters)
    assert not second.done()
    first.cancel()
    stream, response = await asyncio.wait_for(second, 60)
    assert response.status == pb.OK
    stream.cancel()


async def test_a_replaced_primary_is_cut_off(primary: Primary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coranto_broker.handlers.replicate.DEMOTED_SECONDS", 0.1)
    stream, _ = await primary.opened(fragment(0, 0))
    broker = primary.process.broker
    layout = broker.keyspace.layout
    await broker.coordinator.txn(
        [],
        [
            Delete(layout.assignment_key(J, PRIMARY, 0)),
            Delete(layout.member_key(PRIMARY)),
            Delete(layout.assignment_key(J, broker.member, 1)),
            Put(layout.assignment_key(J, broker.member, 0), b"", lease=primary.process.session.lease),
        ],
    )
    with pytest.raises(grpc.aio.AioRpcError, match="no longer the journal's primary"):
        await asyncio.wait_for(stream.read(), 60)

    # The spool is free for the new primary, which only lacks a replica.
    async def short() -> bool:
        return (await primary.client.append(J)).status == pb.INSUFFICIENT_JOURNAL_BROKERS

    await eventually(short)
