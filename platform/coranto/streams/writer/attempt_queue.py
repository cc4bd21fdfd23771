"""Units of one segment writer that are neither durable nor failed, in order of writing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from coranto.streams.writer.units import Attempt, WriteUnit


class AttemptQueue:
    """Attempts in flight come first, then attempts to send again, then units that are in no attempt yet."""

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
        """True if an attempt that is to be sent again may have been applied."""
        return any(attempt.doubtful for attempt in self.again)

    def append(self, unit: WriteUnit) -> None:
        """Add a unit after all others, or before those with a later order if it is given again."""
        later = list[WriteUnit]()
        while self.units and self.units[-1].order > unit.order:
            later.append(self.units.pop())
        self.units.append(unit)
        self.units.extend(reversed(later))

    def insert(self, units: Iterable[WriteUnit]) -> None:
        """Add units that are not in any attempt, in the order that the stream writer received them."""
        self.units = deque(sorted([*self.units, *units], key=lambda unit: unit.order))

    def send_in_flight_again(self) -> None:
        """Send the attempts in flight again, before the others."""
        self.again = deque([*self.in_flight, *self.again])
        self.in_flight.clear()

    def plan_again(self) -> None:
        """Dissolve the attempts to send again into their units."""
        self.units.extendleft(reversed([unit for attempt in self.again for unit in attempt.units]))
        self.again.clear()

    def take_units(self) -> list[WriteUnit]:
        """Remove and return all units that are not in flight."""
        self.plan_again()
        units = list(self.units)
        self.units.clear()
        return units

    def take_attempts(self) -> list[Attempt]:
        """Remove and return all attempts. One that was not answered may have been applied."""
        attempts = [*self.in_flight, *self.again]
        for attempt in self.in_flight:
            attempt.doubtful |= not attempt.is_answered
        self.in_flight.clear()
        self.again.clear()
        return attempts
