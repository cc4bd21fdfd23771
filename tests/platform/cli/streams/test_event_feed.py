"""The feed of events from `coranto streams write` to the writer on the event loop."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from coranto.cli.streams.event_feed import MAX_IN_FLIGHT, EventFeed
from coranto.client.loop import shared_loop
from coranto.errors import CorantoError, InvalidInput
from coranto.streams.writer.stream_writer import StreamWriter
from coranto.streams.writer.units import EventPosition

PLACE = EventPosition(0, "orders/segment/00000000", 0, 1)


class HeldWriter:
    """Completes no append until `settle`, and then all; refuses text, and fails at bytes."""

    def __init__(self) -> None:
        self.held = True
        self.open: list[asyncio.Future[EventPosition]] = []
        self.sequences: list[int | None] = []

    def write_event(self, key: str, event: object, *, sequence: int | None) -> asyncio.Future[EventPosition]:
        if isinstance(event, str):
            raise InvalidInput("no text")
        done: asyncio.Future[EventPosition] = asyncio.get_running_loop().create_future()
        self.sequences.append(sequence)
        if isinstance(event, bytes):
            done.set_exception(CorantoError("the brokers are gone"))
        else:
            self.open.append(done)
            if not self.held:
                self.settle()
        return done

    def settle(self) -> None:
        self.held = False
        for done in self.open:
            done.set_result(PLACE._replace(deduplicated=len(self.sequences) == 1))
        self.open.clear()


def feed_of(writer: HeldWriter, late: list[int]) -> EventFeed:
    def settle() -> None:
        late.append(1)
        shared_loop().call(writer.settle)

    return EventFeed(cast("StreamWriter[Any]", writer), stall_timeout=0.02, late=settle)


def test_appends_in_flight_are_bounded_and_waiting_is_reported() -> None:
    writer, late = HeldWriter(), list[int]()
    feed = feed_of(writer, late)
    for number in range(MAX_IN_FLIGHT):
        assert not late
        feed.add("key", {}, number)
    assert late == [1], "the feed blocked until appends completed"
    assert feed.durable >= MAX_IN_FLIGHT // 2
    feed.finish()
    assert feed.durable == feed.given == MAX_IN_FLIGHT
    assert writer.sequences == list(range(MAX_IN_FLIGHT))


def test_repeated_events_are_counted() -> None:
    writer, late = HeldWriter(), list[int]()
    feed = feed_of(writer, late)
    feed.add("key", {}, 1)
    feed.finish()
    assert (feed.durable, feed.repeated, late) == (1, 1, [1])


@pytest.mark.parametrize(("event", "problem"), [("text", "line 2: no text"), (b"", "the brokers are gone")])
def test_the_first_failure_is_raised(event: object, problem: str) -> None:
    writer, late = HeldWriter(), list[int]()
    feed = feed_of(writer, late)
    feed.add("key", {}, None)
    feed.add("key", event, None)
    with pytest.raises(CorantoError, match=problem):
        feed.finish()
    with pytest.raises(CorantoError, match=problem):
        feed.add("key", {}, None)
