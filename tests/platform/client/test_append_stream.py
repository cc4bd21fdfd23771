"""Messages in which a client's appends share a stream. What brokers do with them is tested in their handlers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coranto.client.append_stream import AppendStream
from coranto.wire import protocol_pb2 as pb
from coranto.wire.append_stream_pb2 import AppendAnswer, AppendAnswers, AppendBatch


class FakeCall:
    """A call that keeps what is written, and answers when the test says so."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[list[int]] = asyncio.Queue()
        self._answers: asyncio.Queue[AppendAnswers] = asyncio.Queue()

    async def write(self, batch: AppendBatch) -> None:
        self.written.put_nowait([append.id for append in batch.appends])

    async def read(self) -> AppendAnswers:
        await asyncio.sleep(0)  # As gRPC does, even if a message is there.
        return await self._answers.get()

    def answer(self, ids: list[int]) -> None:
        self._answers.put_nowait(AppendAnswers(answers=[AppendAnswer(id=each, response=b"done") for each in ids]))

    def cancel(self) -> None:
        self._answers.put_nowait(AppendAnswers(closing=True))

    async def done_writing(self) -> None:
        return


async def _messages(call: FakeCall, count: int) -> list[list[int]]:
    """Return the appends of messages until `count` were sent."""
    found: list[list[int]] = []
    while sum(map(len, found)) < count:
        found.append(await asyncio.wait_for(call.written.get(), 10))
    return found


@pytest.mark.parametrize(("tasks", "sizes"), [(64, [32, 32]), (16, [8, 8]), (17, [8, 9]), (8, [8]), (1, [1])])
async def test_appends_that_were_all_answered_together_go_on_in_two_halves_that_stay_apart(
    tasks: int, sizes: list[int]
) -> None:
    call: Any = FakeCall()
    stream = AppendStream(call)

    async def append() -> None:
        for _ in range(4):
            assert await stream.append(pb.AppendRequest(journal="a/b"), b"content", None) == b"done"

    running = [asyncio.create_task(append()) for _ in range(tasks)]
    (first,) = await _messages(call, tasks)
    assert len(first) == tasks
    call.answer(first)
    for _ in range(2):  # While one half is answered, the other is under way: it is not split again.
        halves = await _messages(call, tasks)
        assert [len(half) for half in halves] == sizes
        for half in halves:
            call.answer(half)
    for half in await _messages(call, tasks):
        call.answer(half)
    await asyncio.wait_for(asyncio.gather(*running), 10)
    await stream.close()
