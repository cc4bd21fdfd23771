"""Finding the position of a writer's events in a segment, if the answer to the append was lost.

A segment is read up to an end that an append has reported. A broker that is no longer assigned the journal, but does
not know it yet, may have less content; the read then waits for an assigned broker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from coranto.client.client import JournalClient
from coranto.errors import CorantoError, CorruptMessage
from coranto.messages.framing import Envelope
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import Flags, ProducerId
from coranto.streams.model.events import EventFormat, TransactionEnd

MIN_TIMEOUT_SECONDS = 20.0
"""Minimum timeout of the search, whatever the retry timeout.

It is longer than the ten seconds after which brokers list a store again for a reader that waits at a gap.
"""

E = TypeVar("E")
T = TypeVar("T")


async def find_append(
    client: JournalClient,
    journal: str,
    events: EventFormat[E],
    producer: ProducerId,
    first_clock: int,
    within: range,
    timeout_seconds: float,
) -> int | None:
    """Find the offset of a message by its producer and clock, `within` a range of offsets that begins with a message.

    An empty range extends to the head. Returns None if the message is not there, or the journal cannot be read within
    `timeout_seconds`, or MIN_TIMEOUT_SECONDS if that is more.
    """

    def match(message: Envelope[E]) -> int | None:
        return message.begin if (message.producer, message.clock) == (producer, first_clock) else None

    return await _found(client, journal, events, within, match, timeout_seconds)


async def find_transaction(
    client: JournalClient,
    journal: str,
    events: EventFormat[E],
    producer: ProducerId,
    end: TransactionEnd,
    within: range,
    timeout_seconds: float,
) -> tuple[int, int] | None:
    """Find the bytes [begin, end) of a transaction by its transaction end, `within` a range as for `find_append`.

    Returns None in the same cases as `find_append`.
    """
    started = -1

    def match(message: Envelope[E]) -> tuple[int, int] | None:
        nonlocal started
        if message.producer != producer:
            started = -1  # A transaction is contiguous.
        elif message.flags == Flags.CONTINUE_TXN:
            started = message.begin if started < 0 else started
        else:
            if events.end_of(message) == end:
                return (message.begin if started < 0 else started), message.end
            started = -1
        return None

    return await _found(client, journal, events, within, match, timeout_seconds)


async def _found(
    client: JournalClient,
    journal: str,
    events: EventFormat[E],
    within: range,
    match: Callable[[Envelope[E]], T | None],
    timeout_seconds: float,
) -> T | None:
    """Return the first result of `match` for messages `within` a range of offsets, or up to the head if it is empty."""
    begin, end = within.start, within.stop if within else 0
    try:
        async with (
            asyncio.timeout(max(timeout_seconds, MIN_TIMEOUT_SECONDS)),
            contextlib.aclosing(client.read(journal, begin, end_offset=end, block=end > 0)) as chunks,
        ):
            passed_over: list[CorruptMessage] = []
            async for message in AsyncReadUncommitted(events, journal, chunks, begin, on_corrupt=passed_over.append):
                found = match(message)
                if found is not None:
                    return found
    except (CorantoError, TimeoutError):
        return None  # The caller reports that the position is unknown.
    return None
