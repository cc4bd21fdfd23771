"""Concurrent prefetch of many small ranges, for blocking code that takes their content in order.

Sequential reads of small ranges would mostly wait for round trips. Here the loop reads up to `concurrency` ranges ahead
of the consuming thread, with up to `max_unread_bytes` in flight or not taken yet. A larger range is read alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from coranto.client.direct import DirectReader
from coranto.client.loop import LoopThread
from coranto.client.values import Chunk
from coranto.errors import Unavailable
from coranto.fragments.fragment import Fragment

CONCURRENCY: Final = 32
MAX_UNREAD_BYTES: Final = 8 << 20
FETCHED_BYTES: Final = 64 << 20


class JournalRange(NamedTuple):
    """The content [offset, end_offset) of a journal; `journal_id`, unless empty, is the id that it must have."""

    journal: str
    offset: int
    end_offset: int
    journal_id: str = ""

    @property
    def length(self) -> int:
        return self.end_offset - self.offset


ReadOf: TypeAlias = Callable[[JournalRange], AsyncGenerator[Chunk]]


class RangePrefetch:
    """Reads of ranges. `run` runs on the loop, and one other thread calls `take`."""

    def __init__(
        self,
        loop: LoopThread,
        ranges: Sequence[JournalRange],
        read: ReadOf,
        *,
        timeout: float | None,
        concurrency: int = CONCURRENCY,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._loop = loop
        self._ranges = ranges
        self._read = read
        self._timeout = timeout
        self._concurrency = concurrency
        self._max_unread_bytes = max_unread_bytes
        self._ready = threading.Condition()
        self._wanted = 0
        self._found: dict[int, list[Chunk] | BaseException] = {}
        self._ended: BaseException | None = None
        self._bytes = 0
        """The total length of ranges in flight or not taken yet."""
        self._under_way = 0
        self._has_capacity = asyncio.Event()
        self._waits_for_capacity = False

    async def run(self) -> None:
        """Read all ranges. `take` raises the error of a range, which does not end the other reads."""
        ended: BaseException = asyncio.CancelledError()
        try:
            async with asyncio.TaskGroup() as group:
                for number, each in enumerate(self._ranges):
                    await self._begin(each.length)
                    group.create_task(self._one(number, each))
        except BaseException as error:
            ended = error
            raise
        finally:
            with self._ready:
                self._ended = ended  # The outcome of ranges that were not read.
                self._ready.notify()

    async def _begin(self, length: int) -> None:
        """Wait until there is room for a range of this length, and reserve it."""
        while True:
            with self._ready:
                fits = not self._bytes or self._bytes + length <= self._max_unread_bytes
                if fits and self._under_way < self._concurrency:
                    self._under_way += 1
                    self._bytes += length
                    return
                self._waits_for_capacity = True
                self._has_capacity.clear()
            await self._has_capacity.wait()

    async def _one(self, number: int, wanted: JournalRange) -> None:
        found: list[Chunk] | BaseException = []
        try:
            found = await self._content(wanted)
        except BaseException as error:
            found = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._under_way -= 1
            self._has_capacity.set()
            with self._ready:
                self._found[number] = found
                if number == self._wanted:
                    self._ready.notify()

    async def _content(self, wanted: JournalRange) -> list[Chunk]:
        async with contextlib.aclosing(self._read(wanted)) as read:
            return [chunk async for chunk in read]

    def take(self, number: int) -> list[Chunk]:
        """Wait for the content of a range, return it, and free its capacity.

        Raises the error of its read, and Unavailable after a wait of `timeout` seconds.
        """
        with self._ready:
            self._wanted = number
            if not self._ready.wait_for(lambda: number in self._found or self._ended is not None, self._timeout):
                raise Unavailable(
                    f"read of {self._ranges[number].journal}: nothing arrived within {self._timeout} s; wait longer, "
                    "or try again"
                )
            found = self._found.pop(number, self._ended)
            self._bytes -= self._ranges[number].length
            # Waking the loop costs as much as several reads, so wake it only when half of the capacity is free.
            if self._waits_for_capacity and self._bytes <= self._max_unread_bytes // 2:
                self._waits_for_capacity = False
                self._loop.call(self._has_capacity.set)
        if isinstance(found, BaseException):
            raise found
        assert found is not None  # `wait_for` returned because one of the two is set.
        return found


class BoundedFetches(DirectReader):
    """Reads parts of fragments with another reader. At a time, fetches `max_bytes` of fragments, or a larger fragment.

    Each part is buffered completely, so that a slow consumer does not block others.
    """

    def __init__(self, direct: DirectReader, max_bytes: int = FETCHED_BYTES) -> None:
        self._inner = direct
        self._max_bytes = max_bytes
        self._bytes = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def can_read(self, url: str) -> bool:
        return self._inner.can_read(url)

    async def read(self, fragment: Fragment, url: str, begin: int, end: int) -> AsyncGenerator[bytes]:
        async with self._turn:  # First come, first served, so that a large fragment is not starved.
            while self._bytes and self._bytes + fragment.length > self._max_bytes:
                self._freed.clear()
                await self._freed.wait()
            self._bytes += fragment.length
        try:
            async with contextlib.aclosing(self._inner.read(fragment, url, begin, end)) as read:
                pieces = [piece async for piece in read]
        finally:
            self._bytes -= fragment.length
            self._freed.set()
        for piece in pieces:
            yield piece


def read_in_turn(reads: RangePrefetch, loop: LoopThread, count: int) -> Iterator[list[Chunk]]:
    """Yield the content of `count` ranges in order, while the loop prefetches."""
    running = loop.submit(reads.run())
    try:
        for number in range(count):
            yield reads.take(number)
    finally:
        running.cancel()
