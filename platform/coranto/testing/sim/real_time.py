"""A timeline in real time, on a running event loop."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from coranto.testing.sim.timeline import process_of_context

T = TypeVar("T")


class RealTimeline:
    """The timeline of an ordinary event loop. `close` it on that loop.

    Tasks that a process's tasks start must join that process. So a task factory wraps the loop's factory until `close`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.epoch = time.time() - loop.time()
        self._loop = loop
        self._numbers = 0
        self._closed = False
        self._empty_context = contextvars.Context()
        self._timers: dict[int, asyncio.Handle] = {}
        self._before: Any = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        self._installed: Any = loop.get_task_factory()

    def time(self) -> float:
        return self._loop.time()

    def later(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        if self._closed:
            return
        number, context = self.number(), self._empty_context.copy()
        if seconds <= 0:
            # `call_soon` keeps the order of calls; timers for the same instant do not.
            timer = self._loop.call_soon(self._due, number, action, arguments, context=context)
        else:
            timer = self._loop.call_later(seconds, self._due, number, action, arguments, context=context)
        self._timers[number] = timer

    def note(self, what: str) -> None:
        """Do nothing: runs in real time cannot be compared."""

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def create_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def start_task(
        self, work: Coroutine[Any, Any, T], *, name: str | None, context: contextvars.Context
    ) -> asyncio.Task[T]:
        return self._loop.create_task(work, name=name, context=context)

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        """Do nothing: the loop itself reports unretrieved exceptions."""

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        if handles:
            raise NotImplementedError("an ordinary event loop cannot pause processes")

    def close(self) -> None:
        """Cancel all pending actions, and restore the loop's own task factory."""
        self._closed = True
        timers, self._timers = self._timers, {}
        for timer in timers.values():
            timer.cancel()
        # If another factory has wrapped this one, this one stays and only passes calls on.
        if self._loop.get_task_factory() is self._installed:
            self._loop.set_task_factory(self._before)

    def _due(self, number: int, action: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._timers.pop(number, None)
        action(*arguments)

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        if self._before is not None:
            task = self._before(loop, work, **options)
        else:
            task = asyncio.Task(work, loop=loop, **options)
        context: contextvars.Context | None = options.get("context")
        process = context.get(process_of_context) if context is not None else process_of_context.get()
        if process is not None and process.timeline is self:
            process.add_task(task)
        return task
