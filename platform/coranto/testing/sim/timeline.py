"""Processes of a simulated world, and the timeline that all twins share.

`coranto.testing.sim.loop.SimLoop` is a timeline in virtual time. `coranto.testing.sim.real_time.RealTimeline` is one in
real time, on a running loop, so that the same twins work in a notebook.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

process_of_context: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
"""The process whose code is running, if any."""


class Timeline(Protocol):
    """Time, and the scheduling of actions and tasks. Times are seconds."""

    @property
    def epoch(self) -> float:
        """The wall time (seconds since the Unix epoch) when `time` is 0."""
        ...

    def time(self) -> float: ...

    def later(self, seconds: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action` after `seconds`, as a part of the world rather than of a process."""
        ...

    def note(self, what: str) -> None:
        """Record an event, to compare runs."""
        ...

    def number(self) -> int:
        """Return a number that no other call returns."""
        ...

    def create_future(self) -> asyncio.Future[Any]: ...

    def start_task(
        self, work: Coroutine[Any, Any, T], *, name: str | None, context: contextvars.Context
    ) -> asyncio.Task[T]:
        """Run `work` as a task, which joins the process that `context` names."""
        ...

    def task_ended(self, task: asyncio.Task[Any]) -> None:
        """Record that a task of a living process has ended without being cancelled."""
        ...

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        """Run the pending handles of a process that was paused."""
        ...


class Killed(asyncio.CancelledError):
    """Raised by an effect of a process that is dead. It is not handled; the process's task ends."""


class Process:
    """Tasks that are killed and paused together. `start` work in it; it lives until `kill`."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.name = name
        self.timeline = timeline
        self.alive = True
        self.paused = False
        self.on_death: list[Callable[[], None]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stalled: list[asyncio.Handle] = []
        self._context = contextvars.Context()
        self._context.run(process_of_context.set, self)

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended."""
        return list(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this process."""
        return self.timeline.start_task(work, name=name, context=self._context.copy())

    def check_alive(self) -> None:
        """Raise Killed if the process is dead."""
        if not self.alive:
            raise Killed

    def kill(self) -> None:
        """End the process immediately: none of its effects reaches the world any more."""
        if not self.alive:
            return
        self.alive = False
        self.resume()
        hooks, self.on_death = self.on_death, []
        for hook in hooks:
            hook()
        for task in list(self._tasks):
            task.cancel()

    def pause(self) -> None:
        self.paused = self.alive

    def resume(self) -> None:
        self.paused = False
        stalled, self._stalled = self._stalled, []
        self.timeline.requeue(stalled)

    def add_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] = None
        task.add_done_callback(self._drop_task)
        if not self.alive:
            task.cancel()

    def stall(self, handle: asyncio.Handle) -> None:
        self._stalled.append(handle)

    def _drop_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled():
            return
        if not self.alive:
            task.exception()  # Retrieve it, so that a dead process's failure is not reported.
        else:
            self.timeline.task_ended(task)


def current_process() -> Process | None:
    """Return the process whose code is running, if any."""
    return process_of_context.get()
