"""A clock that a test moves."""

from __future__ import annotations

import asyncio


class ManualClock:
    """Time that passes only by `advance`."""

    def __init__(self) -> None:
        self._seconds = 1_000.0

    def now(self) -> float:
        return self._seconds

    def monotonic(self) -> float:
        return self._seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self._seconds += seconds
