"""An event loop on its own thread, for blocking callers.

One loop serves all blocking clients of a process: gRPC's asyncio support shares one poller between the loops of a
process, and wakes all of them for each event. A forked child makes its own loop.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, cast

R = TypeVar("R")
T = TypeVar("T")


class LoopThread:
    """An event loop that runs on a daemon thread until `stop`."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_handle_exception)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start work on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop and return its result. If the wait is interrupted, the work is cancelled."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a blocking client was used on its own event loop; use JournalClient there")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a call of a function on the loop."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel all tasks, and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop)
            self._thread.join(timeout=30)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes every loop of the process for each event. A loop without an event to read raises BlockingIOError.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)


class _Shared:
    """The loop of the process, the only global state of this module. Threads and gRPC are process-wide too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    def get(self) -> LoopThread:
        with self._lock:
            if self._loop is None or self._loop.pid != os.getpid():
                self._loop = LoopThread("coranto-client")
            return self._loop

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and loop.pid == os.getpid():
            loop.stop()

    def after_fork(self) -> None:
        self._lock = threading.Lock()


_shared = _Shared()
atexit.register(_shared.stop)
os.register_at_fork(after_in_child=_shared.after_fork)


def shared_loop() -> LoopThread:
    """Return the loop of this process, and start it if necessary."""
    return _shared.get()


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run work on the loop of this process and return its result (see `LoopThread.run`)."""
    return _shared.get().run(work)


def run_reporting(work: Callable[[Callable[[R], None]], Coroutine[Any, Any, T]], on_report: Callable[[R], None]) -> T:
    """Run work on the loop of this process, pass its reports to `on_report` in this thread, and return its result.

    `work` takes the function to report with. If `on_report` raises, or the wait is interrupted, the work is cancelled.
    """
    reports: queue.SimpleQueue[tuple[R] | None] = queue.SimpleQueue()
    future = _shared.get().submit(work(lambda report: reports.put((report,))))
    future.add_done_callback(lambda _: reports.put(None))
    try:
        while (report := reports.get()) is not None:
            on_report(report[0])
        return future.result()
    except BaseException:
        future.cancel()
        raise


class BlockingWrapper:
    """The base of the generated blocking wrappers: runs asynchronous work on the loop of this process."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return run_blocking(work)

    def _call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop."""
        return self._run(_called(function))

    def _iterate(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Iterate over an asynchronous iterator without the timeout of `_run`, and close it."""
        loop, items = shared_loop(), make()
        end = object()
        try:
            while (item := loop.run(_next(items, end))) is not end:
                yield cast(T, item)
        finally:
            if isinstance(items, AsyncGenerator):
                loop.run(items.aclose())


async def _called(function: Callable[[], T]) -> T:
    return function()


async def _next(items: AsyncIterator[T], end: object) -> T | object:
    return await anext(items, end)


class Blocking:
    """The base of blocking objects that close at the end of their `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError
