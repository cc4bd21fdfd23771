"""The bounds of a run's transactions by messages and by time. Those by bytes are planned (`ranges.py`).

The number of messages in a range is not known before it is read. So a transaction is planned by the mean length of the
messages that were read before it. The first one takes messages as short as lines of JSON with a UUID can be, so it
rather reads too little. If the messages of a transaction are much shorter than those before, it is let go as soon as it
was read, and planned again by what was found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from coranto_consumers.spark.journals.ranges import Range

SHORTEST_MESSAGE: Final = 64
"""About the bytes of a line of JSON that has a UUID and little else."""
_TOLERANCE: Final = 2
"""The factor by which a transaction may exceed the number of messages that it should have."""


class TooManyMessages(Exception):
    """An input has far more messages than a transaction may have. It never leaves a consumer."""


class MessageBound:
    """The bytes that a transaction may read so that it has at most about `max_messages`; None: `max_bytes`.

    What is seen counts from the next call of `settle` on: a plan that is made twice, for reading ahead and in its
    turn, is the same until then.
    """

    def __init__(self, max_bytes: int, max_messages: int | None) -> None:
        self._max_bytes = max_bytes
        self._max_messages = max_messages
        self._seen: float = SHORTEST_MESSAGE
        self._settled: float = SHORTEST_MESSAGE

    @property
    def max_bytes(self) -> int:
        """The bytes that the next transaction may read."""
        if self._max_messages is None:
            return self._max_bytes
        return max(1, min(self._max_bytes, int(self._max_messages * self._settled)))

    def see(self, ranges: Sequence[Range], messages: int) -> None:
        """Take in that ranges have so many messages. Raises TooManyMessages if that must not be one transaction."""
        if self._max_messages is None or not messages:
            return
        self._seen = sum(each.length for each in ranges) / messages
        # Of each journal, a transaction reads a message at least.
        if messages > _TOLERANCE * max(self._max_messages, len(ranges)):
            raise TooManyMessages

    def settle(self) -> None:
        """Plan by what was seen last."""
        self._settled = self._seen


class Pace:
    """The times at which a service takes what was written: at most once in `seconds`."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._due = float("-inf")

    @property
    def is_due(self) -> bool:
        """True if it may take it now."""
        return self._monotonic() >= self._due

    def took(self) -> None:
        """Take in that it does."""
        self._due = self._monotonic() + self._seconds
