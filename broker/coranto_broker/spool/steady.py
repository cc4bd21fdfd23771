"""The range where plain appends extend the spool's fragment without a roll."""

from __future__ import annotations

from typing import NamedTuple

from coranto.fragments.fragment import Fragment


class Steady(NamedTuple):
    """The range where a fragment grows without a roll.

    The fragment begins at `begin`. It may be extended while its end is at most `end`, and before the wall time `until`
    in seconds.
    """

    begin: int
    end: int
    until: float

    def holds(self, fragment: Fragment, now: float) -> bool:
        """Return True if the fragment may be extended without a roll at the wall time `now`."""
        return fragment.begin == self.begin and fragment.end <= self.end and now < self.until
