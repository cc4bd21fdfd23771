"""Admission of appends: a broker refuses appends beyond the number that it can complete soon.

Appends that come faster than they complete would queue without end, each with a longer delay, until their clients give
up and cannot know which of them were applied. An append that is refused at once is certain not to be applied.

A stream of appends is slowed down instead, and no append of it is refused: at the limit, it waits until there is room,
or until all its own appends are done, since one append of each stream is always admitted. So no busy stream keeps
another one out, and a wait ends whatever the others do: an append that is under way needs nothing that a stream waits
for.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
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

    def __init__(self, most: int, under_way: UnderWay, refused: FastCounter, waits: FastCounter, clock: Clock) -> None:
        """`most` appends may be under way at a time, as `under_way` counts them; 0: any number.

        `refused` counts appends, and `waits` those of streams that had to wait.
        """
        self._most = most or math.inf
        self._under_way = under_way
        self._refused = refused
        self._waits = waits
        self._clock = clock
        self._told_at = -math.inf
        self._untold = 0
        self._line: OrderedDict[asyncio.Event, None] = OrderedDict()  # The streams that wait.

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

    @contextmanager
    def line(self, room: asyncio.Event) -> Iterator[None]:
        """Have `room` set when there is room, while a stream waits in the block. Who came first is told first."""
        self._line[room] = None
        self._waits.value += 1
        try:
            yield
        finally:
            del self._line[room]
            self._tell()

    def leave(self) -> None:
        self._under_way.count -= 1
        if self._line:
            self._tell()

    def _tell(self) -> None:
        """Tell the stream that has waited longest of room. It tells the next one when it has stopped waiting."""
        if self._line and not self.is_full:
            next(iter(self._line)).set()

    def _refuse(self) -> None:
        count = self._under_way.count
        self._refused.value += 1
        self._untold += 1
        now = self._clock.monotonic()
        if now - self._told_at >= LOG_SECONDS:
            _log.warning("admission.appends_refused", under_way=count, refused=self._untold)
            self._told_at, self._untold = now, 0
        raise TooManyAppends(count)
