"""A deterministic asyncio event loop: virtual time, a seeded order of events, and processes that can be killed.

Time stands still while anything is ready to run, and then jumps to the next timer. The seed decides the order of
callbacks that become ready at the same time. Nothing depends on the machine's clock, on addresses of objects or on
threads, so the same seed gives the same run.

A `Process` is a set of tasks that are killed and paused together. Tasks inherit it from the task that starts them. A
paused process does not run until it is resumed, as after SIGSTOP: its timers and messages wait. A killed process cannot
affect the world any more (every twin of an effect calls `check_alive`, which raises `Killed`), and its tasks are
cancelled so that they unwind.

The loop uses private parts of asyncio (`_ready`, `_run_once`, `Handle._context`); a test checks that they still exist.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import math
import random
import zlib
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from coranto.testing.sim.timeline import process_of_context

T = TypeVar("T")

MAX_STEPS = 3_000_000
"""Maximum steps of a run. A longer run is considered endless."""


class Deadlock(Exception):
    """Raised when nothing is ready and no timer is set, so that nothing will ever happen again."""


_EMPTY_CONTEXT = contextvars.Context()
"""The context of callbacks that belong to no process: networks, services, timers of the world."""


class SimFuture(asyncio.Future[Any]):
    """A future whose hash does not depend on its address."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    """A task whose hash does not depend on its address."""

    def __init__(self, number: int, work: Any, **options: Any) -> None:
        self._number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """The event loop. `rng` is a run's only source of randomness. `note` records events, to compare runs."""

    epoch = 1_750_000_000.0
    """The wall time at the start of a run, in seconds since the Unix epoch."""

    def __init__(self, seed: int, *, shuffle: bool = True, max_steps: int = MAX_STEPS) -> None:
        """Create a loop. Without `shuffle`, callbacks run in the order of becoming ready."""
        super().__init__()
        self.rng = random.Random(seed)
        self.steps = 0
        self.digest = 0
        self.problems: list[str] = []
        self.ended: list[asyncio.Task[Any]] = []
        self.on_note: Callable[[str], None] | None = None
        self._shuffle = shuffle
        self.max_steps: float = max_steps
        self._virtual = 0.0
        self._numbers = 0
        self._ready: Any
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.set_exception_handler(self._note_problem)

    # -- Parts of a run ------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._virtual

    def note(self, what: str) -> None:
        """Add an event to the trace. Only a checksum of the trace is kept."""
        self.digest = zlib.crc32(f"{self._virtual:.6f} {what}\n".encode(), self.digest)
        if self.on_note is not None:
            self.on_note(what)

    def unnoticed(self) -> list[str]:
        """Return the unretrieved exceptions that ended tasks of living processes."""
        failed = [task for task in self.ended if task._log_traceback]
        return [f"{task.get_name()} ended unnoticed: {task.exception()!r}" for task in failed]

    def number(self) -> int:
        """Return a number that no other call returns."""
        self._numbers += 1
        return self._numbers

    def later(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action` after `seconds` of virtual time, as a part of the world rather than of a process."""
        self.call_later(seconds, action, *arguments, context=_EMPTY_CONTEXT.copy())

    def start_task(
        self, work: Coroutine[Any, Any, T], *, name: str | None, context: contextvars.Context
    ) -> asyncio.Task[T]:
        return self.create_task(work, name=name, context=context)

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        self.ended.append(task)

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        """Make the handles of a resumed process ready again."""
        self._ready.extend(handles)

    # -- The event loop ------------------------------------------------------------------------------------------------

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._virtual + max(0.0, delay), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self.number(), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(self.number(), loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        number = self.number()
        task = SimTask(number, coro, loop=self, name=str(name) if name else f"task {number}", context=context)
        process = context.get(process_of_context) if context is not None else process_of_context.get()
        if process is not None:
            process.add_task(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function "in a thread": on this loop, at a random moment a little later."""
        future = self.create_future()
        process = process_of_context.get()

        def run() -> None:
            if future.done():
                return
            try:
                if process is not None:
                    process.check_alive()
                result = func(*args)
            except asyncio.CancelledError:
                future.cancel()
            except Exception as error:  # noqa: BLE001  # It is raised where the future is awaited.
                if not future.done():  # The function may have ended its own process.
                    future.set_exception(error)
            else:
                self.call_later(self.rng.uniform(0, 0.0005), _resolve, future, result)

        self.call_later(self.rng.uniform(0, 0.0005), run)
        return future

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Deadlock(f"nothing can happen any more at {self._virtual:.3f} s")
            self._virtual = max(self._virtual, timers[0][0])
        while timers and timers[0][0] <= self._virtual:
            ready.append(heapq.heappop(timers)[2])
        batch: list[Any] = list(ready)
        ready.clear()
        if self._shuffle and len(batch) > 1:
            self.rng.shuffle(batch)
        for handle in batch:
            if handle._cancelled:
                continue
            process = handle._context.get(process_of_context)
            if process is not None and process.paused:
                process.stall(handle)
                continue
            self.steps += 1
            handle._run()
        if self.steps > self.max_steps:
            raise Deadlock(f"more than {self.max_steps} steps without an end at {self._virtual:.3f} s")

    def _write_to_self(self) -> None:
        """Do nothing: this loop never sleeps in a system call, so it needs no wake-up."""

    def _note_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        future = context.get("future") or context.get("task")
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return
        self.problems.append(f"{context.get('message')}: {error!r} in {future!r}")


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


@contextmanager
def simulated(seed: int, *, shuffle: bool = True, max_steps: int = MAX_STEPS) -> Generator[SimLoop, None, None]:
    """Yield a loop for one run, and clean up after it.

    The garbage collector is off during the run: its timing depends on earlier work of the process, and it may end
    coroutines.
    """
    collecting = gc.isenabled()
    gc.disable()
    loop = SimLoop(seed, shuffle=shuffle, max_steps=max_steps)
    try:
        yield loop
    finally:
        loop.max_steps = math.inf
        for task in asyncio.all_tasks(loop):
            task.cancel()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for _ in range(20):
            if not loop._ready or not asyncio.all_tasks(loop):
                break
            loop.call_soon(loop.stop)
            loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())  # Their users have ended.
        loop.close()
        if collecting:
            gc.enable()
