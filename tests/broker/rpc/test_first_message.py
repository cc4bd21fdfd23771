"""The first message of a stream: it arrives in time, or the stream ends."""

from __future__ import annotations

import asyncio

import pytest

from coranto.testing.sim.loop import SimLoop
from coranto_broker.rpc.deadlines import DeadlineQueue
from coranto_broker.rpc.first_message import FIRST_MESSAGE_SECONDS, SilentStream, first_message
from tests.broker.virtual import virtually


class Client:
    """Sends a message after this many seconds; None: never."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    async def read(self) -> bytes:
        await (asyncio.Event().wait() if self._seconds is None else asyncio.sleep(self._seconds))
        return b"first"


def test_a_stream_is_closed_if_nothing_is_sent_in_time() -> None:
    async def main(loop: SimLoop) -> None:
        deadlines = DeadlineQueue()
        late = [asyncio.create_task(first_message(Client(seconds), deadlines)) for seconds in (None, 1e6)]
        assert await first_message(Client(FIRST_MESSAGE_SECONDS - 1), deadlines) == b"first"
        for task in late:
            with pytest.raises(SilentStream, match="nothing was applied"):
                await task
        assert loop.time() == pytest.approx(FIRST_MESSAGE_SECONDS)

    virtually(main)


def test_a_cancelled_wait_is_not_taken_for_silence() -> None:
    async def main(loop: SimLoop) -> None:
        waiting = asyncio.create_task(first_message(Client(None), DeadlineQueue()))
        await asyncio.sleep(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    virtually(main)
