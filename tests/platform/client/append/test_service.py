"""The batching service: ordered within a journal, parallel across journals, bounded, with accurate errors."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.client import AppendService, JournalClient
from coranto.errors import InvalidInput, NotAllowed, WrongAppendOffset
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import Action, Break, CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"


async def test_small_appends_share_a_batch_and_each_gets_its_offsets(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    async with AppendService(client) as service:
        placed = [await service.append(NAME, f"{number},".encode()) for number in range(100)]
    assert journal.content == b"".join(f"{number},".encode() for number in range(100))
    assert broker.count("Append") == 1
    for number, future in enumerate(placed):
        appended = await future
        assert journal.content[appended.begin : appended.end] == f"{number},".encode()
        assert appended.batch.end == len(journal.content)


async def test_content_that_arrives_during_an_append_joins_the_next_one(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    service = AppendService(client)
    first = await service.append(NAME, b"first,")
    await broker.reached(CallPoint.APPEND_BEGUN)
    later = [await service.append(NAME, b"later,") for _ in range(10)]
    broker.cut()
    await asyncio.gather(first, *later)
    assert journal.content == b"first," + b"later," * 10
    assert broker.count("Append") == 3


async def test_batches_are_bounded(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    async with AppendService(client, batch_bytes=10) as service:
        for piece in (b"1234", b"5678", b"90ab", b"a piece that is larger than a batch", b"c"):
            await service.append(NAME, piece)
    assert broker.count("Append") == 4
    assert journal.content == b"1234567890aba piece that is larger than a batchc"


async def test_journals_do_not_wait_for_each_other(client: JournalClient, broker: FakeBroker) -> None:
    broker.create("slow/journal")
    broker.create("fast/journal")
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    service = AppendService(client)
    slow = await service.append("slow/journal", b"slow")
    await broker.reached(CallPoint.APPEND_BEGUN)
    await (await service.append("fast/journal", b"fast"))
    assert not slow.done()
    await service.cancel()
    assert slow.cancelled()
    assert service.pending_bytes == 0


async def test_content_above_the_limit_waits_in_fifo_order(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    service = AppendService(client, pending_bytes=10)
    await service.append(NAME, b"12345678")
    await broker.reached(CallPoint.APPEND_BEGUN)
    waiting = [asyncio.create_task(service.append(NAME, piece)) for piece in (b"abc", b"d", b"a very large piece")]
    done, _ = await asyncio.wait(waiting, timeout=0.05)
    assert not done, "the small piece does not overtake the earlier one"
    assert service.pending_bytes == 8
    waiting[1].cancel()
    broker.cut()
    await asyncio.wait(waiting)
    await service.flush()
    assert journal.content == b"12345678abca very large piece"
    assert service.pending_bytes == 0


async def test_unknown_outcomes_are_retried_unless_disabled(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_APPLIED, Break.CUT)
    async with AppendService(client) as service:
        placed = await service.append(NAME, b"twice,")
    assert journal.content == b"twice,twice,"
    assert (await placed).begin == 6
    broker.at(CallPoint.APPEND_APPLIED, Break.CUT)
    service = AppendService(client, retry_unknown=False)
    once = await service.append(NAME, b"once,")
    with pytest.raises(Exception, match="answer to its commit"):
        await once
    assert journal.content == b"twice,twice,once,"


async def test_a_failure_stops_the_journal_until_it_is_reset(client: JournalClient, broker: FakeBroker) -> None:
    broker.create(NAME)
    broker.create("other/journal")
    broker.at(CallPoint.APPEND_CONTENT, pb.NOT_ALLOWED)
    service = AppendService(client, batch_bytes=1)
    placed = [await service.append(NAME, b"x") for _ in range(3)]
    for future in placed:
        with pytest.raises(NotAllowed):
            await future
    with pytest.raises(NotAllowed):
        await (await service.append(NAME, b"later"))
    await (await service.append("other/journal", b"fine"))
    with pytest.raises(NotAllowed):
        await service.flush()
    assert service.pending_bytes == 0
    service.reset(NAME)
    await (await service.append(NAME, b"again"))
    await service.flush()
    assert broker.journals[NAME].content == b"again"


async def test_leaving_with_an_exception_drops_pending_content(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    service = AppendService(client)
    with pytest.raises(WrongAppendOffset):
        await _append_and_fail(service, broker)
    assert service.pending_bytes == 0
    assert journal.content == b""


async def _append_and_fail(service: AppendService, broker: FakeBroker) -> None:
    async with service:
        await service.append(NAME, b"content")
        await broker.reached(CallPoint.APPEND_BEGUN)
        raise WrongAppendOffset("a failure of the caller's own")


async def test_limits_must_be_positive(client: JournalClient) -> None:
    with pytest.raises(InvalidInput):
        AppendService(client, batch_bytes=0)
    with pytest.raises(InvalidInput):
        AppendService(client, pending_bytes=-1)


FAULTS: list[Action | None] = [None, grpc.StatusCode.UNAVAILABLE, Break.CUT]


@settings(max_examples=30, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=40),
    batch_bytes=st.integers(1, 60),
    pending_bytes=st.integers(1, 200),
    before=st.lists(st.sampled_from([*FAULTS, pb.NO_JOURNAL_PRIMARY_BROKER]), max_size=6),
    after=st.lists(st.sampled_from(FAULTS), max_size=3),
)
async def test_every_piece_is_at_its_reported_offsets_and_in_order(
    pieces: list[tuple[str, int]],
    batch_bytes: int,
    pending_bytes: int,
    before: list[Action | None],
    after: list[Action | None],
) -> None:
    async with FakeBroker() as broker, JournalClient(broker.endpoint, clock=HurriedClock()) as client:
        for name in "ab":
            broker.create(f"{name}/journal")
        broker.at(CallPoint.APPEND_BEGUN, *before)
        broker.at(CallPoint.APPEND_APPLIED, *after)
        async with AppendService(client, batch_bytes=batch_bytes, pending_bytes=pending_bytes) as service:
            placed = []
            for number, (name, length) in enumerate(pieces):
                content = bytes([number]) * length
                placed.append((name, content, await service.append(f"{name}/journal", content)))
        ends = {"a": 0, "b": 0}
        for name, content, future in placed:
            appended = future.result()
            assert broker.journals[f"{name}/journal"].content[appended.begin : appended.end] == content
            assert appended.begin >= ends[name]
            ends[name] = appended.end
