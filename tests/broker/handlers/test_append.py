"""`Append`: ranges, statuses, hostile and slow clients, registers and rates."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.effects import SystemClock
from coranto.fragments.fragment import sum_from_wire, sum_of
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from tests.broker.handlers.rpcs import MakeSpec, Running, failure
from tests.broker.running import RawClient, create

J = "test/journal"


# ------------------------------------------------------------------------------------------------------------ Append


async def test_append_commits_and_reports_the_range(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    first = await client.append(J, b"hello, ", b"world\n")
    validate(first)
    assert first.status == pb.OK
    assert (first.commit.begin, first.commit.end) == (0, 13)
    assert sum_from_wire(first.commit.sum) == sum_of(b"hello, world\n")
    assert first.HasField("registers")
    assert first.total_chunks == 2
    assert first.header.process_id.suffix == "broker-0"
    assert list(first.header.route.endpoints)

    second = await client.append(J, b"again")
    assert (second.commit.begin, second.commit.end) == (13, 18)
    assert await client.content(J) == b"hello, world\nagain"


async def test_an_empty_append_is_a_barrier(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    await client.append(J, b"x")
    barrier = await client.append(J)
    assert (barrier.status, barrier.commit.begin, barrier.commit.end) == (pb.OK, 1, 1)
    # An empty fragment has the sum zero, but an empty append the SHA-1 of no bytes.
    assert sum_from_wire(barrier.commit.sum).hex() == "da39a3ee5e6b4b0d3255bfef95601890afd80709"


async def test_append_to_an_unknown_journal(client: RawClient) -> None:
    response = await client.append("no/such/journal", b"content")
    validate(response)
    assert response.status == pb.JOURNAL_NOT_FOUND


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "ended before its first message"),
        ([pb.AppendRequest()], "must name its journal"),
        ([pb.AppendRequest(content=b"content first")], "must name its journal"),
        ([pb.AppendRequest(journal=J, content=b"content")], "content"),
        ([pb.AppendRequest(journal="x"), pb.AppendRequest()], "journal"),
        ([pb.AppendRequest(journal="has space/journal"), pb.AppendRequest()], "journal"),
        ([pb.AppendRequest(journal=J, offset=-1), pb.AppendRequest()], "offset"),
        ([pb.AppendRequest(journal=J, header=pb.Header()), pb.AppendRequest()], "header"),
        ([pb.AppendRequest(journal=J)], "unexpected EOF"),
        ([pb.AppendRequest(journal=J), pb.AppendRequest(content=b"abc")], "unexpected EOF"),
        ([pb.AppendRequest(journal=J), pb.AppendRequest(), pb.AppendRequest()], "expected the end"),
        ([pb.AppendRequest(journal=J), pb.AppendRequest(), pb.AppendRequest(content=b"x")], "expected the end"),
        (
            [pb.AppendRequest(journal=J), pb.AppendRequest(content=b"a"), pb.AppendRequest(journal=J, content=b"b")],
            "more than content",
        ),
        ([pb.AppendRequest(journal=J), pb.AppendRequest(offset=5)], "more than content"),
        (
            [pb.AppendRequest(journal=J, union_registers=labels.label_set(aa="b")), pb.AppendRequest()],
            "at least one byte",
        ),
        ([pb.AppendRequest(journal=J, union_registers=pb.LabelSet()), pb.AppendRequest()], "at least one byte"),
    ],
)
async def test_hostile_streams_commit_nothing(
    client: RawClient, spec: MakeSpec, messages: list[pb.AppendRequest], problem: str
) -> None:
    await create(client, spec())
    await client.append(J, b"before")
    error = await failure(client.append_messages(*messages))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in str(error.details())

    after = await client.append(J, b" and after")
    assert after.commit.begin == len(b"before")
    assert await client.content(J) == b"before and after"


async def test_a_client_that_cancels_appends_nothing(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    call = client.stub.Append()
    await call.write(pb.AppendRequest(journal=J))
    await call.write(pb.AppendRequest(content=b"never seen"))
    reader = client.stub.Read(pb.ReadRequest(journal=J, block=True))
    waiting = asyncio.create_task(client.append(J, b"seen"))
    await asyncio.sleep(0)
    call.cancel()
    response = await waiting
    assert (response.status, response.commit.begin) == (pb.OK, 0)
    metadata, chunk = await reader.read(), await reader.read()
    assert isinstance(metadata, pb.ReadResponse)
    assert isinstance(chunk, pb.ReadResponse)
    assert chunk.content == b"seen"
    reader.cancel()


async def test_a_slow_client_is_cut_off(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    call = client.stub.Append()
    await call.write(pb.AppendRequest(journal=J))
    await call.write(pb.AppendRequest(content=b"stalls"))
    error = await failure(call)
    assert error.code() is grpc.StatusCode.ABORTED
    assert "minimum append rate" in str(error.details())
    after = await client.append(J, b"next")
    assert after.commit.begin == 0


class _Sleeping(SystemClock):
    """A clock that advances only while it sleeps."""

    def __init__(self) -> None:
        self.slept = 0.0
        self._begun = super().monotonic()

    def monotonic(self) -> float:
        return self._begun + self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)


async def test_the_journals_maximum_rate_delays_appends(
    broker: Running, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    clock = _Sleeping()
    monkeypatch.setattr(process.broker.appends, "clock", clock)
    await create(client, spec(max_append_rate=200_000))
    response = await client.append(J, *[b"x" * 100_000] * 3)
    assert response.status == pb.OK
    assert (response.total_chunks, response.delayed_chunks) == (3, 1)
    assert clock.slept == pytest.approx(0.5)


async def test_registers_change_with_content_only_and_are_checked(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    mine = labels.parse_selector("author=me")
    first = await client.append(J, b"1", check_registers=mine, union_registers=labels.label_set(author="me", term="1"))
    assert first.registers == labels.label_set(author="me", term="1")
    second = await client.append(
        J, b"2", check_registers=mine, subtract_registers=labels.label_set(term="1"), union_registers=pb.LabelSet()
    )
    assert second.registers == labels.label_set(author="me")
    refused = await client.append(J, b"3", check_registers=labels.parse_selector("author=you"))
    validate(refused)
    assert refused.status == pb.REGISTER_MISMATCH
    assert refused.registers == labels.label_set(author="me")

    aborted = await failure(
        client.append_messages(
            pb.AppendRequest(journal=J, union_registers=labels.label_set(author="thief")),
            pb.AppendRequest(content=b"4"),
        )
    )
    assert "unexpected EOF" in str(aborted.details())
    barrier = await client.append(J, check_registers=mine)
    assert (barrier.status, barrier.registers) == (pb.OK, labels.label_set(author="me"))
    assert await client.content(J) == b"12"


async def test_explicit_offsets(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    await client.append(J, b"abc")
    assert (await client.append(J, b"x", offset=2)).status == pb.WRONG_APPEND_OFFSET
    assert (await client.append(J, b"x", offset=4)).status == pb.WRONG_APPEND_OFFSET
    right = await client.append(J, b"x", offset=3)
    assert (right.status, right.commit.begin) == (pb.OK, 3)


async def test_flags(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec(flags=pb.JournalSpec.O_RDONLY))
    assert (await client.append(J, b"content")).status == pb.NOT_ALLOWED
    assert (await client.append(J)).status == pb.OK
    await create(client, spec("write/only", flags=pb.JournalSpec.O_WRONLY))
    assert (await client.append("write/only", b"content")).status == pb.OK
    (response,) = await client.read("write/only")
    assert response.status == pb.NOT_ALLOWED
    listed = await client.stub.ListFragments(pb.FragmentsRequest(journal="write/only"))
    assert listed.status == pb.NOT_ALLOWED


async def test_an_append_waits_for_a_future_revision(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    (listing,) = await client.listing()
    revision = listing.header.etcd.revision + 1
    waiting = asyncio.create_task(client.append(J, b"x", min_etcd_revision=revision))
    await client.apply(spec("another/journal"))
    response = await waiting
    assert response.status == pb.OK
    assert response.header.etcd.revision >= revision


async def test_metadata_of_a_name_is_ignored(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    response = await client.append(f"{J};client=one", b"x")
    assert (response.status, response.commit.journal) == (pb.OK, J)
    assert await client.content(f"{J};reader") == b"x"


async def test_a_request_for_another_broker_is_refused(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    header = (await client.append(J, b"x")).header
    other = pb.Header()
    other.CopyFrom(header)
    other.process_id.suffix = "broker-9"
    error = await failure(client.append(J, b"x", header=other))
    assert "meant for broker" in str(error.details())
    other.CopyFrom(header)
    other.etcd.cluster_id += 1
    error = await failure(client.append(J, b"x", header=other))
    assert "etcd cluster" in str(error.details())


async def test_many_concurrent_appends_are_ordered(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    contents = [f"<{n}>".encode() * (n % 7 + 1) for n in range(200)]
    responses = await asyncio.gather(*(client.append(J, content) for content in contents))
    whole = await client.content(J)
    assert len(whole) == sum(map(len, contents))
    for content, response in zip(contents, responses, strict=True):
        assert response.status == pb.OK
        assert whole[response.commit.begin : response.commit.end] == content


async def test_appends_commit_despite_concurrent_aborted_ones(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())

    async def abort(n: int) -> None:
        call = client.stub.Append()
        try:
            await call.write(pb.AppendRequest(journal=J))
            for _ in range(n % 4):
                await call.write(pb.AppendRequest(content=b"never" * 100))
        except asyncio.InvalidStateError:
            return
        finally:
            call.cancel()

    async def append(n: int) -> tuple[int, int, bytes]:
        content = f"({n})".encode()
        response = await client.append(J, content)
        assert response.status == pb.OK
        return response.commit.begin, response.commit.end, content

    results = await asyncio.gather(*(abort(n // 2) if n % 2 else append(n) for n in range(120)))
    whole = await client.content(J)
    assert b"never" not in whole
    committed = [result for result in results if result is not None]
    assert sum(end - begin for begin, end, _ in committed) == len(whole)
    for begin, end, content in committed:
        assert whole[begin:end] == content
