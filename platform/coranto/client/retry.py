"""Retries: the schedule of waits, and the time limit."""

from __future__ import annotations

import math

_SCHEDULE = (0.05, 0.05, 0.1, 0.1, 0.25, 0.5, *[1.0] * 30)
"""Waits in seconds. Short waits go on beyond the lease of a dead broker: then others take over within a moment, and no
client should still be in a long wait."""
_LATER = 5.0


def backoff(attempt: int) -> float:
    """Return the seconds to wait after failure number `attempt` (from 0) since the last progress."""
    return _SCHEDULE[attempt] if attempt < len(_SCHEDULE) else _LATER


class Retry:
    """Counts the failures of one operation since its last progress, and decides how long to wait or to give up.

    It gives up when the next wait would exceed `patience` seconds since the first failure.
    """

    def __init__(self, patience: float = math.inf) -> None:
        self._patience = patience
        self._failures = 0
        self._since = 0.0

    def progressed(self) -> None:
        self._failures = 0

    @property
    def failures(self) -> int:
        return self._failures

    def failed(self, now: float) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up. `now` is a monotonic time."""
        if self._failures == 0:
            self._since = now
        wait = backoff(self._failures)
        self._failures += 1
        return wait if now + wait - self._since <= self._patience else None
