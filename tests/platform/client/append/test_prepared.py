"""Appends that begin before their content is known."""

from __future__ import annotations

import asyncio

import pytest

from coranto.client import JournalClient
from coranto.client.append.prepared import PreparedAppend
from coranto.errors import CorantoError, CorruptData, RegisterMismatch
from coranto.labels import label_selector, label_set
from coranto.testing.fake_broker import CallPoint, FakeBroker, FakeJournal
from coranto.wire import protocol_pb2 as pb

NAME = "test/journal"


def prepare(client: JournalClient, **parameters: pb.LabelSelector | pb.LabelSet) -> PreparedAppend:
    return client.prepare(pb.AppendRequest(journal=NAME, **parameters))  # type: ignore[arg-type]


async def test_a_begun_append_is_committed_by_the_same_call(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    append = prepare(client, union_registers=label_set(by="us"))
    append.begin()
    result = await append.commit(b"content")
    assert (result.begin, result.end, journal.content, broker.count("Append")) == (0, 7, b"content", 1)
    assert journal.registers == label_set(by="us")
    append.abort()  # Does nothing after the commit.
    again = prepare(client, check_registers=label_selector(include={"by": "them"}))
    again.begin()
    with pytest.raises(RegisterMismatch):
        await again.commit([b"more ", b"content"])
    assert journal.content == b"content"


@pytest.mark.parametrize("times", [1, 3])
async def test_a_begun_call_that_is_refused_temporarily_is_repeated(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, times: int
) -> None:
    broker.at(CallPoint.APPEND_BEGUN, *[pb.NO_JOURNAL_PRIMARY_BROKER] * times)
    append = prepare(client)
    append.begin()
    assert (await append.commit(b"content")).end == 7
    assert (journal.content, broker.count("Append")) == (b"content", times + 1)


async def test_an_aborted_append_leaves_nothing(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal
) -> None:
    append = prepare(client)
    append.begin()
    await asyncio.sleep(0)  # The call is opened.
    append.abort()
    assert (await client.append(NAME, b"other")).begin == 0
    assert journal.content == b"other"


async def test_content_that_cannot_be_sent_ends_the_call(client: JournalClient, journal: FakeJournal) -> None:
    append = prepare(client)
    append.begin()
    with pytest.raises(TypeError):
        await append.commit([b"bytes", "text"])  # type: ignore[list-item]
    assert (await client.append(NAME, b"other")).begin == 0
    assert journal.content == b"other"


async def test_an_error_while_opening_a_call_is_raised_by_the_commit(broker: FakeBroker) -> None:
    client = JournalClient(broker.endpoint)
    await client.close()
    append = prepare(client)
    append.begin()
    with pytest.raises(CorantoError, match=r"this client of .* was closed"):
        await append.commit(b"content")


@pytest.mark.parametrize("parts", ["registers", "commit"])
async def test_unread_registers_are_not_validated_but_the_rest_is(
    client: JournalClient, broker: FakeBroker, journal: FakeJournal, parts: str
) -> None:
    def tamper(response: pb.AppendResponse) -> None:
        if parts == "registers":
            response.registers.labels.add(name="not a name")
        else:
            response.commit.begin = -1

    broker.tamper = tamper
    with pytest.raises(CorruptData, match=parts):
        await prepare(client).commit(b"content")
    parameters = pb.AppendRequest(journal=NAME)
    unread = client.prepare(parameters, registers=False).commit(b"content")
    if parts == "registers":
        assert (await unread).end == 14
    else:
        with pytest.raises(CorruptData, match=parts):
            await unread
