"""The bounds of a run's transactions by messages and by time. Planning applies the bound by bytes (`ranges.py`).

The number of messages in a range is known only after reading it. So the plan uses the mean length of the messages read
before. The first transaction assumes the shortest possible lines of JSON with a UUID, so that it reads too little
rather than too much. If the messages of a transaction turn out to be much shorter, it is discarded after reading, and
planned again with the new length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from coranto_consumers.spark.journals.ranges import Range

SHORTEST_MESSAGE: Final = 64
"""The approximate bytes of a line of JSON that has a UUID and little else."""
_TOLERANCE: Final = 2
"""The most that a transaction may exceed `max_messages`, as a factor."""


class MessageBound:
    """The bytes that a transaction may read to have at most about `max_messages`. If that is None: `max_bytes`.

    A range's messages are known only after reading it, so the plan uses the mean length of those read before. The first
    transaction assumes the shortest lines, so that it reads too little rather than too much. If messages turn out to be
    much shorter, the transaction is discarded, and planned again. Otherwise a new mean takes effect at the next
    `settle`, so that the prefetch's plan and the transaction's own are equal.
    """

    def __init__(self, max_bytes: int, max_messages: int | None) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._seen: float = SHORTEST_MESSAGE
        self._settled: float = SHORTEST_MESSAGE

    @property
    def max_bytes(self) -> int:
        if self._max_messages is None:
            return self._max_bytes
        return max(1, min(self._max_bytes, int(self._max_messages * self._settled)))

    def see(self, ranges: Sequence[Range], messages: int) -> bool:
        """Record the messages in ranges. Return False if one transaction must not have them: plan it again."""
        if self._max_messages is None or not messages:
            return True
        self._seen = sum(each.length for each in ranges) / messages
        # A transaction reads at least one message of each journal.
        if messages > _TOLERANCE * max(self._max_messages, len(ranges)):
            self.settle()
            return False
        return True

    def settle(self) -> None:
        self._settled = self._seen


class Pace:
    """Limits how often a service begins to catch up: at most once in `seconds`."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._due = float("-inf")

    @property
    def is_due(self) -> bool:
        return self._monotonic() >= self._due

    def took(self) -> None:
        self._due = self._monotonic() + self._seconds
