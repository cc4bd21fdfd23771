"""Handover of calls and results between blocking threads and their event loop.

`CallQueue` passes calls to the loop. One wake-up serves all queued calls. `BoundedCalls` also returns futures and
limits the in-flight calls. `ReadAhead` passes chunks from the loop to an iterating thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from coranto.client.loop import BlockingWrapper, LoopThread, shared_loop
from coranto.client.values import Chunk
from coranto.errors import CorantoError, Unavailable

T = TypeVar("T")

READ_AHEAD_BYTES = 8 << 20


class CallQueue:
    """A queue of calls from any thread to the loop, in order. `put` never waits."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._awake = False  # True if the loop is about to run the queue.

    def put(self, call: Callable[[], object]) -> None:
        """Queue a call. It must not raise."""
        self._calls.append(call)
        if not self._awake:
            self._awake = True
            shared_loop().call(self.run)

    def run(self) -> None:
        """Make all queued calls. For the loop's thread only."""
        self._awake = False  # Before the calls, so that a call that they queue wakes the loop again.
        while self._calls:
            self._calls.popleft()()


class BoundedCalls(CallQueue):
    """A queue of calls with later results. In-flight calls have at most `capacity` total weight, or one is heavier."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._has_capacity = threading.Condition()
        self._pending = 0

    def submit(self, call: Callable[[], asyncio.Future[T]], weight: int = 1) -> concurrent.futures.Future[T]:
        """Queue a call, and return a future of its result or error. Blocks while too much is in flight.

        Cancelling the future does not cancel the call.
        """
        given: concurrent.futures.Future[T] = concurrent.futures.Future()
        given.set_running_or_notify_cancel()
        with self._has_capacity:
            while self._pending and self._pending + weight > self._capacity:
                self._has_capacity.wait()
            self._pending += weight
        self.put(functools.partial(self._begin, call, weight, given))
        return given

    def _begin(self, call: Callable[[], asyncio.Future[T]], weight: int, given: concurrent.futures.Future[T]) -> None:
        try:
            call().add_done_callback(functools.partial(self._resolve, weight, given))
        except BaseException as error:  # noqa: BLE001 - the future raises it
            self._release(weight)
            given.set_exception(error)

    def _resolve(self, weight: int, given: concurrent.futures.Future[T], done: asyncio.Future[T]) -> None:
        self._release(weight)
        copy_outcome(given, done)

    def _release(self, weight: int) -> None:
        with self._has_capacity:
            self._pending -= weight
            self._has_capacity.notify_all()


def copy_outcome(future: concurrent.futures.Future[T], done: asyncio.Future[T]) -> None:
    """Resolve a future of another thread with the outcome of a done future."""
    if done.cancelled():
        future.set_exception(concurrent.futures.CancelledError())
    elif error := done.exception():
        future.set_exception(error)
    else:
        future.set_result(done.result())


class QueuedWrapper(BlockingWrapper):
    """The base of generated wrappers that return futures. Their calls reach the loop in order."""

    _calls: BoundedCalls

    def _submit(self, call: Callable[[], asyncio.Future[T]], weight: int = 1) -> concurrent.futures.Future[T]:
        return self._calls.submit(call, weight)

    def _run_after_calls(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run work on the loop after all queued calls."""

        async def run() -> None:
            self._calls.run()
            await work()

        self._run(run())


class ReadAhead:
    """A buffer of at most about READ_AHEAD_BYTES of chunks, from the loop to an iterating thread.

    The thread takes all buffered chunks at a time, so that one wake-up serves many chunks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = threading.Condition()
        self._chunks: deque[Chunk] = deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._ended = False
        self._has_capacity = asyncio.Event()
        self._waits_for_capacity = False

    async def fill(self, chunks: AsyncGenerator[Chunk]) -> None:
        """Buffer all chunks; wait while the buffer is full. `take` raises the error that ends the read."""
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    await self._put(chunk)
        except CorantoError as caught:
            error = caught
        except BaseException as caught:
            error = caught
            raise
        finally:
            with self._ready:
                self._error, self._ended = error, True
                self._ready.notify()

    async def _put(self, chunk: Chunk) -> None:
        with self._ready:
            self._chunks.append(chunk)
            self._bytes += len(chunk.content)
            self._ready.notify()
            full = self._waits_for_capacity = self._bytes >= READ_AHEAD_BYTES
            self._has_capacity.clear()
        if full:
            await self._has_capacity.wait()

    def take(self, timeout: float | None) -> deque[Chunk]:
        """Wait for a chunk, and return all buffered chunks. The result is empty at the end of the read.

        Raises TimeoutError, and the error that ended the read.
        """
        with self._ready:
            if not self._ready.wait_for(lambda: self._chunks or self._ended, timeout):
                raise TimeoutError
            taken, self._chunks, self._bytes = self._chunks, deque(), 0
            if self._waits_for_capacity:
                self._waits_for_capacity = False
                self._loop.call_soon_threadsafe(self._has_capacity.set)
            if not taken and self._error is not None:
                raise self._error
            return taken


def read_ahead(loop: LoopThread, chunks: AsyncGenerator[Chunk], subject: str, timeout: float | None) -> Iterator[Chunk]:
    """Yield chunks that the loop reads. Raises Unavailable if none arrives within `timeout` seconds."""
    ahead = loop.run(_new_read_ahead())
    filling = loop.submit(ahead.fill(chunks))
    try:
        while taken := ahead.take(timeout):
            yield from taken
    except TimeoutError as error:
        raise Unavailable(f"{subject}: nothing arrived within {timeout} s; wait longer, or try again") from error
    finally:
        filling.cancel()


async def _new_read_ahead() -> ReadAhead:
    return ReadAhead(asyncio.get_running_loop())
