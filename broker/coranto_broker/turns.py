"""Turns for work of one kind, so that thousands of journals leave a broker time for its lease and for calls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TURN_SECONDS = 0.5
"""Maximum duration of a turn."""
PARALLEL = 64
"""Most turns of one kind at the same time."""
MAX_AT_WORK = 512
"""Most works of one kind at the same time, those that have lost their turns too.

Without this bound, a broker that is slow for a while would begin ever more work, and become slower still.
"""

_Waiter = asyncio.Future[None]


class Turns:
    """Gives turns first-in first-out, but preferred names first (`prefer`).

    Work that takes long, as with a peer that does not answer, loses its turn after TURN_SECONDS and continues without
    it,
    so that it does not hold back the rest. It keeps its turn while `most` are at work.
    """

    def __init__(self, parallel: int = PARALLEL, most: int = MAX_AT_WORK) -> None:
        self._free = parallel
        self._most = most
        self._at_work = 0
        self._ordinary: OrderedDict[_Waiter, None] = OrderedDict()
        self._preferred: OrderedDict[_Waiter, None] = OrderedDict()
        self._by_name: dict[str, _Waiter] = {}

    @property
    def waiting(self) -> int:
        """The number of those that wait for a turn."""
        return len(self._ordinary) + len(self._preferred)

    def prefer(self, name: str) -> None:
        """Give the work of this name its turn before all work that was not preferred. No effect if it does not wait."""
        waiter = self._by_name.get(name)
        if waiter is not None and waiter in self._ordinary:
            del self._ordinary[waiter]
            self._preferred[waiter] = None

    @asynccontextmanager
    async def turn(self, name: str, *, preferred: bool = False) -> AsyncIterator[None]:
        """Wait for a turn, and have it during the block or for TURN_SECONDS, whichever is shorter.

        With `preferred`, it is as if `prefer` were called immediately.
        """
        await self._take(name, self._preferred if preferred else self._ordinary)
        self._at_work += 1
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None

        def lose() -> None:
            nonlocal timer
            if self._at_work < self._most:
                timer = None
                self._pass_on()
            else:
                timer = loop.call_later(TURN_SECONDS, lose)

        timer = loop.call_later(TURN_SECONDS, lose)
        try:
            yield
        finally:
            self._at_work -= 1
            if timer is not None:
                timer.cancel()
                self._pass_on()

    async def _take(self, name: str, queue: OrderedDict[_Waiter, None]) -> None:
        if self._free:
            self._free -= 1
            return
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        queue[waiter] = None
        self._by_name[name] = waiter
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._pass_on()  # It was given a turn at the same moment.
            raise
        finally:
            self._ordinary.pop(waiter, None)
            self._preferred.pop(waiter, None)
            if self._by_name.get(name) is waiter:
                del self._by_name[name]

    def _pass_on(self) -> None:
        """Give a turn to the next that waits."""
        for queue in (self._preferred, self._ordinary):
            while queue:
                waiter, _ = queue.popitem(last=False)
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._free += 1
