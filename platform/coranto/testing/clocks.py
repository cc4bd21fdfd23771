"""Clocks for tests."""

from __future__ import annotations

import asyncio
import time


class HurriedClock:
    """A clock whose waits end immediately. The waited seconds add up in `slept`, which is also its monotonic time."""

    def __init__(self) -> None:
        self.slept = 0.0
        self.has_slept = asyncio.Event()

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.has_slept.set()
        await asyncio.sleep(0)
