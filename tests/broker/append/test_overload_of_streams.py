"""The bounds of memory held by streams of appends: which streams are ended, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from coranto.testing.sim.loop import SimLoop, simulated
from coranto_broker.append.overload import (
    ANSWER_TIMEOUT_SECONDS,
    ANSWERS_UNREAD,
    MAX_BUFFERED_BYTES,
    MAX_HELD_BYTES,
    SHORT_ANSWER_TIMEOUT_SECONDS,
    SMALL_BYTES,
    ReceiveBudget,
    StreamOverloaded,
)


class Stream:
    """A stream that records when it is ended."""

    def __init__(self, held: int = 0) -> None:
        self.held = held
        self.waits_since = 0.0
        self.ended: tuple[float, StreamOverloaded] | None = None

    def give_up(self, error: StreamOverloaded) -> None:
        assert self.ended is None
        self.ended = asyncio.get_running_loop().time(), error


def played(main: Callable[[ReceiveBudget], Awaitable[None]]) -> SimLoop:
    async def run() -> None:
        await main(ReceiveBudget(0))

    with simulated(0) as loop:
        loop.run_until_complete(run())
        return loop


def test_only_a_client_that_reads_no_answers_for_long_loses_its_stream() -> None:
    async def main(budget: ReceiveBudget) -> None:
        deaf, slow, read = Stream(7), Stream(), Stream()
        began = asyncio.get_running_loop().time()
        for each in (deaf, slow, read):
            budget.watch(each)
        budget.unwatch(read)
        while deaf.ended is None:
            await asyncio.sleep(1.0)
            budget.unwatch(slow)
            budget.watch(slow)
        at, error = deaf.ended
        assert ANSWER_TIMEOUT_SECONDS <= at - began <= ANSWER_TIMEOUT_SECONDS + 1
        assert error.reason == ANSWERS_UNREAD
        assert "holds 7 bytes" in str(error)
        budget.unwatch(deaf)  # A second call has no effect.
        await asyncio.sleep(3 * ANSWER_TIMEOUT_SECONDS)
        assert slow.ended is not None  # The timeout of this stream has passed, too.
        assert read.ended is None

    played(main)


def test_timeout_is_short_while_all_streams_hold_much() -> None:
    async def main(budget: ReceiveBudget) -> None:
        deaf, began = Stream(), asyncio.get_running_loop().time()
        budget.held = MAX_BUFFERED_BYTES + 1
        assert budget.is_full
        budget.watch(deaf)
        await asyncio.sleep(ANSWER_TIMEOUT_SECONDS)
        assert deaf.ended is not None
        assert SHORT_ANSWER_TIMEOUT_SECONDS <= deaf.ended[0] - began <= SHORT_ANSWER_TIMEOUT_SECONDS + 1

    played(main)


def test_streams_that_hold_much_are_ended_beyond_the_total_bound() -> None:
    async def main(budget: ReceiveBudget) -> None:
        large, small = Stream(SMALL_BYTES + 1), Stream(SMALL_BYTES)
        budget.held = MAX_HELD_BYTES
        budget.require_capacity(large)
        budget.held += 1
        budget.require_capacity(small)
        with pytest.raises(StreamOverloaded, match=f"{MAX_HELD_BYTES + 1} bytes"):
            budget.require_capacity(large)

    played(main)
