"""The room on a disk: short below the reserve, and for a while after a write failed for lack of it."""

from __future__ import annotations

import errno

from coranto_broker.spool.disk_room import FULL_SECONDS, LOOK_SECONDS, DiskRoom
from coranto_broker.testing.running import ManualClock


def test_room_is_short_below_the_reserve() -> None:
    clock, free, asked = ManualClock(), [100], []

    def free_bytes() -> int:
        asked.append(True)
        return free[0]

    room = DiskRoom(free_bytes, 100, clock)
    assert not room.is_short
    free[0] = 99
    assert not room.is_short
    assert len(asked) == 1, "it is asked once in a while"
    clock.advance(LOOK_SECONDS)
    assert room.is_short
    free[0] = 100
    clock.advance(LOOK_SECONDS)
    assert not room.is_short
    assert not DiskRoom(lambda: 0, 0, clock).is_short


def test_room_is_short_for_a_while_after_a_write_that_found_none() -> None:
    clock = ManualClock()
    room = DiskRoom(lambda: 1 << 40, 1, clock)
    room.failed(OSError(errno.EIO, "another fault"))
    assert not room.is_short
    room.failed(OSError(errno.EDQUOT, "over quota"))
    assert room.is_short
    clock.advance(FULL_SECONDS)
    assert not room.is_short
