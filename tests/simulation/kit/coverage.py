"""Proof that a simulation covers the interesting paths: counters of paths that were taken.

A run that never meets a fault proves nothing. A simulation notes events under names (`sometimes`), and a test requires
that every name occurred in some run.
"""

from __future__ import annotations

from collections import Counter


class PathCoverage:
    """Counts of noted paths."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def sometimes(self, name: str, condition: object = True) -> None:
        """Note that `name` happened, if `condition` holds."""
        if condition:
            self.counts[name] += 1

    def missing(self, names: set[str]) -> list[str]:
        """Return those of `names` that never happened."""
        return sorted(name for name in names if not self.counts[name])
