"""Concurrent reads: their order, their limits, and the failure of one of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from coranto.client.direct import DirectReader
from coranto.client.loop import LoopThread
from coranto.client.range_prefetch import BoundedFetches, JournalRange, RangePrefetch, read_in_turn
from coranto.client.values import Chunk
from coranto.errors import OffsetJump, StoreError, Unavailable
from coranto.fragments.fragment import Codec, Fragment


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.stop()


class Gated:
    """Reads that end only when released, with records of the begun and cancelled ones."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.failing: dict[str, Exception] = {}
        self._changed = threading.Condition()
        self._gates: dict[str, asyncio.Event] = {}

    async def read(self, wanted: JournalRange) -> AsyncGenerator[Chunk]:
        gate = asyncio.Event()
        with self._changed:
            self.begun.append(wanted.journal)
            self._gates[wanted.journal] = gate
            self._changed.notify_all()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            with self._changed:
                self.cancelled.append(wanted.journal)
                self._changed.notify_all()
            raise
        if error := self.failing.get(wanted.journal):
            raise error
        middle = (wanted.offset + wanted.end_offset) // 2
        for begin, end in ((wanted.offset, middle), (middle, wanted.end_offset)):
            yield Chunk(begin, wanted.journal[-1:].encode() * (end - begin), wanted.end_offset)

    def wait_begun(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, 10), self.begun

    def wait_cancelled(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.cancelled) >= count, 10), self.cancelled

    def release(self, loop: LoopThread, *names: str) -> None:
        for name in names:
            loop.call(self._gates[name].set)


def ranges(names: str, length: int = 10) -> list[JournalRange]:
    return [JournalRange(f"j/{name}", 4, 4 + length) for name in names]


def content(chunks: list[Chunk]) -> bytes:
    return b"".join(chunk.content for chunk in chunks)


def settle(loop: LoopThread) -> None:
    """Wait until the loop has nothing more to do."""

    async def turn() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    loop.run(turn())


def test_ranges_are_read_concurrently_within_a_limit_and_returned_in_order(loop: LoopThread) -> None:
    gated, wanted = Gated(), ranges("abcdef")
    contents = read_in_turn(RangePrefetch(loop, wanted, gated.read, timeout=30, concurrency=3), loop, len(wanted))
    found: list[list[Chunk]] = []
    taker = threading.Thread(target=lambda: found.extend(contents))
    taker.start()
    gated.wait_begun(3)
    settle(loop)
    assert gated.begun == ["j/a", "j/b", "j/c"]
    gated.release(loop, "j/c", "j/b")
    gated.wait_begun(5)
    settle(loop)
    assert gated.begun == ["j/a", "j/b", "j/c", "j/d", "j/e"]
    assert not found  # The first one has not arrived.
    gated.release(loop, "j/a", "j/e", "j/d")
    gated.wait_begun(6)
    gated.release(loop, "j/f")
    taker.join(10)
    assert [content(each) for each in found] == [name.encode() * 10 for name in "abcdef"]
    assert [chunk.offset for chunk in found[0]] == [4, 9]


def test_ranges_that_are_not_taken_yet_count_as_held_bytes(loop: LoopThread) -> None:
    gated, wanted = Gated(), ranges("abcd", 10)
    reads = RangePrefetch(loop, wanted, gated.read, timeout=30, max_unread_bytes=20)
    contents = read_in_turn(reads, loop, len(wanted))
    taken: list[bytes] = []
    taker = threading.Thread(target=lambda: taken.append(content(next(contents))))
    taker.start()
    gated.wait_begun(2)
    gated.release(loop, "j/b")
    settle(loop)
    assert gated.begun == ["j/a", "j/b"]
    gated.release(loop, "j/a")
    taker.join(10)
    assert taken == [b"a" * 10]
    gated.wait_begun(3)
    settle(loop)
    assert gated.begun == ["j/a", "j/b", "j/c"]  # `b` was read and still holds its bytes.
    assert content(next(contents)) == b"b" * 10
    gated.wait_begun(4)
    contents.close()
    gated.wait_cancelled(2)


def test_a_range_larger_than_the_limit_is_read_alone(loop: LoopThread) -> None:
    gated = Gated()
    wanted = [*ranges("a", 30), *ranges("bc", 5)]
    reads = RangePrefetch(loop, wanted, gated.read, timeout=30, max_unread_bytes=20)
    contents = read_in_turn(reads, loop, len(wanted))
    found: list[bytes] = []
    taker = threading.Thread(target=lambda: found.extend(content(each) for each in contents))
    taker.start()
    gated.wait_begun(1)
    settle(loop)
    assert gated.begun == ["j/a"]
    gated.release(loop, "j/a")
    gated.wait_begun(3)
    gated.release(loop, "j/b", "j/c")
    taker.join(10)
    assert found == [b"a" * 30, b"b" * 5, b"c" * 5]


def test_a_failure_is_raised_in_order_and_ends_no_other_range(loop: LoopThread) -> None:
    gated, wanted = Gated(), ranges("abc")
    gated.failing["j/b"] = OffsetJump("j/b", 4, 8)
    reads = RangePrefetch(loop, wanted, gated.read, timeout=30)
    running = loop.submit(reads.run())
    gated.wait_begun(3)
    gated.release(loop, "j/b")
    settle(loop)
    assert not gated.cancelled
    gated.release(loop, "j/a", "j/c")
    assert content(reads.take(0)) == b"a" * 10
    with pytest.raises(OffsetJump, match="j/b"):
        reads.take(1)
    assert content(reads.take(2)) == b"c" * 10
    running.result(10)


def test_a_read_without_progress_fails_with_the_name_of_its_journal(loop: LoopThread) -> None:
    gated, wanted = Gated(), ranges("ab")
    contents = read_in_turn(RangePrefetch(loop, wanted, gated.read, timeout=0.01), loop, len(wanted))
    with pytest.raises(Unavailable, match="read of j/a: nothing arrived within"):
        next(contents)


def test_a_waiting_caller_is_cancelled_when_the_loop_ends(loop: LoopThread) -> None:
    gated, wanted = Gated(), ranges("a")
    reads = RangePrefetch(loop, wanted, gated.read, timeout=None)
    loop.submit(reads.run())
    gated.wait_begun(1)
    loop.stop()
    with pytest.raises(asyncio.CancelledError):
        reads.take(0)


def test_no_ranges_have_no_content(loop: LoopThread) -> None:
    assert list(read_in_turn(RangePrefetch(loop, [], Gated().read, timeout=1), loop, 0)) == []


class GatedStore(DirectReader):
    """A store whose fragments arrive when they are released."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.failing: set[int] = set()

    async def read(self, fragment: Fragment, url: str, begin: int, end: int) -> AsyncGenerator[bytes]:
        gate = self.gates[fragment.begin] = asyncio.Event()
        await gate.wait()
        if fragment.begin in self.failing:
            raise StoreError("gone", kind="gone")
        yield b"x" * (end - begin)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_concurrent_fetches_are_bounded_and_a_failure_frees_capacity() -> None:
    store = GatedStore()
    bounded = BoundedFetches(store, 100)

    async def fetch(begin: int, length: int) -> bytes:
        fragment = Fragment("j/j", begin, begin + length, bytes(20), Codec.NONE)
        return b"".join([piece async for piece in bounded.read(fragment, "", begin, begin + 5)])

    async with asyncio.TaskGroup() as group:
        first, failing = group.create_task(fetch(1, 60)), asyncio.ensure_future(fetch(2, 40))
        large, last = group.create_task(fetch(3, 500)), group.create_task(fetch(4, 10))
        store.failing.add(2)
        await turns()
        assert store.gates.keys() == {1, 2}
        store.gates[1].set()
        await turns()
        assert first.done()
        assert store.gates.keys() == {1, 2}  # The large one waits for both, the small one for its turn.
        store.gates[2].set()
        await turns()
        assert store.gates.keys() == {1, 2, 3}
        large.cancel()
        await turns()
        assert store.gates.keys() == {1, 2, 3, 4}
        store.gates[4].set()
    assert first.result() == last.result() == b"x" * 5
    with pytest.raises(StoreError):
        await failing


async def test_a_slow_consumer_delays_no_other_fetch() -> None:
    store = GatedStore()
    bounded = BoundedFetches(store, 10)
    fragment = Fragment("j/j", 0, 10, bytes(20), Codec.NONE)
    slow, other = bounded.read(fragment, "", 0, 5), bounded.read(fragment, "", 0, 6)
    first = asyncio.ensure_future(anext(slow))
    await turns()
    store.gates[0].set()
    assert await first == b"x" * 5
    second = asyncio.ensure_future(anext(other))
    await turns()
    store.gates[0].set()
    assert await second == b"x" * 6
    await slow.aclose()
    await other.aclose()
