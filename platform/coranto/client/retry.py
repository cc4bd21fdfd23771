"""When to try again: the schedule of waits, and how long to keep at it."""

from __future__ import annotations

import math

_SCHEDULE = (0.05, 0.05, 0.1, 0.1, 0.25, 0.5, *[1.0] * 30)
"""It reaches beyond the lease of a broker that died: others then take over within a moment, and nobody shall still be
waiting a long time when they have."""
_LATER = 5.0


def backoff(attempt: int) -> float:
    """Seconds to wait after the failure number `attempt` (from 0) since the last progress."""
    return _SCHEDULE[attempt] if attempt < len(_SCHEDULE) else _LATER


class Retry:
    """Counts the failures of one operation since it last made progress, and says how long to wait or to give up.

    It gives up when waiting again would exceed `patience` seconds since the first failure.
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
        """Seconds to wait before the next attempt, or None to give up. `now` is a monotonic reading."""
        if self._failures == 0:
            self._since = now
        wait = backoff(self._failures)
        self._failures += 1
        return wait if now + wait - self._since <= self._patience else None
