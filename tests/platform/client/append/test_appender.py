"""Appends: sent messages, the outcome of each failure, and retries."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from coranto.client import Appender, JournalClient, Suspend
from coranto.client.connection import REFUSALS
from coranto.errors import (
    AppendOutcomeUnknown,
    CorruptData,
    IndexHasGreaterOffset,
    InsufficientBrokers,
    InvalidInput,
    JournalNotFound,
    JournalSuspended,
    NoPrimaryBroker,
    NotAllowed,
    Outcome,
    RegisterMismatch,
    RpcFailed,
    StatusError,
    Unavailable,
    WrongAppendOffset,
    status_error,
)
from coranto.fragments.fragment import ZERO_SUM, sum_words
from coranto.labels import label_selector, label_set
from coranto.testing.clocks import HurriedClock
from coranto.testing.fake_broker import Break, CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"


async def test_content_is_committed_and_described(client: JournalClient, journal: FakeJournal) -> None:
    first = await client.append(NAME, b"hello ")
    second = await client.append(NAME, b"world")
    assert journal.content == b"hello world"
    assert (first.begin, first.end, second.begin, second.end) == (0, 6, 6, 11)
    assert second.sum == hashlib.sha1(b"world").digest()
    assert second.header.etcd.revision > 0
    assert second.journal == NAME


async def test_a_barrier_commits_nothing(client: JournalClient, journal: FakeJournal) -> None:
    await client.append(NAME, b"before")
    barrier = await client.append(NAME, b"")
    assert (barrier.begin, barrier.end, barrier.sum) == (6, 6, ZERO_SUM)
    assert journal.content == b"before"


async def test_large_content_is_sent_in_messages_of_at_most_a_mebibyte(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    content = bytes(range(256)) * (14 << 10)
    await client.append(NAME, [b"", b"he", b"ad", content])
    assert broker.content_sizes == [4, 1 << 20, 1 << 20, 1 << 20, 1 << 19]
    assert journal.content == b"head" + content


async def test_small_pieces_are_sent_together(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    await client.append(NAME, [bytes([number % 256]) * 700 for number in range(3000)])
    assert broker.content_sizes == [
        (1 << 20) // 700 * 700,
        (1 << 20) // 700 * 700,
        3000 * 700 % ((1 << 20) // 700 * 700),
    ]
    assert journal.content == b"".join(bytes([number % 256]) * 700 for number in range(3000))


async def test_an_iterable_is_one_append(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    result = await client.append(NAME, _pieces(b"a", b"b", b"c"))
    assert (result.end, journal.content, broker.count("Append")) == (3, b"abc", 1)


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


# -- Rolling back --------------------------------------------------------------------------------------------------


async def test_leaving_without_a_commit_rolls_back(client: JournalClient, journal: FakeJournal) -> None:
    async with client.appender(NAME) as append:
        await append.write(b"never")
    with pytest.raises(ZeroDivisionError):
        await _write_and_fail(client)
    assert (await client.append(NAME, b"yes")).begin == 0
    assert journal.content == b"yes"


async def _write_and_fail(client: JournalClient) -> None:
    async with client.appender(NAME) as append:
        await append.write(b"never")
        raise ZeroDivisionError


async def _write_for(seconds: float, append: Appender, piece: bytes) -> None:
    """Write until an error stops it."""
    async with asyncio.timeout(seconds):
        while True:
            await append.write(piece)


async def test_an_ended_appender_refuses_calls(client: JournalClient, journal: FakeJournal) -> None:
    append = client.appender(NAME)
    append.abort()
    with pytest.raises(InvalidInput, match="rolled back"):
        await append.write(b"late")
    append = client.appender(NAME)
    await append.commit()
    with pytest.raises(InvalidInput, match="committed"):
        await append.commit()


async def test_cancelling_a_write_rolls_back(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    broker.at(CallPoint.APPEND_BEGUN, Break.HANG)
    append = client.appender(NAME)
    with pytest.raises(TimeoutError):
        await _write_for(0.2, append, bytes(1 << 20))
    with pytest.raises(InvalidInput, match="rolled back"):
        await append.commit()
    await client.append(NAME, b"next")
    assert journal.content == b"next"


async def test_cancelling_a_commit_raises_a_cancellation(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_HALF_CLOSED, Break.HANG)
    append = asyncio.create_task(client.append(NAME, b"content", retry_unknown=True))
    await broker.reached(CallPoint.APPEND_HALF_CLOSED)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    assert broker.count("Append") == 1
    assert journal.content == b""


# -- Failing -------------------------------------------------------------------------------------------------------

TURNED_AWAY = sorted(REFUSALS, key=lambda code: code.name)
STATUSES = [status for status in pb.Status.values() if status != pb.OK]


@pytest.mark.parametrize("status", STATUSES, ids=pb.Status.Name)
@pytest.mark.parametrize("point", [CallPoint.APPEND_BEGUN, CallPoint.APPEND_CONTENT], ids=lambda point: point.name)
async def test_every_status_has_its_own_error_and_applies_nothing(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, status: pb.Status.ValueType, point: CallPoint
) -> None:
    broker.at(point, status)
    with pytest.raises(type(status_error(status, ""))) as caught:
        await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.status == status
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert caught.value.header is not None
    assert NAME in str(caught.value)
    assert journal.content == b""


async def test_an_unknown_status_is_an_error(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    broker.at(CallPoint.APPEND_BEGUN, 99)
    with pytest.raises(StatusError, match="99"):
        await client.append(NAME, b"content")
    assert journal.content == b""


async def test_a_refusal_while_streaming_is_raised_to_the_writer(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_CONTENT, None, pb.NOT_ALLOWED)
    append = client.appender(NAME)
    with pytest.raises(NotAllowed):
        await _write_for(120, append, bytes(1 << 18))
    assert journal.content == b""


async def test_an_append_without_a_listening_broker_is_unavailable(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    await broker.refuse()
    with pytest.raises(Unavailable) as caught:
        await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert broker.endpoint in str(caught.value)


async def test_connecting_may_take_some_time(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.refuse()
    serve = broker._proxy._serve

    async def serve_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.7)  # As on a busy machine.
        await serve(reader, writer)

    monkeypatch.setattr(broker._proxy, "_serve", serve_late)
    await broker.accept()
    await client.append(NAME, b"content", retry_timeout=0)
    assert journal.content == b"content"


async def test_a_connection_that_breaks_before_the_commit_applies_nothing(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_CONTENT, Break.CUT)
    append = client.appender(NAME)
    with pytest.raises(Unavailable) as caught:
        await _write_for(120, append, bytes(1000))
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert journal.content == b""
    assert broker.count("Append") == 1


_KNOWN = (grpc.StatusCode.OK, grpc.StatusCode.ABORTED, *TURNED_AWAY)
UNKNOWN = [Break.CUT, *(code for code in grpc.StatusCode if code not in _KNOWN)]


@pytest.mark.parametrize("action", UNKNOWN, ids=lambda action: action.name)
@pytest.mark.parametrize("applied", [False, True], ids=["not applied", "applied"])
async def test_an_answer_lost_after_the_commit_leaves_the_outcome_unknown(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, action: Break | grpc.StatusCode, applied: bool
) -> None:
    broker.at(CallPoint.APPEND_APPLIED if applied else CallPoint.APPEND_HALF_CLOSED, action)
    with pytest.raises(AppendOutcomeUnknown, match="append again if readers discard duplicates") as caught:
        await client.append(NAME, b"content")
    assert caught.value.outcome is Outcome.UNKNOWN
    assert journal.content == (b"content" if applied else b"")
    assert broker.count("Append") == 1


@pytest.mark.parametrize("code", TURNED_AWAY, ids=lambda code: code.name)
@pytest.mark.parametrize("point", [CallPoint.APPEND_BEGUN, CallPoint.APPEND_HALF_CLOSED], ids=lambda point: point.name)
async def test_a_rejected_call_was_not_applied(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, code: grpc.StatusCode, point: CallPoint
) -> None:
    broker.at(point, code)
    with pytest.raises(RpcFailed, match=code.name) as caught:
        await client.append(NAME, b"content", retry_unknown=True)
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert caught.value.code == code.name
    assert journal.content == b""
    assert broker.count("Append") == 1


async def test_an_append_rolled_back_as_too_slow_is_repeated(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_HALF_CLOSED, grpc.StatusCode.ABORTED)
    with pytest.raises(Unavailable, match="ABORTED") as caught:
        await client.append(NAME, b"content", retry_timeout=0)
    assert caught.value.outcome is Outcome.NOT_APPLIED
    assert journal.content == b""
    broker.at(CallPoint.APPEND_HALF_CLOSED, grpc.StatusCode.ABORTED)
    await client.append(NAME, b"content")
    assert journal.content == b"content"


async def test_closing_the_client_leaves_the_outcome_of_a_commit_unknown(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_HALF_CLOSED, Break.HANG)
    append = asyncio.create_task(client.append(NAME, b"content"))
    await broker.reached(CallPoint.APPEND_HALF_CLOSED)
    await client.close()
    with pytest.raises(AppendOutcomeUnknown):
        await append


async def test_closing_the_client_ends_an_append_before_its_commit(client: JournalClient, journal: FakeJournal) -> None:
    append = client.appender(NAME)
    await append.write(b"content")
    await client.close()
    with pytest.raises(Unavailable):
        await append.commit()
    assert journal.content == b""


# -- Checks of the broker's answers --------------------------------------------------------------------------------


def _other_sum(response: pb.AppendResponse) -> None:
    response.commit.sum.part1 ^= 1


def _other_length(response: pb.AppendResponse) -> None:
    response.commit.end += 1


def _no_commit(response: pb.AppendResponse) -> None:
    response.ClearField("commit")


def _no_registers(response: pb.AppendResponse) -> None:
    response.ClearField("registers")


def _no_etcd(response: pb.AppendResponse) -> None:
    response.header.ClearField("etcd")


@pytest.mark.parametrize("tamper", [_other_sum, _other_length, _no_commit, _no_registers, _no_etcd])
async def test_an_answer_that_contradicts_the_request_is_refused(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, tamper: Callable[[pb.AppendResponse], None]
) -> None:
    broker.tamper = tamper
    with pytest.raises(CorruptData, match=NAME):
        await client.append(NAME, b"content", retry_unknown=True)
    assert broker.count("Append") == 1


@pytest.mark.parametrize("empty", [ZERO_SUM, hashlib.sha1().digest()], ids=["zeros", "SHA-1 of nothing"])
async def test_a_barrier_may_be_answered_with_either_sum_of_empty_content(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, empty: bytes
) -> None:
    part1, part2, part3 = sum_words(empty)
    broker.tamper = lambda response: response.commit.sum.CopyFrom(pb.SHA1Sum(part1=part1, part2=part2, part3=part3))
    assert (await client.append(NAME, b"")).sum == ZERO_SUM


@pytest.mark.parametrize("name", ["", "/rooted", "a//b", "abc", "with space"])
async def test_invalid_names_are_not_sent(client: JournalClient, broker: FakeBroker, name: str) -> None:
    with pytest.raises(InvalidInput):
        await client.append(name, b"content")
    with pytest.raises(InvalidInput):
        client.appender("good/name", offset=-1)
    assert broker.calls == []


# -- Conditions ----------------------------------------------------------------------------------------------------


async def test_registers_are_checked_and_changed(client: JournalClient, journal: FakeJournal) -> None:
    mine = label_selector(include={"author": "me"}.items())
    first = await client.append(NAME, b"1", check_registers=mine, union_registers=label_set(author="me", more="x"))
    assert first.registers == label_set(author="me", more="x")
    await client.append(NAME, b"2", check_registers=mine, subtract_registers=label_set(more="x"))
    with pytest.raises(RegisterMismatch) as caught:
        await client.append(NAME, b"3", check_registers=label_selector(include={"author": "you"}.items()))
    assert caught.value.registers == label_set(author="me")
    assert journal.content == b"12"


async def test_an_offset_makes_an_append_happen_at_most_once(client: JournalClient, journal: FakeJournal) -> None:
    await client.append(NAME, b"12345")
    await client.append(NAME, b"6", offset=5)
    with pytest.raises(WrongAppendOffset, match=r"at offset 5: WRONG_APPEND_OFFSET.*nothing was applied"):
        await client.append(NAME, b"6", offset=5)
    assert journal.content == b"123456"


# -- Retries -------------------------------------------------------------------------------------------------------

TRANSIENT = [pb.NO_JOURNAL_PRIMARY_BROKER, pb.NOT_JOURNAL_PRIMARY_BROKER, pb.INSUFFICIENT_JOURNAL_BROKERS]


@pytest.mark.parametrize("status", TRANSIENT, ids=pb.Status.Name)
async def test_appends_are_retried_while_brokers_cannot_serve(
    client: JournalClient,
    broker: FakeBroker,
    journal: FakeJournal,
    clock: HurriedClock,
    status: pb.Status.ValueType,
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, *[status] * 7)
    await client.append(NAME, [b"con", b"tent"])
    assert journal.content == b"content"
    assert broker.count("Append") == 8
    assert clock.slept == pytest.approx(0.05 * 2 + 0.1 * 2 + 0.25 + 0.5 + 1)


async def test_retries_end_at_the_retry_timeout(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, *[pb.NO_JOURNAL_PRIMARY_BROKER] * 10)
    with pytest.raises(NoPrimaryBroker):
        await client.append(NAME, b"content", retry_timeout=2)
    assert clock.slept <= 2
    assert broker.count("Append") == 7


async def test_a_broker_that_returns_is_found(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    await client.append(NAME, b"before ")
    await broker.refuse()
    with pytest.raises(Unavailable):
        await client.append(NAME, b"never", retry_timeout=0)
    await broker.accept()
    async with JournalClient(broker.endpoint, retry_timeout=120) as retrying:
        await retrying.append(NAME, b"after")
    assert journal.content == b"before after"


async def test_other_refusals_are_not_retried(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    with pytest.raises(JournalNotFound):
        await client.append("no/such/journal", b"content")
    assert broker.count("Append") == 1


async def test_an_unknown_outcome_is_repeated_only_on_request(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_APPLIED, Break.CUT)
    broker.at(CallPoint.APPEND_HALF_CLOSED, None, grpc.StatusCode.UNAVAILABLE)
    result = await client.append(NAME, b"once or twice;", retry_unknown=True)
    assert broker.count("Append") == 3
    assert journal.content == b"once or twice;once or twice;"
    assert result.begin == 14
    assert result.may_repeat


async def test_an_append_refused_before_it_was_applied_cannot_repeat(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    broker.at(CallPoint.APPEND_CONTENT, pb.INSUFFICIENT_JOURNAL_BROKERS)
    result = await client.append(NAME, b"once;", retry_unknown=True)
    assert broker.count("Append") == 2
    assert not result.may_repeat


async def test_an_iterable_is_read_only_once(client: JournalClient, broker: FakeBroker, journal: FakeJournal) -> None:
    broker.at(CallPoint.APPEND_CONTENT, pb.INSUFFICIENT_JOURNAL_BROKERS)
    with pytest.raises(InsufficientBrokers):
        await client.append(NAME, _pieces(b"a", b"b"), retry_unknown=True)
    assert (journal.content, broker.count("Append")) == (b"", 1)


async def test_an_iterable_is_kept_while_no_broker_listens(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, clock: HurriedClock
) -> None:
    await broker.refuse()
    append = asyncio.create_task(client.append(NAME, _pieces(b"a", b"b"), retry_timeout=math.inf))
    await clock.has_slept.wait()
    await broker.accept()
    await append
    assert journal.content == b"ab"


async def test_an_append_controls_the_suspension_of_its_journal(
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
