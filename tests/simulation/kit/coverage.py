"""Counters of paths that a simulation took, which prove that it covers the interesting ones.

A run without faults proves nothing. A simulation counts named events (`sometimes`), and a test requires that every name
occurred in some run.
"""

from __future__ import annotations

from collections import Counter


class PathCoverage:
    """Counts of paths by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def sometimes(self, name: str, condition: object = True) -> None:
        """Count `name` if `condition` holds."""
        if condition:
            self.counts[name] += 1

    def missing(self, names: set[str]) -> list[str]:
        """Return the names that never occurred."""
        return sorted(name for name in names if not self.counts[name])
