"""Admission of appends: a limit on the appends under way.

Appends that arrive faster than they complete would queue with growing delays, until their clients time out with unknown
outcomes. A unary append beyond the limit is refused immediately, so its client knows that it was not applied.

A stream of appends is slowed down instead: at the limit it waits until there is room, or until its own appends are
done, since one append of each stream is always admitted. So streams do not starve each other, and a wait always ends,
because appends under way do not depend on waiting streams.
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
"""The interval of log lines about refusals."""
_log = structlog.get_logger(__name__)


class Admission:
    """Counts the appends under way, and refuses appends beyond the limit."""

    def __init__(self, most: int, under_way: UnderWay, refused: FastCounter, waits: FastCounter, clock: Clock) -> None:
        """`most` is the limit of `under_way`; 0 is none. `refused` counts appends, and `waits` waits of streams."""
        self._most = most or math.inf
        self._under_way = under_way
        self._refused = refused
        self._waits = waits
        self._clock = clock
        self._logged_at = -math.inf
        self._unlogged = 0
        self._waiting: OrderedDict[asyncio.Event, None] = OrderedDict()

    @property
    def is_full(self) -> bool:
        """True at the limit."""
        return self._under_way.count >= self._most

    def enter(self) -> None:
        """Count an append; call `leave` when it is done. At the limit, raise TooManyAppends instead."""
        if self.is_full:
            self._refuse()
        self._under_way.count += 1

    def enter_in_turn(self) -> None:
        """Count an append of a stream that has none under way, or that has waited while `is_full`."""
        self._under_way.count += 1

    @contextmanager
    def waiting(self, room: asyncio.Event) -> Iterator[None]:
        """Set `room` when there is room, while a stream waits in the block. Streams are served in order."""
        self._waiting[room] = None
        self._waits.value += 1
        try:
            yield
        finally:
            del self._waiting[room]
            self._wake()

    def leave(self) -> None:
        self._under_way.count -= 1
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        """Wake the stream that has waited longest, if there is room. It wakes the next one when it stops waiting."""
        if self._waiting and not self.is_full:
            next(iter(self._waiting)).set()

    def _refuse(self) -> None:
        count = self._under_way.count
        self._refused.value += 1
        self._unlogged += 1
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            _log.warning("admission.appends_refused", under_way=count, refused=self._unlogged)
            self._logged_at, self._unlogged = now, 0
        raise TooManyAppends(count)
