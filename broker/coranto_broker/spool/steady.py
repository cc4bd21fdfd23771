"""The range where appends of only content extend the spool's fragment as it is."""

from __future__ import annotations

from typing import NamedTuple

from coranto.fragments.fragment import Fragment


class Steady(NamedTuple):
    """A fragment that grows without a roll.

    It begins at `begin`, may be extended while its end is at most `end`, and until the wall time `until` in seconds.
    """

    begin: int
    end: int
    until: float

    def holds(self, fragment: Fragment, now: float) -> bool:
        """Return True if the fragment may be extended as it is at the wall time `now`."""
        return fragment.begin == self.begin and fragment.end <= self.end and now < self.until
