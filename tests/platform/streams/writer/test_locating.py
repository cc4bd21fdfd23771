"""Locating an append whose answer was lost, at brokers that do not show all of the journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from coranto.client.client import JournalClient
from coranto.client.values import Chunk
from coranto.errors import Unavailable
from coranto.messages.uuids import Flags, ProducerId, build_uuid
from coranto.streams.model.events import JsonEvents, TransactionEnd
from coranto.streams.writer import locating
from coranto.streams.writer.locating import find_append, find_transaction

ME, OTHER = ProducerId(b"\x01abcde"), ProducerId(b"\x03abcde")
EVENTS = JsonEvents()
LINES = [
    EVENTS.stamp(EVENTS.encode({"number": number}), build_uuid(producer, clock, Flags.OUTSIDE_TXN))
    for number, (producer, clock) in enumerate([(OTHER, 16), (ME, 32), (ME, 48)])
]
CONTENT = b"".join(LINES)


class StaleClient:
    """A client of a broker that first shows only the beginning of a journal."""

    def __init__(self, shown: int, *, failure: Exception | None = None) -> None:
        self.content = CONTENT
        self.shown = shown
        self.caught_up = asyncio.Event()
        self.failure = failure

    async def read(self, journal: str, offset: int, *, end_offset: int, block: bool) -> AsyncIterator[Chunk]:
        if self.failure is not None:
            raise self.failure
        end = min(end_offset or len(self.content), self.shown)
        yield Chunk(offset, self.content[offset:end], self.shown)
        if block and end < end_offset:
            await self.caught_up.wait()
            yield Chunk(end, self.content[end:end_offset], len(self.content))


async def place(client: StaleClient, clock: int, within: range) -> int | None:
    return await find_append(cast(JournalClient, client), "a/journal", EVENTS, ME, clock, within, 0.0)


async def test_an_outdated_head_of_a_broker_is_not_trusted() -> None:
    client, first, second = StaleClient(len(LINES[0])), len(LINES[0]), len(LINES[0] + LINES[1])
    asyncio.get_running_loop().call_later(0.01, client.caught_up.set)
    assert await place(client, 48, range(0, len(CONTENT))) == second
    assert await place(client, 32, range(first, len(CONTENT))) == first
    assert await place(client, 64, range(0, len(CONTENT))) is None
    assert await place(StaleClient(len(CONTENT)), 48, range(0)) == second


async def test_the_search_ends_when_the_journal_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locating, "MIN_TIMEOUT_SECONDS", 0.05)
    assert await place(StaleClient(10), 48, range(0, len(CONTENT))) is None
    assert await place(StaleClient(10, failure=Unavailable("away")), 48, range(0, len(CONTENT))) is None


async def test_a_durable_transaction_is_found_despite_an_outdated_head() -> None:
    client, end = StaleClient(len(LINES[0])), TransactionEnd("importer", 7)
    asyncio.get_running_loop().call_later(0.01, client.caught_up.set)
    event = EVENTS.stamp(EVENTS.encode({"number": 3}), build_uuid(ME, 64, Flags.CONTINUE_TXN))
    transaction = event + EVENTS.transaction_end(build_uuid(ME, 80, Flags.ACK_TXN), *end)
    content = CONTENT + transaction
    client.content = content

    async def place_of(within: range) -> tuple[int, int] | None:
        return await find_transaction(cast(JournalClient, client), "a/journal", EVENTS, ME, end, within, 0.0)

    assert await place_of(range(0, len(content))) == (len(CONTENT), len(content))
    client.caught_up.clear()
    assert await place_of(range(0)) is None, "without an end, the head of the broker ends the search"
