"""Numbered batches: each is decided once, with its progress, despite lost answers and other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from coranto import labels
from coranto.client import JournalClient
from coranto.errors import AppendOutcomeUnknown, CommitUnknown, CorruptData, Fenced
from coranto.messages.framing import Envelope
from coranto.messages.reading import ReadCommitted
from coranto.streams.control.lifecycle import Streams, default_template
from coranto.streams.control.scaling import Split
from coranto.streams.control.transaction_ends import open_lanes
from coranto.streams.model.batch_content import BATCH_REGISTER
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.stream import dead_letters_journal, transactions_journal
from coranto.streams.reader.stream_reader import StreamReader
from coranto.streams.writer.multi_key.batch_writer import BatchWriter
from coranto.streams.writer.multi_key.numbered import LastBatch, NumberedBatch
from coranto.testing.cluster import STORE_URL, Cluster

TEMPLATE = default_template(stores=[STORE_URL])
NAME = "loads"
LETTERS = dead_letters_journal("orders")


def events(numbers: Sequence[int]) -> tuple[list[str], list[bytes]]:
    """Return the keys and contents of events of two keys in different segments."""
    return ["a" if n % 2 else "customer-1" for n in numbers], [JsonEvents().encode({"n": n}) for n in numbers]


def batch(previous: LastBatch, to: int, *letters: int, complete: bool = False) -> NumberedBatch:
    return NumberedBatch(NAME, previous, {"to": to}, complete, [{"letter": each} for each in letters])


async def committed(client: JournalClient) -> list[int]:
    async with StreamReader[Any](client, "orders") as reader:
        return sorted([event.data["n"] async for event in reader])


async def letters(client: JournalClient) -> list[int]:
    content = await client.read_all(LETTERS, 0, await client.head(LETTERS))

    def read(begin: int, end: int | None) -> Iterator[Envelope[Any]]:
        return JsonEvents().decoder(LETTERS, begin).feed(content[begin:end], begin)

    return [each.message["letter"] for each in ReadCommitted(read, LETTERS)]


async def recorded(writer: BatchWriter[Any]) -> list[int]:
    last = await writer.last_batch(NAME)
    return [record["to"] async for record in writer.records(last, NAME)]


class Lossy:
    """A client that loses the answers to decisions, applied or not, a number of times."""

    def __init__(self, client: JournalClient, *, applied: bool, times: int = 1) -> None:
        self._client = client
        self._applied = applied
        self.left = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def append(self, journal: str, content: Any, **options: Any) -> Any:
        if not self.left or b'"decided"' not in (content if isinstance(content, bytes) else b"".join(content)):
            return await self._client.append(journal, content, **options)
        self.left -= 1
        if self._applied:
            await self._client.append(journal, content, **options)
        if options.get("retry_unknown") and not self.left:
            return await self._client.append(journal, content, **options)
        raise AppendOutcomeUnknown("the answer is lost")


async def test_progress_is_read_from_the_last_complete_record_of_successive_batches(
    streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    async with BatchWriter[Any](client, "orders") as writer:
        last = await writer.last_batch(NAME)
        assert (last.number, last.value) == (0, "")
        for number in range(4):
            last = await writer.commit_batch(
                batch(last, number, complete=number in (0, 2)), *events([2 * number, 2 * number + 1])
            )
            assert last.number == number + 1
        assert await recorded(writer) == [2, 3]
    assert await committed(client) == list(range(8))


async def test_only_one_of_two_processes_decides_a_batch(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    await streams.ensure_part("orders", LETTERS)
    async with BatchWriter[Any](client, "orders") as one, BatchWriter[Any](client, "orders") as other:
        previous = await other.last_batch(NAME)
        await one.commit_batch(batch(previous, 1, 10, complete=True), *events([0, 1]))
        with pytest.raises(Fenced, match="batch 1 of loads on stream orders was decided by another process"):
            await other.commit_batch(batch(previous, 1, 10, complete=True), *events([0, 1]))
        previous = await other.last_batch(NAME)
        assert await recorded(other) == [1]
        await other.commit_batch(batch(previous, 2, 11), *events([2]))
        with pytest.raises(Fenced):
            await one.commit_batch(batch(previous, 2, 11), *events([2]))
    assert await committed(client) == [0, 1, 2]
    assert await letters(client) == [10, 11]


@pytest.mark.parametrize("applied", [True, False])
async def test_a_decision_whose_answer_is_lost_counts_once(
    streams: Streams, client: JournalClient, applied: bool
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    lossy: Any = Lossy(client, applied=applied)
    async with BatchWriter[Any](lossy, "orders") as writer:
        last = await writer.commit_batch(batch(await writer.last_batch(NAME), 1, complete=True), *events([0, 1]))
        assert (lossy.left, last.number) == (0, 1)
        await writer.commit_batch(batch(last, 2), *events([2]))
        assert await recorded(writer) == [1, 2]
    assert await committed(client) == [0, 1, 2]
    content = await client.read_all(
        transactions_journal("orders"), 0, await client.head(transactions_journal("orders"))
    )
    assert content.count(b'"decided"') == 2


@pytest.mark.parametrize("applied", [True, False])
async def test_the_last_batch_resolves_an_unknown_outcome(
    streams: Streams, client: JournalClient, applied: bool
) -> None:
    await streams.create("orders", 2, template=TEMPLATE)
    lossy: Any = Lossy(client, applied=applied, times=2)
    async with BatchWriter[Any](lossy, "orders") as writer:
        previous = await writer.last_batch(NAME)
        with pytest.raises(CommitUnknown):
            await writer.commit_batch(batch(previous, 1, complete=True), *events([0, 1]))
        lossy.left = 0
        last = await writer.last_batch(NAME)
        assert last.number == int(applied)
        if not applied:
            await writer.commit_batch(batch(last, 1, complete=True), *events([0, 1]))
        assert await recorded(writer) == [1]
    assert await committed(client) == [0, 1]


async def test_a_batch_is_restarted_when_its_segments_are_split(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    async with BatchWriter[Any](client, "orders") as writer:
        last = await writer.commit_batch(batch(await writer.last_batch(NAME), 1, complete=True), *events([0, 1]))
        await streams.scale("orders", [Split(0)])
        await writer.commit_batch(batch(last, 2), *events([2, 3]))
        assert await recorded(writer) == [1, 2]
    assert await committed(client) == [0, 1, 2, 3]


async def test_a_batch_without_events_is_decided(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    async with BatchWriter[Any](client, "orders") as writer:
        await writer.commit_batch(batch(await writer.last_batch(NAME), 7, complete=True), [], [])
        assert await recorded(writer) == [7]


async def test_dead_letters_of_a_dead_process_are_dropped(
    cluster: Cluster, streams: Streams, client: JournalClient
) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    await streams.ensure_part("orders", LETTERS)
    lossy: Any = Lossy(client, applied=False, times=9)
    async with BatchWriter[Any](lossy, "orders") as writer:
        with pytest.raises(CommitUnknown):
            await writer.commit_batch(batch(await writer.last_batch(NAME), 1, 10, complete=True), *events([0]))
    assert len(await open_lanes(client, LETTERS)) == 1
    assert await streams.drop_lanes("orders") == 2
    assert await open_lanes(client, LETTERS) == ()
    assert await letters(client) == []


async def test_a_register_of_another_kind_of_writer_is_refused(streams: Streams, client: JournalClient) -> None:
    await streams.create("orders", 1, template=TEMPLATE)
    other = labels.label_set({BATCH_REGISTER + NAME: "3.abc.done"})
    await client.append(transactions_journal("orders"), b'{"done":"x"}\n', union_registers=other)
    async with BatchWriter[Any](client, "orders") as writer:
        with pytest.raises(CorruptData, match="another kind of writer has the same name"):
            await writer.last_batch(NAME)
