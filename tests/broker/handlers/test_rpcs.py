"""Every RPC against a real broker and a real etcd, over real gRPC, message by message."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from coranto import labels
from coranto.effects import SystemClock
from coranto.errors import StoreDenied
from coranto.fragments.fragment import Codec, sum_from_wire, sum_of
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.server.process import BrokerProcess
from coranto_broker.settings import BrokerSettings
from coranto_broker.testing.running import RawClient, create, eventually, stored_files

pytestmark = pytest.mark.integration

J = "test/journal"
MakeSpec = Callable[..., pb.JournalSpec]
Running = tuple[BrokerProcess, RawClient]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """The gRPC error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# ---------------------------------------------------------------------------------------------------- List and Apply


async def test_list_of_nothing_has_a_header(client: RawClient) -> None:
    (response,) = await client.listing()
    validate(response)
    assert (response.status, len(response.journals)) == (pb.OK, 0)
    assert response.header.route.primary == -1
    assert response.header.process_id.suffix == "broker-0"


async def test_apply_creates_changes_and_deletes(client: RawClient, spec: MakeSpec) -> None:
    created = await client.apply(spec())
    validate(created)
    (response,) = await client.listing()
    (journal,) = response.journals
    assert journal.spec == spec()
    assert journal.mod_revision == journal.create_revision == created.header.etcd.revision

    # Creating it again, or changing another revision than the present one, is refused and changes nothing.
    for revision in (0, journal.mod_revision - 1):
        refused = await client.apply(spec(max_append_rate=5), revision=revision)
        assert refused.status == pb.ETCD_TRANSACTION_FAILED
    changed = await client.apply(spec(max_append_rate=7), revision=journal.mod_revision)
    assert changed.status == pb.OK
    forced = await client.apply(spec(max_append_rate=8), revision=-1)
    assert forced.status == pb.OK
    (response,) = await client.listing()
    assert response.journals[0].spec.max_append_rate == 8
    assert response.journals[0].create_revision == journal.create_revision

    delete = pb.ApplyRequest.Change(delete=J, expect_mod_revision=response.journals[0].mod_revision)
    deleted = await client.stub.Apply(pb.ApplyRequest(changes=[delete]))
    assert deleted.status == pb.OK
    (response,) = await client.listing()
    assert not response.journals


async def test_apply_is_all_or_nothing(client: RawClient, spec: MakeSpec) -> None:
    await client.apply(spec("first/journal"))
    refused = await client.apply(spec("second/journal"), spec("first/journal"))
    assert refused.status == pb.ETCD_TRANSACTION_FAILED
    (response,) = await client.listing()
    assert [journal.spec.name for journal in response.journals] == ["first/journal"]


async def test_apply_refuses_invalid_specs(client: RawClient, spec: MakeSpec) -> None:
    error = await failure(client.apply(spec("/rooted/name")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "name" in str(error.details())
    many = [spec(f"many/journal-{n:03d}") for n in range(200)]
    error = await failure(client.apply(*many))
    assert "several batches" in str(error.details())


async def test_list_selects_by_labels_names_and_prefixes(client: RawClient, spec: MakeSpec) -> None:
    for name, kind in (("one/aaaa", "x"), ("one/bbbb", "y"), ("two/cccc", "x")):
        await client.apply(spec(name, labels=labels.label_set(kind=kind)))

    async def names(selector: str) -> list[str]:
        (response,) = await client.listing(selector=labels.parse_selector(selector))
        return [journal.spec.name for journal in response.journals]

    assert await names("") == ["one/aaaa", "one/bbbb", "two/cccc"]
    assert await names("kind=x") == ["one/aaaa", "two/cccc"]
    assert await names("kind!=x") == ["one/bbbb"]
    assert await names("name=one/bbbb") == ["one/bbbb"]
    assert await names("name:prefix=one/") == ["one/aaaa", "one/bbbb"]
    assert await names("prefix=one/, kind=y") == ["one/bbbb"]


async def test_list_of_many_comes_in_several_messages(client: RawClient, spec: MakeSpec) -> None:
    await client.apply(*[spec(f"many/journal-{n:03d}") for n in range(60)])
    responses = await client.listing()
    assert [len(response.journals) for response in responses] == [25, 25, 10]
    assert responses[0].HasField("header")
    assert not any(response.HasField("header") for response in responses[1:])
    found = [journal.spec.name for response in responses for journal in response.journals]
    assert found == sorted(found)


async def test_watched_list_sends_snapshots_of_changes(client: RawClient, spec: MakeSpec) -> None:
    await client.apply(spec("seen/journal"))
    selector = labels.parse_selector("name:prefix=seen/")
    call = client.stub.List(pb.ListRequest(selector=selector, watch=True))

    async def snapshot() -> list[str]:
        first = await call.read()
        assert isinstance(first, pb.ListResponse)
        assert first.HasField("header")
        assert await call.read() == pb.ListResponse()
        return [journal.spec.name for journal in first.journals]

    assert await snapshot() == ["seen/journal"]
    await client.apply(spec("other/journal"))
    await client.apply(spec("seen/second"))
    assert await snapshot() == ["seen/journal", "seen/second"]
    changes = [pb.ApplyRequest.Change(delete=name, expect_mod_revision=-1) for name in ("seen/journal", "seen/second")]
    await client.stub.Apply(pb.ApplyRequest(changes=changes))
    assert await snapshot() == []
    call.cancel()


# ------------------------------------------------------------------------------------------------------------ Append


async def test_append_commits_and_tells_where(client: RawClient, spec: MakeSpec) -> None:
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
    # An empty fragment has the sum zero, but an append of nothing the SHA-1 of nothing.
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


async def test_a_client_that_cancels_leaves_nothing(client: RawClient, spec: MakeSpec) -> None:
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
    """A clock that goes on while somebody sleeps, and not otherwise."""

    def __init__(self) -> None:
        self.slept = 0.0
        self._begun = super().monotonic()

    def monotonic(self) -> float:
        return self._begun + self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        await asyncio.sleep(0)


async def test_the_journals_maximum_rate_delays(
    broker: Running, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    clock = _Sleeping()
    monkeypatch.setattr(process.broker, "clock", clock)
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


async def test_many_appends_at_once_are_ordered(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    contents = [f"<{n}>".encode() * (n % 7 + 1) for n in range(200)]
    responses = await asyncio.gather(*(client.append(J, content) for content in contents))
    whole = await client.content(J)
    assert len(whole) == sum(map(len, contents))
    for content, response in zip(contents, responses, strict=True):
        assert response.status == pb.OK
        assert whole[response.commit.begin : response.commit.end] == content


async def test_appends_that_race_with_aborted_ones(client: RawClient, spec: MakeSpec) -> None:
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


async def test_large_content_comes_in_chunks_below_the_message_limit(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
    content = bytes(range(256)) * 4096 * 3
    await client.append(J, content[: 1 << 20], content[1 << 20 : 2 << 20], content[2 << 20 :])
    chunks = [response for response in await client.read(J, 5) if response.content]
    assert [chunk.offset for chunk in chunks] == [5, 5 + (1 << 20), 5 + (2 << 20)]
    assert b"".join(chunk.content for chunk in chunks) == content[5:]


async def test_a_blocking_read_sees_commits_and_nothing_else(client: RawClient, spec: MakeSpec) -> None:
    await create(client, spec())
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
    await asyncio.sleep(0.05)
    assert not seen
    await call.write(pb.AppendRequest())
    await call.done_writing()
    await call
    await client.append(J, b"two")
    await client.append(J, b"six")
    await asyncio.wait_for(reading, 60)
    assert seen == b"onetwosix"
    reader.cancel()


# --------------------------------------------------------------------------------- fragments, stores and persistence


async def test_fragments_are_stored_by_name_length_and_sum(
    client: RawClient, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    fragment = {"length": 1024, "compression_codec": pb.GZIP, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    whole = b""
    for n in range(5):
        content = bytes([n]) * 1000
        response = await client.append(J, content)
        assert response.status == pb.OK
        whole += content
    # The journal's first write is a fragment of its own; then each is closed by the append that finds it too long.
    await eventually(lambda: len(stored_files(broker_settings)) == 2)
    files = stored_files(broker_settings)
    assert [(f.begin, f.end, f.codec) for f in files.values()] == [(0, 1000, Codec.GZIP), (1000, 3000, Codec.GZIP)]
    for path, fragment_ in files.items():
        content = gzip.decompress(path.read_bytes())
        assert content == whole[fragment_.begin : fragment_.end]
        assert hashlib.sha1(content).digest() == fragment_.sum
    assert await client.content(J) == whole


async def test_stored_fragments_replace_local_files_and_are_still_read(
    broker: Running, broker_settings: BrokerSettings, spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, client = broker
    fragment = {"length": 1024, "compression_codec": pb.SNAPPY, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    whole = b"".join(bytes([n]) * 1500 for n in range(4))
    for n in range(4):
        await client.append(J, whole[n * 1500 : (n + 1) * 1500])
    index = process.broker.resolver.local_replicas[0].index
    await eventually(lambda: not index.sealed_files() and len(stored_files(broker_settings)) == 3)
    contents = list((broker_settings.data_dir / "spools").rglob("*.content"))
    assert len(contents) == 1, "only the fragment under construction has a file left"

    assert await client.content(J) == whole
    (response,) = await client.read(J, 100, do_not_proxy=True)
    validate(response)
    assert response.fragment.backing_store == "file:///frags/"
    assert response.fragment.mod_time > 0
    assert response.fragment_url.startswith("file:///frags/test/journal/")
    assert not response.content

    async def deny(fragment: object, ttl_seconds: float) -> str:
        raise StoreDenied("you may not sign")

    monkeypatch.setattr(process.broker.stores.get("file:///frags/"), "sign_async", deny)
    assert await client.content(J) == whole
    (response,) = await client.read(J, 100, do_not_proxy=True)
    validate(response)
    assert (response.fragment_url, response.content) == ("", b"")


async def test_changed_content_in_the_store_is_not_served(
    broker: Running, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    process, client = broker
    fragment = {"length": 1024, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    for _ in range(3):
        await client.append(J, b"x" * 2000)
    index = process.broker.resolver.local_replicas[0].index
    await eventually(lambda: not index.sealed_files() and len(stored_files(broker_settings)) == 2)
    path = next(iter(stored_files(broker_settings)))
    path.write_bytes(b"x" * 1999 + b"y")
    error = await failure(client.read(J))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert "SHA-1" in str(error.details())


async def test_list_fragments_pages_and_signs(
    client: RawClient, broker_settings: BrokerSettings, spec: MakeSpec
) -> None:
    fragment = {"length": 1024, "refresh_interval": 1}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    for _ in range(4):
        await client.append(J, b"x" * 2000)
    await eventually(lambda: len(stored_files(broker_settings)) == 3)

    async def listed(**parameters: Any) -> pb.FragmentsResponse:
        response = await client.stub.ListFragments(pb.FragmentsRequest(journal=J, **parameters))
        validate(response)
        assert response.status == pb.OK
        return response

    async def three_are_stored() -> bool:
        return sum(bool(each.spec.mod_time) for each in (await listed()).fragments) == 3

    await eventually(three_are_stored)
    everything = await listed()
    assert [(each.spec.begin, each.spec.end) for each in everything.fragments] == [
        (0, 2000),
        (2000, 4000),
        (4000, 6000),
        (6000, 8000),
    ]
    assert everything.next_page_token == 0
    assert not any(each.signed_url for each in everything.fragments)
    page = await listed(page_limit=3)
    assert (len(page.fragments), page.next_page_token) == (3, 6000)
    rest = await listed(next_page_token=page.next_page_token)
    assert [each.spec.begin for each in rest.fragments] == [6000]

    request = pb.FragmentsRequest(journal=J, end_mod_time=1 << 40)
    request.signatureTTL.FromSeconds(60)
    stored = await client.stub.ListFragments(request)
    assert [bool(each.signed_url) for each in stored.fragments] == [True] * 3
    assert not (await listed(begin_mod_time=1, end_mod_time=2)).fragments
    missing = await client.stub.ListFragments(pb.FragmentsRequest(journal="no/such/journal"))
    assert missing.status == pb.JOURNAL_NOT_FOUND


async def test_path_postfixes(client: RawClient, broker_settings: BrokerSettings, spec: MakeSpec) -> None:
    template = 'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
    fragment = {"length": 1024, "refresh_interval": 1, "path_postfix_template": template}
    await create(client, spec(stores=("file:///frags/",), fragment=fragment))
    await client.append(J, b"x")
    await client.append(J, b"y")
    await eventually(lambda: stored_files(broker_settings))
    (path,) = stored_files(broker_settings)
    assert path.parent.name.startswith("date=20")


async def test_store_health(client: RawClient, broker_settings: BrokerSettings) -> None:
    async def health(**request: Any) -> pb.FragmentStoreHealthResponse:
        response: pb.FragmentStoreHealthResponse = await client.stub.FragmentStoreHealth(
            pb.FragmentStoreHealthRequest(**request)
        )
        validate(response)
        return response

    assert (await health(fragment_store="file:///good/")).status == pb.OK
    deletable = await health(fragment_store="file:///good/", check_delete=True, check_delete_prefix="some/folder/")
    assert deletable.status == pb.OK
    assert broker_settings.file_root is not None
    (broker_settings.file_root / "blocked").write_text("a file where a folder should be")
    bad = await health(fragment_store="file:///blocked/")
    assert bad.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert "blocked" in bad.store_health_error
