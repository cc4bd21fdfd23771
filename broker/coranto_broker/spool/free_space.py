"""Watches the free space on a broker's disk, so that appends are refused before a write fails.

A write that fails for lack of space at one replica leaves the outcome of its append unknown, since the other replicas
may have committed it. So each acknowledgement reports if the free space is below a reserve. The primary then rejects
appends with content, and nothing of them is committed. The reserve is for appends in flight, and for completing and
storing fragments. A disk quota below the free space is not detected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import structlog

from coranto.effects import Clock

CHECK_SECONDS: Final = 1.0
_log = structlog.get_logger(__name__)


class FreeSpace:
    """The free space on the disk of one broker."""

    def __init__(self, free_bytes: Callable[[], int], reserve_bytes: int, clock: Clock) -> None:
        """Space is short while `free_bytes` returns less than `reserve_bytes`; 0: never."""
        self._free_bytes = free_bytes
        self._reserve_bytes = reserve_bytes
        self._clock = clock
        self._checked_at = -math.inf
        self._short = False

    @property
    def is_short(self) -> bool:
        """True if appends with content should be refused."""
        now = self._clock.monotonic()
        if self._reserve_bytes and now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            free = self._free_bytes()
            if (free < self._reserve_bytes) != self._short:
                self._short = not self._short
                _log.warning("disk.room_changed", short=self._short, free=free, reserve=self._reserve_bytes)
        return self._short
