"""A limiter of concurrent jobs, so that jobs for thousands of journals do not delay a broker's lease and calls."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SLOT_SECONDS = 0.5
"""The time after which a job loses its slot."""
MAX_SLOTS = 64
"""The default number of slots."""
MAX_AT_WORK = 512
"""The default limit on concurrent jobs, with or without a slot.

Without it, a broker that is slow for some time would start ever more jobs, and become slower.
"""

_Waiter = asyncio.Future[None]


class PriorityLimiter:
    """Gives slots to waiting jobs first-in, first-out, preferred jobs first (`prefer`).

    A long job, such as a wait for a peer that does not answer, loses its slot after SLOT_SECONDS and continues without
    one, so that it does not block other jobs. It keeps its slot while `most` jobs are running.
    """

    def __init__(self, slots: int = MAX_SLOTS, most: int = MAX_AT_WORK) -> None:
        self._free = slots
        self._most = most
        self._at_work = 0
        self._ordinary: OrderedDict[_Waiter, None] = OrderedDict()
        self._preferred: OrderedDict[_Waiter, None] = OrderedDict()
        self._by_name: dict[str, _Waiter] = {}

    @property
    def waiting(self) -> int:
        """The number of jobs that wait for a slot."""
        return len(self._ordinary) + len(self._preferred)

    def prefer(self, name: str) -> None:
        """Move the waiting job of this name ahead of all ordinary jobs. No effect if it does not wait."""
        waiter = self._by_name.get(name)
        if waiter is not None and waiter in self._ordinary:
            del self._ordinary[waiter]
            self._preferred[waiter] = None

    @asynccontextmanager
    async def slot(self, name: str, *, preferred: bool = False) -> AsyncIterator[None]:
        """Run the block as a job, once it has a slot. `preferred` is like `prefer`."""
        await self._take(name, self._preferred if preferred else self._ordinary)
        self._at_work += 1
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None

        def lose() -> None:
            nonlocal timer
            if self._at_work < self._most:
                timer = None
                self._release()
            else:
                timer = loop.call_later(SLOT_SECONDS, lose)

        timer = loop.call_later(SLOT_SECONDS, lose)
        try:
            yield
        finally:
            self._at_work -= 1
            if timer is not None:
                timer.cancel()
                self._release()

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
                self._release()  # It got a slot just before the cancellation.
            raise
        finally:
            self._ordinary.pop(waiter, None)
            self._preferred.pop(waiter, None)
            if self._by_name.get(name) is waiter:
                del self._by_name[name]

    def _release(self) -> None:
        """Give the slot to the next waiter."""
        for queue in (self._preferred, self._ordinary):
            while queue:
                waiter, _ = queue.popitem(last=False)
                if not waiter.done():
                    waiter.set_result(None)
                    return
        self._free += 1
