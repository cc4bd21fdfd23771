"""A rota of looks at clients that all have the same time: one timer does for any number of them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class Looked(Protocol):
    """Looks at a client at `due`, unless it is closed by then."""

    due: float
    closed: bool

    def check(self) -> None: ...


class Rota:
    """Looks at clients. All are due as long after they were asked for, so one timer does for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[Looked] = deque()
        self._armed = False

    @property
    def waiting(self) -> int:
        """Looks that are still to be taken."""
        return sum(not each.closed for each in self._waiting)

    def add(self, watchdog: Looked) -> None:
        """Have this look at its client at its time, unless it is closed by then."""
        waiting = self._waiting
        while waiting and waiting[0].closed:
            waiting.popleft()
        waiting.append(watchdog)
        if not self._armed:
            self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._armed = True
        loop.call_at(self._waiting[0].due, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        self._armed = False
        while waiting and (waiting[0].closed or waiting[0].due <= loop.time()):
            watchdog = waiting.popleft()
            if not watchdog.closed:
                watchdog.check()
        if waiting:
            self._arm(loop)
