"""Contents of one batch are appended in order, and succeed or fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coranto.client import AppendResult
from coranto.errors import NotAllowed
from coranto.streams.control.batches import MAX_BATCH_BYTES, Batches, ContentRange
from coranto.wire import protocol_pb2 as pb


class Journal:
    """Appends that wait until the gate opens."""

    def __init__(self) -> None:
        self.content = b""
        self.sent: list[int] = []
        self.gate = asyncio.Event()
        self.broken = False

    async def send(self, contents: Sequence[bytes], notes: Sequence[int]) -> AppendResult:
        assert list(notes) == [len(each) for each in contents]
        self.sent.append(len(contents))
        await self.gate.wait()
        if self.broken:
            raise NotAllowed("a/journal")
        begin = len(self.content)
        self.content += b"".join(contents)
        return AppendResult("a/journal", begin, len(self.content), b"", pb.LabelSet(), pb.Header())


async def test_contents_that_arrive_during_an_append_share_the_next_one() -> None:
    journal = Journal()
    batches = Batches(journal.send)
    tasks = [asyncio.create_task(batches.append(b"x" * size, size)) for size in (1, 2, 3)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(batches.append(b"y" * size, size)) for size in (4, 5)]
    await asyncio.sleep(0)
    journal.gate.set()
    assert await asyncio.gather(*tasks) == [
        ContentRange(0, 1),
        ContentRange(1, 3),
        ContentRange(3, 6),
        ContentRange(6, 10),
        ContentRange(10, 15),
    ]
    assert sum(journal.sent) == 5
    assert len(journal.sent) == 2
    assert await batches.append(b"z", 1) == ContentRange(15, 16)


async def test_batches_are_bounded_and_a_cancelled_append_is_still_sent() -> None:
    journal = Journal()
    batches = Batches(journal.send)
    big = [asyncio.create_task(batches.append(b"x" * (MAX_BATCH_BYTES - 1), MAX_BATCH_BYTES - 1)) for _ in range(2)]
    big.append(asyncio.create_task(batches.append(b"x" * (2 * MAX_BATCH_BYTES), 2 * MAX_BATCH_BYTES)))
    await asyncio.sleep(0)
    big[1].cancel()
    journal.gate.set()
    found = await asyncio.gather(*big, return_exceptions=True)
    assert isinstance(found[1], asyncio.CancelledError)
    assert found[2] == ContentRange(2 * (MAX_BATCH_BYTES - 1), 4 * MAX_BATCH_BYTES - 2)
    assert journal.sent == [1, 1, 1]


async def test_a_batch_fails_as_a_whole_and_later_batches_succeed() -> None:
    journal = Journal()
    batches = Batches(journal.send)
    journal.broken = True
    tasks = [asyncio.create_task(batches.append(b"x", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    journal.gate.set()
    assert [type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)] == [NotAllowed] * 3
    journal.broken = False
    assert await batches.append(b"x", 1) == ContentRange(0, 1)


async def test_waiters_get_an_error_when_the_loop_ends() -> None:
    journal = Journal()
    batches = Batches(journal.send)
    tasks = [asyncio.create_task(batches.append(b"x" * MAX_BATCH_BYTES, MAX_BATCH_BYTES)) for _ in range(2)]
    await asyncio.sleep(0)
    (runner,) = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Batches._run"]
    await asyncio.sleep(0)
    runner.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
