"""Reads: content is delivered exactly once, despite failures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coranto.client import Chunk, JournalClient
from coranto.errors import (
    CorruptFragment,
    InsufficientBrokers,
    InvalidInput,
    JournalNotFound,
    JournalRecreated,
    JournalSuspended,
    NotAllowed,
    OffsetJump,
    OffsetNotYetAvailable,
    RpcFailed,
    Unavailable,
)
from coranto.fragments.fragment import Codec
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import Action, Break, CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"


async def gather(chunks: AsyncGenerator[Chunk], limit: int = 0) -> list[Chunk]:
    """Return the chunks, or the first ones with at least `limit` bytes (0: all)."""
    found: list[Chunk] = []
    size = 0
    async with asyncio.timeout(120), contextlib.aclosing(chunks):
        async for chunk in chunks:
            found.append(chunk)
            size += len(chunk.content)
            if 0 < limit <= size:
                break
    return found


def joined(chunks: list[Chunk], begin: int = 0) -> bytes:
    """Return the content of chunks that follow each other without a gap."""
    for chunk in chunks:
        assert chunk.offset == begin
        begin = chunk.end
    return b"".join(chunk.content for chunk in chunks)


async def test_a_read_ends_at_the_write_head(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    assert await gather(client.read(NAME)) == []
    await broker.write(NAME, bytes(100_000))
    chunks = await gather(client.read(NAME))
    assert joined(chunks) == bytes(100_000)
    assert [chunk.write_head for chunk in chunks] == [100_000] * 4
    assert await gather(client.read(NAME, 100_000)) == []


async def test_end_offset_is_exclusive(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    await broker.write(NAME, b"0123456789")
    journal.roll()
    await broker.write(NAME, b"abcdef")
    assert joined(await gather(client.read(NAME, 3, end_offset=12)), 3) == b"3456789ab"
    assert await client.read_all(NAME, 9, 11) == b"9a"
    assert await gather(client.read(NAME, 4, end_offset=4)) == []
    assert await client.read_all(NAME, 4, 4) == b""


async def test_reading_beyond_the_head(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    await broker.write(NAME, b"0123")
    assert joined(await gather(client.read(NAME, 2, end_offset=9)), 2) == b"23"
    with pytest.raises(OffsetNotYetAvailable):
        await client.read_all(NAME, 2, 9)
    with pytest.raises(OffsetNotYetAvailable, match="at 5 with write head 4"):
        await gather(client.read(NAME, 5))


async def test_unavailable_content_is_waited_for(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock
) -> None:
    await broker.write(NAME, b"0123")
    journal.spool_begin = 6
    with pytest.raises(OffsetNotYetAvailable, match="at 0 with write head 10"):
        await gather(client.read(NAME))
    assert clock.slept > 50


@pytest.mark.parametrize(("offset", "end"), [(-2, 0), (5, 4), (0, -1)])
async def test_invalid_ranges_are_refused(client: JournalClient, broker: FakeBroker, offset: int, end: int) -> None:
    with pytest.raises(InvalidInput):
        await gather(client.read(NAME, offset, end_offset=end))
    assert broker.calls == []


async def test_the_write_head(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    assert await client.head(NAME) == 0
    await broker.write(NAME, b"0123")
    assert await client.head(NAME) == 4
    broker.at(CallPoint.READ_BEGUN, Break.CUT, pb.INSUFFICIENT_JOURNAL_BROKERS)
    assert await client.head(NAME) == 4
    with pytest.raises(JournalNotFound):
        await client.head("no/such/journal")


# -- Waiting -------------------------------------------------------------------------------------------------------


async def test_a_blocking_read_delivers_later_content(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    reading = asyncio.create_task(gather(client.read(NAME, block=True), limit=6))
    await broker.reached(CallPoint.READ_BEGUN)
    await broker.write(NAME, b"012")
    await broker.write(NAME, b"345")
    assert joined(await reading) == b"012345"


async def test_a_blocking_read_ends_at_its_end_offset(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    reading = asyncio.create_task(gather(client.read(NAME, block=True, end_offset=4)))
    await broker.reached(CallPoint.READ_BEGUN)
    await broker.write(NAME, b"012345")
    assert joined(await reading) == b"0123"


async def test_a_blocking_read_survives_a_restart(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock
) -> None:
    reading = asyncio.create_task(gather(client.read(NAME, block=True), limit=6))
    await broker.write(NAME, b"012")
    await broker.reached(CallPoint.READ_CONTENT)
    await broker.refuse()
    await broker.write(NAME, b"345")
    await clock.has_slept.wait()
    await broker.accept()
    assert joined(await reading) == b"012345"


async def test_a_tail_does_not_skip_content_written_while_it_reconnects(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    await broker.write(NAME, b"old")
    broker.at(CallPoint.READ_BEGUN, None, Break.CUT)
    reading = asyncio.create_task(gather(client.read(NAME, -1, block=True), limit=3))
    await broker.reached(CallPoint.READ_BEGUN, times=2)
    await broker.write(NAME, b"new")
    assert joined(await reading, 3) == b"new"


async def test_leaving_a_read_ends_its_call(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    await broker.write(NAME, bytes(1 << 20))
    assert len(await gather(client.read(NAME, block=True), limit=1)) == 1
    reading = asyncio.create_task(gather(client.read(NAME, 1 << 20, block=True)))
    await broker.reached(CallPoint.READ_BEGUN)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


# -- Gaps ----------------------------------------------------------------------------------------------------------


async def test_removed_content_is_skipped_or_an_error(
    broker: FakeBroker, journal: FakeJournal, client: JournalClient, tmp_path: Path
) -> None:
    for content in (b"0123", b"4567", b"89"):
        await broker.write(NAME, content)
        journal.roll(tmp_path)
    journal.drop_before(4)
    chunks = await gather(client.read(NAME, 1))
    assert joined(chunks, 4) == b"456789"
    with pytest.raises(OffsetJump) as caught:
        await gather(client.read(NAME, 1, fail_on_jump=True))
    assert (caught.value.expected, caught.value.actual) == (1, 4)
    with pytest.raises(OffsetJump):
        await client.read_all(NAME, 0, 10)
    assert await gather(client.read(NAME, 1, end_offset=3)) == []


# -- Failing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "error", "block"),
    [(pb.NOT_ALLOWED, NotAllowed, True), (pb.SUSPENDED, JournalSuspended, False)],
)
async def test_permanent_refusals_are_raised_immediately(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, status: int, error: type[Exception], block: bool
) -> None:
    broker.at(CallPoint.READ_BEGUN, status)
    with pytest.raises(error):
        await gather(client.read(NAME, block=block))
    assert broker.count("Read") == 1


async def test_a_blocking_read_waits_until_a_suspended_journal_is_resumed(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    await broker.write(NAME, b"0123")
    broker.at(CallPoint.READ_BEGUN, *[pb.SUSPENDED] * 50)
    assert joined(await gather(client.read(NAME, block=True), 4)) == b"0123"
    assert broker.count("Read") == 51


async def test_a_rejected_call_is_an_error(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    broker.at(CallPoint.READ_BEGUN, grpc.StatusCode.PERMISSION_DENIED)
    with pytest.raises(RpcFailed, match="PERMISSION_DENIED"):
        await gather(client.read(NAME, block=True))


async def test_a_missing_journal_is_queried_a_few_times(client: JournalClient, broker: FakeBroker) -> None:
    with pytest.raises(JournalNotFound):
        await gather(client.read(NAME, block=True))
    assert broker.count("Read") == 4
    broker.create(NAME)
    broker.at(CallPoint.READ_BEGUN, pb.JOURNAL_NOT_FOUND, pb.JOURNAL_NOT_FOUND)
    assert await gather(client.read(NAME)) == []


async def test_a_read_without_block_ends_at_its_retry_timeout(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock
) -> None:
    broker.at(CallPoint.READ_BEGUN, *[pb.INSUFFICIENT_JOURNAL_BROKERS] * 50)
    with pytest.raises(InsufficientBrokers):
        await gather(client.read(NAME))
    assert 50 < clock.slept <= 60
    await broker.refuse()
    with pytest.raises(Unavailable):
        await gather(client.read(NAME))


async def test_progress_renews_the_retry_timeout(broker: FakeBroker, journal: FakeJournal, clock: HurriedClock) -> None:
    await broker.write(NAME, bytes(20))
    broker.chunk_bytes = lambda: 1
    for _ in range(20):
        broker.at(CallPoint.READ_CONTENT, None, grpc.StatusCode.UNAVAILABLE)
    async with JournalClient(broker.endpoint, retry_timeout=0.2, clock=clock) as client:
        assert joined(await gather(client.read(NAME))) == bytes(20)


async def test_content_through_brokers_is_verified(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    def tamper(response: pb.ReadResponse) -> None:
        if response.content:
            response.content = b"x" * len(response.content)

    await broker.write(NAME, b"0123456789")
    broker.tamper = tamper
    with pytest.raises(CorruptFragment):
        await gather(client.read(NAME))


# -- Directly from the store ---------------------------------------------------------------------------------------


@pytest.fixture
async def direct(broker: FakeBroker, tmp_path: Path, clock: HurriedClock) -> AsyncGenerator[JournalClient]:
    async with JournalClient(broker.endpoint, file_root=tmp_path, clock=clock) as client:
        yield client


def _content_messages(broker: FakeBroker) -> list[int]:
    """Record the sizes of content messages that the broker sends from here on."""
    sizes: list[int] = []
    broker.tamper = lambda response: sizes.append(len(response.content)) if response.content else None
    return sizes


@pytest.mark.parametrize("codec", Codec, ids=lambda codec: codec.name)
async def test_persisted_content_is_read_from_the_store(
    direct: JournalClient, broker: FakeBroker, journal: FakeJournal, tmp_path: Path, codec: Codec
) -> None:
    first, second, last = bytes(range(256)) * 10_000, b"second " * 1000, b"in the spool"
    for content in (first, second):
        await broker.write(NAME, content)
        journal.roll(tmp_path, codec)
    await broker.write(NAME, last)
    through_broker = _content_messages(broker)
    assert joined(await gather(direct.read(NAME))) == first + second + last
    assert through_broker == [len(last)]
    assert await direct.read_all(NAME, 100, len(first) + 50) == (first + second)[100 : len(first) + 50]
    assert through_broker == [len(last)]


async def test_direct_reading_can_be_disabled(
    direct: JournalClient, broker: FakeBroker, journal: FakeJournal, tmp_path: Path
) -> None:
    await broker.write(NAME, b"content")
    journal.roll(tmp_path)
    through_broker = _content_messages(broker)
    assert joined(await gather(direct.read(NAME, direct=False))) == b"content"
    assert through_broker == [7]


async def test_without_a_file_root_content_comes_through_brokers(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock, tmp_path: Path
) -> None:
    for content in (b"0123", b"4567"):
        await broker.write(NAME, content)
        journal.roll(tmp_path)
    assert joined(await gather(client.read(NAME))) == b"01234567"
    assert broker.count("Read") == 2
    assert clock.slept == 0


async def test_a_url_from_a_proxying_broker_is_read_directly(
    direct: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock, tmp_path: Path
) -> None:
    journal.elsewhere = True
    broker.route = pb.Route(primary=-1)
    await broker.write(NAME, b"persisted")
    journal.roll(tmp_path)
    await broker.write(NAME, b"spool")
    assert joined(await gather(direct.read(NAME))) == b"persistedspool"
    assert [request.do_not_proxy for request in broker.requests] == [True, False, False]
    assert clock.slept == 0


@pytest.mark.parametrize("url", ["file:///fragments/gone", "file:///../etc/passwd", "http://127.0.0.1:1/refused"])
async def test_a_url_that_cannot_be_read_falls_back_to_brokers(
    direct: JournalClient, broker: FakeBroker, journal: FakeJournal, tmp_path: Path, url: str
) -> None:
    await broker.write(NAME, b"0123")
    journal.roll(tmp_path)
    journal.stored[0].url = url
    await broker.write(NAME, b"4567")
    journal.roll(tmp_path)
    assert joined(await gather(direct.read(NAME))) == b"01234567"
    assert [(request.offset, request.do_not_proxy) for request in broker.requests] == [(0, True), (0, False), (8, True)]


async def test_a_persisted_fragment_without_a_url_comes_through_brokers(
    direct: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock, tmp_path: Path
) -> None:
    await broker.write(NAME, b"0123")
    journal.roll(tmp_path)
    journal.stored[0].url = ""
    assert joined(await gather(direct.read(NAME))) == b"0123"
    assert clock.slept == 0


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP], ids=lambda codec: codec.name)
@pytest.mark.parametrize("damage", ["flipped", "short", "long"])
async def test_damage_in_the_store_is_found_before_delivery(
    direct: JournalClient, broker: FakeBroker, journal: FakeJournal, tmp_path: Path, codec: Codec, damage: str
) -> None:
    await broker.write(NAME, b"0123456789" * 100)
    fragment = journal.roll(tmp_path, codec)
    path = tmp_path / "fragments" / fragment.content_path
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0x55
    path.write_bytes(bytes(data[:-1]) if damage == "short" else bytes(data) + b"x" * (damage == "long"))
    # A broker may still have the content.
    assert joined(await gather(direct.read(NAME))) == b"0123456789" * 100
    # If no broker has it, the read fails without waiting.
    broker.at(CallPoint.READ_BEGUN, None, *[grpc.StatusCode.DATA_LOSS] * 10)
    chunks: list[Chunk] = []
    with pytest.raises(CorruptFragment):
        chunks = await gather(direct.read(NAME, block=True))
    assert chunks == []


async def test_begin_mod_time_is_passed_on(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    now = int(time.time())
    await gather(client.read(NAME, begin_mod_time=now))
    assert broker.requests[0].begin_mod_time == now


# -- Everything together -------------------------------------------------------------------------------------------

DISTURBANCES: list[Action | None] = [
    None,
    None,
    Break.CUT,
    Break.END,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
]
STATUSES: list[Action | None] = [
    None,
    Break.CUT,
    pb.NO_JOURNAL_PRIMARY_BROKER,
    pb.INSUFFICIENT_JOURNAL_BROKERS,
    pb.NOT_JOURNAL_BROKER,
]


@dataclass(frozen=True)
class History:
    """Content in fragments of each kind, the range to read, and disturbances of the read."""

    fragments: list[tuple[int, str]]
    chunk_sizes: list[int]
    begun: list[Action | None]
    metadata: list[Action | None]
    content: list[Action | None]
    range: tuple[int, int]
    block: bool
    direct: bool


histories = st.builds(
    History,
    fragments=st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from(["spool", "local", "store", "unreadable store"])),
        min_size=1,
        max_size=6,
    ),
    chunk_sizes=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    begun=st.lists(st.sampled_from(STATUSES), max_size=4),
    metadata=st.lists(st.sampled_from(DISTURBANCES), max_size=4),
    content=st.lists(st.sampled_from(DISTURBANCES), max_size=8),
    range=st.tuples(st.integers(0, 100), st.integers(0, 300)),
    block=st.booleans(),
    direct=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(history=histories)
async def test_every_byte_is_read_once_despite_disturbances(
    tmp_path_factory: pytest.TempPathFactory, history: History
) -> None:
    root = tmp_path_factory.mktemp("stores")
    async with FakeBroker() as broker:
        journal = broker.create(NAME)
        content = b""
        for length, kind in history.fragments:
            piece = bytes((len(content) + index) % 251 for index in range(length))
            content += piece
            await broker.write(NAME, piece)
            if kind == "local":
                journal.roll()
            elif kind != "spool":
                journal.roll(root)
            if kind == "unreadable store":
                journal.stored[-1].url = "file:///gone"
        sizes = itertools.cycle(history.chunk_sizes)
        broker.chunk_bytes = lambda: next(sizes)
        broker.at(CallPoint.READ_BEGUN, *history.begun)
        broker.at(CallPoint.READ_METADATA, *history.metadata)
        broker.at(CallPoint.READ_CONTENT, *history.content)
        begin, end = sorted(min(bound, len(content)) for bound in history.range)
        block = history.block and end > begin
        file_root = root if history.direct else None
        async with JournalClient(broker.endpoint, file_root=file_root, clock=HurriedClock()) as client:
            chunks = await gather(client.read(NAME, begin, end_offset=end, block=block))
        assert joined(chunks, begin) == (content[begin:end] if end else content)


async def test_a_long_waiting_read_logs_once_per_minute(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.READ_BEGUN, *[grpc.StatusCode.UNAVAILABLE] * 100)
    await broker.write(journal.spec.name, b"content")
    with capture_logs() as logs:
        async with contextlib.aclosing(client.read(journal.spec.name, 0, block=True)) as chunks:
            assert (await anext(chunks)).content == b"content"
    reports = [each for each in logs if each["event"] == "reader.waiting_for_brokers"]
    assert [each["seconds"] for each in reports] == sorted(each["seconds"] for each in reports)
    assert 4 <= len(reports) <= 6, "100 attempts take about five minutes"
    assert {each["journal"] for each in reports} == {journal.spec.name}


# -- Recreated journals --------------------------------------------------------------------------------------------


async def test_an_offset_of_an_earlier_journal_is_refused_immediately(
    client: JournalClient, broker: FakeBroker
) -> None:
    broker.has_ids = True
    broker.create(NAME)
    await broker.write(NAME, b"0123")
    (chunk,) = await gather(client.read(NAME))
    assert chunk.journal_id == broker.journals[NAME].journal_id
    broker.create(NAME)
    await broker.write(NAME, b"ab")
    for head in (b"ab", b"abcdefgh"):
        await broker.write(NAME, head[2:])
        for block in (True, False):
            with pytest.raises(JournalRecreated, match="deleted and created again") as error:
                await gather(client.read(NAME, chunk.end, block=block, journal_id=chunk.journal_id))
            assert (error.value.offset, error.value.head, error.value.known) == (4, len(head), chunk.journal_id)
            assert error.value.found == broker.journals[NAME].journal_id
    assert joined(await gather(client.read(NAME, 4, journal_id=error.value.found)), 4) == b"efgh"
    assert joined(await gather(client.read(NAME, 4)), 4) == b"efgh", "a position without an id is accepted"


async def test_a_running_read_detects_that_its_journal_was_recreated(
    client: JournalClient, broker: FakeBroker, clock: HurriedClock
) -> None:
    broker.has_ids = True
    broker.create(NAME)
    async with contextlib.aclosing(client.read(NAME, block=True)) as chunks:
        first = asyncio.create_task(anext(chunks))
        await broker.reached(CallPoint.READ_BEGUN)
        broker.create(NAME)
        broker.cut()
        await broker.reached(CallPoint.READ_BEGUN, 2)
        await broker.write(NAME, b"012")  # Nothing of the earlier journal was read, so no offset belongs to it.
        assert (await first).content == b"012"
        broker.create(NAME)
        await broker.write(NAME, b"abcdef")
        broker.cut()
        with pytest.raises(JournalRecreated) as error:
            await anext(chunks)
    assert (error.value.offset, error.value.head) == (3, 6)
