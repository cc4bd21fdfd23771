"""Watches the room on a broker's disk, so that appends are refused before a write fails.

A replica whose disk is full fails in the middle of an append, when others may have committed it: nobody knows the
outcome. So each acknowledgement tells whether the room has shrunk to a reserve. Then the primary refuses appends with
content, which is certain, and the reserve is for what is under way, and for completing and storing fragments.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from typing import Final

import structlog

from coranto.effects import Clock

_log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 1.0
FULL_SECONDS: Final = 10.0
"""Time for which room counts as short after a write failed: a quota shows in no number of free bytes."""


class DiskRoom:
    """The room on the disk of one broker."""

    def __init__(self, free_bytes: Callable[[], int], reserve_bytes: int, clock: Clock) -> None:
        """The room is short while `free_bytes` returns less than `reserve_bytes`; 0: only after a write failed."""
        self._free_bytes = free_bytes
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._looked_at = -math.inf
        self._full_until = -math.inf
        self._short = False

    @property
    def is_short(self) -> bool:
        """True if appends with content should be refused."""
        now = self._clock.monotonic()
        if now < self._full_until:
            return True
        if self._reserve_bytes and now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            free = self._free_bytes()
            if (free < self._reserve_bytes) != self._short:
                self._short = not self._short
                _log.warning("disk.room_changed", short=self._short, free=free, reserve=self._reserve_bytes)
        return self._short

    def failed(self, error: OSError) -> None:
        """Note a failed write. Room is short for a while if there was none for it."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._full_until = self._clock.monotonic() + FULL_SECONDS
