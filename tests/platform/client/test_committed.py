"""Publishers and committed readers over the clients, against a fake broker."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.client import JournalClient
from coranto.client.committed import async_committed_reader, committed_messages, committed_reader
from coranto.client.sync import SyncJournalClient
from coranto.errors import InvalidInput, JournalRecreated, OffsetJump
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.messages.framing import Envelope, JsonLines, JsonObject
from coranto.messages.publisher import Publisher, SyncPublisher
from coranto.messages.sequencer import QueueOutcome, Sequencer
from coranto.messages.uuids import Flags, ProducerClock, build_uuid, new_producer_id
from coranto.testing.command_line import RemoteBroker
from coranto.testing.fake_broker import FakeBroker

JOURNAL = "a/journal"
LINES = JsonLines()


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker() as broker:
        broker.create(JOURNAL)
        yield broker


@pytest.fixture
async def client(broker: FakeBroker) -> AsyncIterator[JournalClient]:
    async with JournalClient(broker.endpoint) as client:
        yield client


def publisher(client: JournalClient, clock: ProducerClock) -> Publisher[JsonObject]:
    return Publisher(client.append, producer=new_producer_id(os.urandom), clock=clock, framing=LINES)


def texts(messages: list[Envelope[JsonObject]]) -> list[str]:
    return [message.message["text"] for message in messages]


async def test_a_reader_follows_transactions_as_they_are_acknowledged(client: JournalClient) -> None:
    clock = ProducerClock(lambda: 0)
    alone, in_transactions = publisher(client, clock), publisher(client, clock)
    reader = async_committed_reader(client, JOURNAL, LINES, block=True, ring_size=3)

    async with contextlib.aclosing(reader):
        await in_transactions.add(JOURNAL, {"text": "one"})
        await in_transactions.flush()
        await alone.publish(JOURNAL, {"text": "two"})
        await alone.flush()
        await in_transactions.commit()
        transactions = reader.transactions()
        read = [await anext(transactions), await anext(transactions)]
        assert [texts(list(one.messages)) for one in read] == [["two"], ["one"]]
        assert [one.producer for one in read] == [alone.producer, in_transactions.producer]

        # Enough of both to need a replay.
        for text in ("three", "five", "seven", "nine"):
            await in_transactions.add(JOURNAL, {"text": text})
            await in_transactions.flush()
            await alone.publish(JOURNAL, {"text": f"after {text}"})
            await alone.flush()
        await in_transactions.commit()
        read = [await anext(transactions) for _ in range(5)]
        assert [texts(list(one.messages)) for one in read] == [
            ["after three"],
            ["after five"],
            ["after seven"],
            ["after nine"],
            ["three", "five", "seven", "nine"],
        ]
        assert reader.source().read_through == await client.head(JOURNAL)


async def test_published_messages_are_in_the_journal_byte_for_byte(client: JournalClient, broker: FakeBroker) -> None:
    clock = ProducerClock(lambda: 0)
    one = publisher(client, clock)
    await one.publish(JOURNAL, {"text": "hello"})
    await one.add("b/journal", {"text": "pending"})
    broker.create("b/journal")
    await one.commit()
    first = clock.last - 2 * 160
    content = broker.journals[JOURNAL].content
    assert content == LINES.marshal({"text": "hello"}, build_uuid(one.producer, first, Flags.OUTSIDE_TXN))
    [pending, ack] = broker.journals["b/journal"].content.splitlines(keepends=True)
    assert pending == LINES.marshal({"text": "pending"}, build_uuid(one.producer, first + 160, Flags.CONTINUE_TXN))
    assert ack == LINES.acknowledgement(build_uuid(one.producer, first + 320, Flags.ACK_TXN))


async def test_a_replay_of_removed_messages_is_an_error(
    client: JournalClient, broker: FakeBroker, tmp_path: Path
) -> None:
    one = publisher(client, ProducerClock(lambda: 0))
    for text in ("a", "b", "c"):
        await one.add(JOURNAL, {"text": text})
        await one.flush()
        broker.journals[JOURNAL].roll(tmp_path)
    reader = async_committed_reader(client, JOURNAL, LINES)
    assert [message async for message in reader] == []
    source = reader.source()
    end = await client.head(JOURNAL)
    await one.commit()
    broker.journals[JOURNAL].drop_before(end // 3)
    with pytest.raises(OffsetJump):
        _ = [message async for message in async_committed_reader(client, JOURNAL, LINES, source)]


def test_the_blocking_reader_continues_from_its_source(remote: RemoteBroker) -> None:
    remote.fake.create(JOURNAL)
    with SyncJournalClient(remote.fake.endpoint) as client:
        one = SyncPublisher(
            client.append, producer=new_producer_id(os.urandom), clock=ProducerClock(lambda: 0), framing=LINES
        )
        reader = committed_reader(client, JOURNAL, LINES)
        assert list(reader) == []
        source = reader.source()
        for text in ("a", "b", "c"):
            one.add(JOURNAL, {"text": text})
        one.commit()
        one.publish(JOURNAL, {"text": "d"})
        one.flush()
        reader = committed_reader(client, JOURNAL, LINES, source, block=True)
        assert texts(list(itertools.islice(reader, 2))) == ["a", "b"]
        source = reader.source()
        reader.close()
        head = client.head(JOURNAL)
        assert texts(list(committed_reader(client, JOURNAL, LINES, source, end=head))) == ["c", "d"]
        assert texts(list(committed_messages(client, JOURNAL, LINES))) == ["a", "b", "c", "d"]
        assert list(committed_messages(client, JOURNAL, LINES, begin=head)) == []
        with pytest.raises(InvalidInput, match=f"nothing to read from offset {head} up to {head}"):
            committed_reader(client, JOURNAL, LINES, Source(head), end=head)


async def test_a_sequencer_of_two_journals_is_fed_manually(client: JournalClient, broker: FakeBroker) -> None:
    broker.create("b/journal")
    one = publisher(client, ProducerClock(lambda: 0))
    for journal in (JOURNAL, "b/journal"):
        await one.add(journal, {"text": journal})
    await one.commit()
    sequencer: Sequencer[JsonObject] = Sequencer()
    outcomes, delivered = [], []
    for journal in (JOURNAL, "b/journal"):
        decoder = LINES.decoder(journal, 0)
        async for chunk in client.read(journal):
            for envelope in decoder.feed(chunk.content, chunk.offset):
                outcomes.append(sequencer.queue(envelope))
                delivered += iter(sequencer.step, None)
    assert outcomes == [QueueOutcome.CONTINUE_BEGIN, QueueOutcome.ACK_COMMIT_RING] * 2
    assert [(message.journal, message.flags) for message in delivered] == [
        (journal, flags) for journal in (JOURNAL, "b/journal") for flags in (Flags.CONTINUE_TXN, Flags.ACK_TXN)
    ]
    assert set(sequencer.checkpoint()) == {JOURNAL, "b/journal"}


async def test_a_source_of_an_earlier_journal_is_refused_and_one_without_an_id_gets_one(
    client: JournalClient, broker: FakeBroker
) -> None:
    broker.has_ids = True
    broker.create(JOURNAL)
    one = publisher(client, ProducerClock(lambda: 0))
    await one.publish(JOURNAL, {"text": "a"})
    await one.flush()
    reader = async_committed_reader(client, JOURNAL, LINES)
    assert texts([each async for each in reader]) == ["a"]
    source = reader.source()
    assert source.journal_id == broker.journals[JOURNAL].journal_id
    assert Checkpoint.from_bytes(Checkpoint({JOURNAL: source}).to_bytes()).sources[JOURNAL].journal_id

    broker.create(JOURNAL)
    two = publisher(client, ProducerClock(lambda: 0))
    for text in ("b", "c", "d"):
        await two.publish(JOURNAL, {"text": text})
    await two.flush()
    with pytest.raises(JournalRecreated, match="Begin at offset 0"):
        [each async for each in async_committed_reader(client, JOURNAL, LINES, source)]
    old = async_committed_reader(client, JOURNAL, LINES, replace(source, journal_id=""))
    assert texts([each async for each in old]) == ["c", "d"]
    assert old.source().journal_id == broker.journals[JOURNAL].journal_id
    assert texts([each async for each in async_committed_reader(client, JOURNAL, LINES, Source())]) == ["b", "c", "d"]


async def test_a_reader_stops_at_lost_content(broker: FakeBroker, client: JournalClient) -> None:
    broker.has_ids = True
    broker.create(JOURNAL)
    clock = ProducerClock(lambda: 0)

    async def publish(*found: str) -> int:
        writer = publisher(client, clock)
        for text in found:
            await writer.add(JOURNAL, {"text": text})
        await writer.commit()
        return broker.journals[JOURNAL].head

    async def read(source: Source) -> tuple[list[str], Source]:
        reader = async_committed_reader(client, JOURNAL, LINES, source)
        return texts([each async for each in reader]), reader.source()

    kept = await publish("a")
    at_kept = (await read(Source()))[1]
    await publish("b")
    found, behind = await read(at_kept)
    assert found == ["b"]
    broker.journals[JOURNAL].fall(kept)
    assert await publish("c", "d", "e") > behind.read_through
    with pytest.raises(JournalRecreated, match=f"Begin at offset {kept}: the content there was not read"):
        await read(behind)
    found, source = await read(at_kept)
    assert found == ["c", "d", "e"]
    assert source.journal_id == broker.journals[JOURNAL].journal_id != at_kept.journal_id
    assert await read(source.after_head_fell(kept, source.journal_id)) == ([], source), (
        "they are known and not read again"
    )
