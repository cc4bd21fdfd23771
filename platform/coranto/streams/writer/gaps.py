"""Gaps in the sequences of a writer: failed writes that were not retried. Pure.

A segment's registers have only the last durable sequence, and everything below it counts as durable. So no write above
a gap may be applied: a later retry of the missing write would be discarded as a duplicate.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from coranto.errors import CorantoError
from coranto.streams.model.keys import KeyRange
from coranto.streams.writer.units import WriteUnit


class Gap(NamedTuple):
    """A failed write. `order` and `key_hash` are from its unit, and `error` is the cause."""

    sequence: int
    order: int
    key_hash: int
    error: CorantoError


class Gaps:
    """The gaps of one writer, in all segments."""

    __slots__ = ("_gaps",)

    def __init__(self) -> None:
        self._gaps: list[Gap] = []  # By sequence.

    def add(self, unit: WriteUnit, error: CorantoError) -> None:
        """Add a gap for a failed unit with a sequence from the user."""
        if unit.sequence is not None:
            insort(self._gaps, Gap(unit.sequence, unit.order, unit.key_hash, error), key=lambda gap: gap[:2])

    def close(self, unit: WriteUnit) -> None:
        """Close the gaps that have the unit's sequence. The unit gets the order of the first failed write."""
        if not self._gaps or unit.sequence is None:
            return
        begin = bisect_left(self._gaps, unit.sequence, key=lambda gap: gap.sequence)
        end = bisect_left(self._gaps, unit.sequence + 1, begin, key=lambda gap: gap.sequence)
        if begin < end:
            unit.order = self._gaps[begin].order
            del self._gaps[begin:end]

    def first_before(self, sequence: int, keys: KeyRange) -> Gap | None:
        """Return the first gap below a sequence in a range of keys, if there is one."""
        for gap in self._gaps:
            if gap.sequence >= sequence:
                break
            if keys.contains(gap.key_hash):
                return gap
        return None
