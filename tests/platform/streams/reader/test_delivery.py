"""Segments as sources of whole transactions, and their merging, on in-memory journals."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from coranto.client import JournalClient
from coranto.errors import CorruptMessage, TornMessage
from coranto.messages.framing import JsonObject
from coranto.messages.uuids import CLOCK_TICK, Flags, ProducerId, build_uuid, clock_from_ns
from coranto.streams.model.events import JsonEvents
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.positions import SegmentPosition
from coranto.streams.model.stream import Segment
from coranto.streams.reader.delivery import SegmentPool, SegmentSource, StreamTransaction
from coranto.testing.memory_journals import MemoryJournals
from tests.platform.streams.random_streams import segment

FORMAT = JsonEvents()


class Journal:
    """A segment in memory, and its written content."""

    def __init__(self, number: int = 0) -> None:
        self.segment: Segment = segment(number, KeyRange.FULL)
        self.journals = MemoryJournals(self.segment.journal)
        self.clock = 1000

    @property
    def client(self) -> JournalClient:
        return cast(JournalClient, self.journals)

    @property
    def head(self) -> int:
        return len(self.journals.journals[self.segment.journal].content)

    def write(self, producer: int, flags: Flags, n: int | None = None) -> None:
        self.clock += CLOCK_TICK
        uuid = build_uuid(ProducerId(bytes([1, 0, 0, 0, 0, producer])), self.clock, flags)
        content = FORMAT.acknowledgement(uuid) if n is None else FORMAT.marshal({"n": n}, uuid)
        self.journals.journals[self.segment.journal].write(content)

    def source(
        self, position: SegmentPosition | None = None, *, end: int | None = None, **options: Any
    ) -> SegmentSource[JsonObject]:
        options.setdefault("wake", lambda number: None)
        return SegmentSource(self.client, self.segment, FORMAT, position or SegmentPosition(0), end=end, **options)


def numbers(transaction: StreamTransaction[JsonObject]) -> list[int]:
    return [event.data["n"] for event in transaction.events]


async def taken(source: SegmentSource[JsonObject], rng: random.Random | None = None) -> list[list[int]]:
    """Take all transactions up to the end. With `rng`, cancel some calls at any wait."""
    found = []
    while not source.is_finished:
        call = asyncio.ensure_future(source.take())
        for _ in range(rng.randrange(6) if rng is not None else 0):
            await asyncio.sleep(0)
        if rng is not None and rng.random() < 0.5:
            call.cancel()
        await asyncio.wait([call])
        if not call.cancelled() and (transaction := call.result()) is not None:
            found.append(numbers(transaction))
        await asyncio.sleep(0)
    return found


def interleaved(journal: Journal, rng: random.Random) -> list[list[int]]:
    """Write interleaved transactions of five producers, some rolled back and some still open at the end."""
    open_: dict[int, list[int]] = {}
    last_ack: dict[int, int] = {}
    committed, n = [], 0
    for _ in range(120):
        producer = rng.randrange(5)
        kind = rng.random()
        if kind < 0.6:
            journal.write(producer, Flags.CONTINUE_TXN, n)
            open_.setdefault(producer, []).append(n)
            n += 1
        elif kind < 0.7 and producer not in open_:
            journal.write(producer, Flags.OUTSIDE_TXN, n)
            committed.append([n])
            n += 1
        elif kind < 0.95:
            journal.write(producer, Flags.ACK_TXN)
            last_ack[producer] = journal.clock
            if events := open_.pop(producer, None):
                committed.append(events)
        elif producer in last_ack:
            # Its last acknowledgement again rolls back later events.
            clock, journal.clock = journal.clock, last_ack[producer] - CLOCK_TICK
            journal.write(producer, Flags.ACK_TXN)
            journal.clock = clock
            open_.pop(producer, None)
    return committed


@pytest.mark.parametrize("seed", range(8))
async def test_transactions_stay_whole_for_any_ring_size_and_cancellation(seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal()
    committed = interleaved(journal, rng)
    journal.journals.piece_bytes = lambda: rng.randint(1, 400)
    for ring_size in (1, 3, 1000):
        source = journal.source(end=journal.head, ring_size=ring_size, read_ahead=300)
        assert await taken(source, rng) == committed
        assert source.position.offset == journal.head
        await asyncio.wait([source.close()])


@pytest.mark.parametrize("off", [25 * 3600, -25 * 3600, 10**9])
async def test_a_writer_whose_clock_is_off_causes_no_lost_transaction(
    monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    """Producers are pruned after each message, where possible."""
    monkeypatch.setattr("coranto.streams.reader.delivery._FIRST_PRUNE", 1)
    monkeypatch.setattr("coranto.streams.reader.delivery._PRUNE_EVERY", 1)
    journal, now = Journal(), 1_900_000_000
    right = clock_from_ns(now * 10**9)
    wrong = clock_from_ns((now + off) * 10**9)
    journal.clock = right
    journal.write(1, Flags.CONTINUE_TXN, 0)
    journal.write(2, Flags.OUTSIDE_TXN, 1)
    journal.clock = wrong
    journal.write(3, Flags.CONTINUE_TXN, 2)
    journal.write(3, Flags.ACK_TXN)
    journal.write(3, Flags.CONTINUE_TXN, 3)
    wrong, journal.clock = journal.clock, right + CLOCK_TICK
    journal.write(2, Flags.OUTSIDE_TXN, 1)  # A repetition.
    journal.clock = right + 10 * CLOCK_TICK
    journal.write(1, Flags.ACK_TXN)
    journal.clock = wrong
    journal.write(3, Flags.ACK_TXN)
    with capture_logs() as logs:
        source = journal.source(end=journal.head, now=lambda: float(now))
        assert await taken(source) == [[1], [2], [0], [3]]
        await asyncio.wait([source.close()])
    assert [each["seconds_ahead"] for each in logs if each["event"] == "producer.clock_skewed"] == [off]


@pytest.mark.parametrize("seed", range(4))
async def test_reading_continues_exactly_from_any_position(seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal()
    committed = interleaved(journal, rng)
    found: list[list[int]] = []
    position: SegmentPosition | None = None
    while len(found) < len(committed):
        source = journal.source(position, end=journal.head, ring_size=rng.choice([1, 5, 1000]))
        wanted = rng.randint(1, 4)
        while wanted and not source.is_finished:
            if (transaction := await source.take()) is not None:
                found.append(numbers(transaction))
                wanted -= 1
            await asyncio.sleep(0)
        position = source.position
        await asyncio.wait([source.close()])
    assert found == committed


async def test_read_ahead_is_bounded() -> None:
    journal = Journal()
    for n in range(1000):
        journal.write(1, Flags.OUTSIDE_TXN, n)
    journal.journals.piece_bytes = lambda: 500
    source = journal.source(read_ahead=2000)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert source._fetched <= 2500
    for n in range(1000):
        transaction = await source.take()
        for _ in range(20):
            if transaction is not None:
                break
            await asyncio.sleep(0)
            transaction = await source.take()
        assert transaction is not None
        assert numbers(transaction) == [n]
    assert await source.take() is None
    assert not source.is_finished
    source.limit(journal.head)
    assert source.is_finished
    await asyncio.wait([source.close()])


async def test_reading_continues_after_an_invalid_message() -> None:
    journal = Journal()
    journal.write(1, Flags.OUTSIDE_TXN, 0)
    journal.journals.journals[journal.segment.journal].write(b"no message\n")
    journal.write(1, Flags.OUTSIDE_TXN, 1)
    source = journal.source(end=journal.head)
    await asyncio.wait([source._fetching])
    found: list[Any] = []
    while not source.is_finished:
        try:
            transaction = await source.take()
            found.append(None if transaction is None else numbers(transaction))
        except CorruptMessage as error:
            found.append(error.offset > 0)
    assert found == [[0], True, [1]]
    await asyncio.wait([source.close()])


async def test_an_event_after_a_torn_line_is_delivered() -> None:
    journal = Journal()
    journal.write(1, Flags.CONTINUE_TXN, 0)
    content = journal.journals.journals[journal.segment.journal]
    torn = journal.head
    content.write(b'{"customer":"to')
    journal.write(1, Flags.ACK_TXN)
    content.write(b'{"customer":"to')
    journal.write(1, Flags.OUTSIDE_TXN, 1)
    source = journal.source(end=journal.head)
    await asyncio.wait([source._fetching])
    found: list[Any] = []
    while not source.is_finished:
        try:
            transaction = await source.take()
            found.append(None if transaction is None else numbers(transaction))
        except TornMessage as error:
            found.append((error.offset, error.following))
    assert found[0] == (torn, torn + 15)
    assert found[1] == [0]
    assert found[3:] == [[1]]
    await asyncio.wait([source.close()])


async def test_segments_take_turns_and_positions_exclude_the_current_transaction() -> None:
    pool: SegmentPool[JsonObject] = SegmentPool()
    journals = [Journal(0), Journal(1)]
    for journal in journals:
        for n in range(300):
            journal.write(1, Flags.OUTSIDE_TXN, n)
        pool.add(journal.source(end=journal.head, wake=pool.wake))
    order: list[int] = []
    while len(order) < 600:
        pool.woken.clear()
        transaction = await pool.take()
        if transaction is None:
            await pool.woken.wait()
            continue
        order.append(transaction.segment)
        assert pool.position(transaction.segment).offset == transaction.begin
        pool.consume()
        assert pool.position(transaction.segment).offset == transaction.end
    assert order[:300].count(0) in range(100, 201), "segments do not wait for each other"
    assert await pool.take() is None
    await asyncio.wait([source._fetching for source in pool.sources.values()])
    assert await pool.take() is None
    assert {source.number for source in pool.finished()} == {0, 1}
    await pool.close()
