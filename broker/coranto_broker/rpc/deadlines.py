"""Deadlines of many silent clients on a single timer, because all have the same time limit."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class Deadline(Protocol):
    """Checks a client at the time `due`, unless it is closed before."""

    due: float
    closed: bool

    def check(self) -> None: ...


class DeadlineQueue:
    """A queue of checks of clients. All are due after the same delay, so one timer is enough for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[Deadline] = deque()
        self._armed = False

    @property
    def waiting(self) -> int:
        """The number of pending checks."""
        return sum(not each.closed for each in self._waiting)

    def add(self, deadline: Deadline) -> None:
        """Call `deadline.check` at its due time, unless it is closed before."""
        waiting = self._waiting
        while waiting and waiting[0].closed:
            waiting.popleft()
        waiting.append(deadline)
        if not self._armed:
            self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed = True
        loop.call_at(self._waiting[0].due, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        self._armed = False
        while waiting and (waiting[0].closed or waiting[0].due <= loop.time()):
            deadline = waiting.popleft()
            if not deadline.closed:
                deadline.check()
        if waiting:
            self._arm(loop)
