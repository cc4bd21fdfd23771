"""Units of one segment writer that are neither durable nor failed, in order of writing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from coranto.streams.writer.units import Attempt, WriteUnit


class AttemptQueue:
    """Attempts in flight come first, then attempts to resend, then units without an attempt."""

    __slots__ = ("again", "in_flight", "units")

    def __init__(self) -> None:
        self.in_flight: deque[Attempt] = deque()
        self.again: deque[Attempt] = deque()
        self.units: deque[WriteUnit] = deque()

    @property
    def oldest(self) -> float:
        """The order of the first unit; infinite if there is none."""
        firsts = [attempts[0].units[0] for attempts in (self.in_flight, self.again) if attempts]
        return min([unit.order for unit in [*firsts, *([self.units[0]] if self.units else [])]], default=math.inf)

    @property
    def has_work(self) -> bool:
        return bool(self.units or self.again or self.in_flight)

    @property
    def is_doubtful(self) -> bool:
        """True if an attempt to resend may have been applied."""
        return any(attempt.doubtful for attempt in self.again)

    def append(self, unit: WriteUnit) -> None:
        """Add a unit at the end, or before units with a later order if it retries a failed unit."""
        later = list[WriteUnit]()
        while self.units and self.units[-1].order > unit.order:
            later.append(self.units.pop())
        self.units.append(unit)
        self.units.extend(reversed(later))

    def insert(self, units: Iterable[WriteUnit]) -> None:
        """Add units without an attempt, sorted by their `order`."""
        self.units = deque(sorted([*self.units, *units], key=lambda unit: unit.order))

    def send_in_flight_again(self) -> None:
        """Queue the attempts in flight to be resent, before other attempts."""
        self.again = deque([*self.in_flight, *self.again])
        self.in_flight.clear()

    def plan_again(self) -> None:
        """Turn the attempts to resend back into units without an attempt."""
        self.units.extendleft(reversed([unit for attempt in self.again for unit in attempt.units]))
        self.again.clear()

    def take_units(self) -> list[WriteUnit]:
        """Remove and return all units that are not in flight."""
        self.plan_again()
        units = list(self.units)
        self.units.clear()
        return units

    def take_attempts(self) -> list[Attempt]:
        """Remove and return all attempts. Attempts in flight without an answer become doubtful."""
        attempts = [*self.in_flight, *self.again]
        for attempt in self.in_flight:
            attempt.doubtful |= not attempt.is_answered
        self.in_flight.clear()
        self.again.clear()
        return attempts
