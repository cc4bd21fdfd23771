"""Admission of appends: a broker refuses appends beyond the number that it can complete soon.

Appends that come faster than they complete would queue without end, each with a longer delay, until their clients give
up and cannot know which of them were applied. An append that is refused at once is certain not to be applied.

A stream of appends is slowed down instead: at the limit, it waits until one of its own appends is done. Its first one
is always admitted. So one busy stream does not keep others out, and no append of a stream is refused.
"""

from __future__ import annotations

import math
from typing import Final

import structlog

from coranto.effects import Clock
from coranto_broker.fast_counters import FastCounter
from coranto_broker.metrics import UnderWay
from coranto_broker.rpc.rolled_back import TooManyAppends

LOG_SECONDS: Final = 1.0
"""Interval in which refusals share one log entry, since they come by the thousand."""
_log = structlog.get_logger(__name__)


class Admission:
    """Counts the appends under way, and refuses those beyond the limit."""

    def __init__(self, most: int, under_way: UnderWay, refused: FastCounter, clock: Clock) -> None:
        """`most` appends may be under way at a time, as `under_way` counts them; 0: any number."""
        self._most = most or math.inf
        self._under_way = under_way
        self._refused = refused
        self._clock = clock
        self._told_at = -math.inf
        self._untold = 0

    @property
    def is_full(self) -> bool:
        """True at the limit."""
        return self._under_way.count >= self._most

    def enter(self) -> None:
        """Count one more append. Call `leave` when it is done.

        Raises TooManyAppends, and counts nothing, at the limit.
        """
        if self.is_full:
            self._refuse()
        self._under_way.count += 1

    def enter_in_turn(self) -> None:
        """Count one more append of a stream that has none under way, or that has waited while `is_full`."""
        self._under_way.count += 1

    def leave(self) -> None:
        self._under_way.count -= 1

    def _refuse(self) -> None:
        count = self._under_way.count
        self._refused.value += 1
        self._untold += 1
        now = self._clock.monotonic()
        if now - self._told_at >= LOG_SECONDS:
            _log.warning("admission.appends_refused", under_way=count, refused=self._untold)
            self._told_at, self._untold = now, 0
        raise TooManyAppends(count)
