"""Clocks of simulated machines, with skew, and with rates that are slightly too fast or too slow."""

from __future__ import annotations

import asyncio

from coranto.testing.sim.timeline import Process, Timeline


class SimClock:
    """A machine's clock as seen by one process."""

    def __init__(
        self, timeline: Timeline, process: Process | None = None, *, skew: float = 0.0, rate: float = 1.0
    ) -> None:
        """Create a clock. `skew` is in seconds of wall time; `rate` is the number of seconds it counts per second."""
        self._timeline = timeline
        self._process = process
        self._skew = skew
        self._rate = rate

    def now(self) -> float:
        return self._timeline.epoch + self._skew + self._timeline.time() * self._rate

    def monotonic(self) -> float:
        return 1000.0 + self._timeline.time() * self._rate

    async def sleep(self, seconds: float) -> None:
        if self._process is not None:
            self._process.check_alive()
        await asyncio.sleep(seconds / self._rate)
