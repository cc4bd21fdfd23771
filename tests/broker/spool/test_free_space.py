"""Free space on a disk: short below the reserve."""

from __future__ import annotations

from coranto_broker.spool.free_space import CHECK_SECONDS, FreeSpace
from tests.broker.running import ManualClock


def test_free_space_is_short_below_the_reserve() -> None:
    clock, free, asked = ManualClock(), [100], []

    def free_bytes() -> int:
        asked.append(True)
        return free[0]

    room = FreeSpace(free_bytes, 100, clock)
    assert not room.is_short
    free[0] = 99
    assert not room.is_short
    assert len(asked) == 1, "the disk is asked at intervals"
    clock.advance(CHECK_SECONDS)
    assert room.is_short
    free[0] = 100
    clock.advance(CHECK_SECONDS)
    assert not room.is_short
    assert not FreeSpace(lambda: 0, 0, clock).is_short
