"""Gaps in the sequences of a writer: writes that failed, and were not given again. Pure.

A segment's registers have only the last durable sequence, and everything below it counts as durable. So nothing may be
applied above a gap: a process that repeats the missing write would get a false answer that it is durable.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from coranto.errors import CorantoError
from coranto.streams.model.keys import KeyRange
from coranto.streams.writer.units import WriteUnit


class Gap(NamedTuple):
    """A failed write. `order` and `place` are its unit's, and `error` is the cause."""

    sequence: int
    order: int
    place: int
    error: CorantoError


class Gaps:
    """The gaps of one writer, in all segments."""

    __slots__ = ("_gaps",)

    def __init__(self) -> None:
        self._gaps: list[Gap] = []  # By sequence.

    def failed(self, unit: WriteUnit, error: CorantoError) -> None:
        """Note a gap if the user gave the unit's sequence."""
        if unit.sequence is not None:
            insort(self._gaps, Gap(unit.sequence, unit.order, unit.place, error), key=lambda gap: gap[:2])

    def given(self, unit: WriteUnit) -> None:
        """Close the gaps with the unit's sequence. The unit gets the order of the first write that failed there."""
        if not self._gaps or unit.sequence is None:
            return
        begin = bisect_left(self._gaps, unit.sequence, key=lambda gap: gap.sequence)
        end = bisect_left(self._gaps, unit.sequence + 1, begin, key=lambda gap: gap.sequence)
        if begin < end:
            unit.order = self._gaps[begin].order
            del self._gaps[begin:end]

    def before(self, sequence: int, keys: KeyRange) -> Gap | None:
        """Return the first gap below a sequence in a range of keys, if there is one."""
        for gap in self._gaps:
            if gap.sequence >= sequence:
                break
            if keys.contains(gap.place):
                return gap
        return None
