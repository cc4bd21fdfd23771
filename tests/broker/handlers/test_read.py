"""`Read`: metadata, chunks, statuses, and reads that block."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from coranto.fragments.fragment import sum_of, sum_words
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import SET_ASIDE
from tests.broker.handlers.rpcs import MakeSpec, failure
from tests.broker.running import RawClient, create, eventually

J = "test/journal"


# -------------------------------------------------------------------------------------------------------------- Read


async def test_read_sends_metadata_then_content(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    await client.append(J, b"abcdef")
    metadata, chunk, end = await client.read(J, 2)
    for response in (metadata, chunk, end):
        validate(response)
    assert metadata.HasField("header")
    assert (metadata.status, metadata.offset, metadata.write_head) == (pb.OK, 2, 6)
    assert (metadata.fragment.begin, metadata.fragment.end) == (0, 6)
    assert (chunk.offset, chunk.content) == (2, b"cdef")
    assert (end.status, end.offset, end.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 6, 6)
    assert not end.HasField("header")


async def test_read_statuses(client: RawClient, spec: MakeSpec) -> None:
    (response,) = await client.read("no/such/journal")
    assert response.status == pb.JOURNAL_NOT_FOUND
    await create(client, spec())
    (response,) = await client.read(J)
    validate(response)
    assert (response.status, response.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 0)
    error = await failure(client.read(J, -2))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_read_of_the_head_metadata_only_and_end_offset(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    await client.append(J, b"0123456789")
    (response,) = await client.read(J, -1)
    assert (response.status, response.offset, response.write_head) == (pb.OFFSET_NOT_YET_AVAILABLE, 10, 10)
    (response,) = await client.read(J, 4, metadata_only=True)
    assert (response.status, response.offset, response.fragment.end) == (pb.OK, 4, 10)
    assert await client.content(J, 3, end_offset=7) == b"3456"
    (response,) = await client.read(J, 3, end_offset=3)
    assert response.status == pb.OK


async def test_content_that_was_set_aside_is_read_only_by_its_sum(
    client: RawClient, spec: MakeSpec, broker_settings: BrokerSettings
) -> None:
    await create(client, spec())
    await client.append(J, b"abc")
    (folder,) = (broker_settings.data_dir / "spools").glob("*/*")
    (folder / SET_ASIDE).mkdir(exist_ok=True)
    (folder / SET_ASIDE / f"0a0b0c0d.{2:016x}.content").write_bytes(b"cDEFgh")
    words = sum_words(sum_of(b"DEF"))
    wanted = pb.SHA1Sum(part1=words[0], part2=words[1], part3=words[2])
    assert await client.content(J, 3, end_offset=6, content_sum=wanted) == b"DEF"
    assert await client.content(J, 0, end_offset=3, content_sum=wanted) == b"abc"  # As without a sum.
    assert await client.content(J, 3) == b""
    error = await failure(client.read(J, 3, content_sum=wanted))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_large_content_comes_in_chunks_below_the_message_limit(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    content = bytes(range(256)) * 4096 * 3
    await client.append(J, content[: 1 << 20], content[1 << 20 : 2 << 20], content[2 << 20 :])
    chunks = [response for response in await client.read(J, 5) if response.content]
    assert [chunk.offset for chunk in chunks] == [5, 5 + (1 << 20), 5 + (2 << 20)]
    assert b"".join(chunk.content for chunk in chunks) == content[5:]


async def test_a_blocking_read_sees_only_commits(broker: tuple[BrokerProcess, RawClient], spec: MakeSpec) -> None:
    process, client = broker
    await create(client, spec())
    (replica,) = process.broker.resolver.local_replicas
    reader = client.stub.Read(pb.ReadRequest(journal=J, block=True))
    seen = bytearray()

    async def read() -> None:
        while len(seen) < 9:
            response = await reader.read()
            assert isinstance(response, pb.ReadResponse)
            assert not response.content or response.offset == len(seen)
            seen.extend(response.content)

    reading = asyncio.create_task(read())
    call = client.stub.Append()
    await call.write(pb.AppendRequest(journal=J))
    await call.write(pb.AppendRequest(content=b"one"))
    await eventually(lambda: replica.index._waiters)  # The read waits.
    await eventually(lambda: process.broker.receive_budget.held)  # The broker has the content.
    assert not seen
    await call.write(pb.AppendRequest())
    await call.done_writing()
    await call
    await client.append(J, b"two")
    await client.append(J, b"six")
    await asyncio.wait_for(reading, 60)
    assert seen == b"onetwosix"
    reader.cancel()
