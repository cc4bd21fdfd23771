"""Admission of appends: a broker takes on no more of them at a time than it gets through soon, and refuses the others.

Appends that come faster than they are done gather without end, each later than the one before, until their clients give
up on them and nobody knows which of them were applied. One that is refused at once was not applied for certain.
"""

from __future__ import annotations

import math
from typing import Final

import structlog

from coranto.effects import Clock
from coranto_broker.fast_counters import Tally
from coranto_broker.metrics import UnderWay
from coranto_broker.rpc.rolled_back import Crowded

LOG_SECONDS: Final = 1.0
"""Refusals of so long are told of together, since they come by the thousand."""
_log = structlog.get_logger(__name__)


class Admission:
    """Counts the appends under way, and refuses those that are too many."""

    def __init__(self, most: int, under_way: UnderWay, refused: Tally, clock: Clock) -> None:
        """`most` appends may be under way at a time, as `under_way` counts them; 0: any number."""
        self._most = most or math.inf
        self._under_way = under_way
        self._refused = refused
        self._clock = clock
        self._told_at = -math.inf
        self._untold = 0

    def enter(self) -> None:
        """Count one more. Raises Crowded, and counts none. Call `leave` when it is done."""
        if self._under_way.count >= self._most:
            self._refuse()
        self._under_way.count += 1

    def leave(self) -> None:
        self._under_way.count -= 1

    def _refuse(self) -> None:
        count = self._under_way.count
        self._refused.value += 1
        self._untold += 1
        now = self._clock.monotonic()
        if now - self._told_at >= LOG_SECONDS:
            _log.warning("appends are refused: too many are under way", under_way=count, refused=self._untold)
            self._told_at, self._untold = now, 0
        raise Crowded(count)
