"""Coverage: the paths that a test's simulations must reach, and how many runs that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping


def missing(total: Counter[str], wanted: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the paths that were seen too rarely, with their actual and wanted counts."""
    return {name: (total[name], least) for name, least in wanted.items() if total[name] < least}


def seeds_until(least: int, total: Counter[str], wanted: Mapping[str, int]) -> Iterator[int]:
    """So many seeds at least, and more until their `total` has what is wanted, up to four times as many.

    What is rare comes about in other seeds after every change of who does what in which turn of the loop.
    """
    for seed in range(4 * least):
        if seed >= least and not missing(total, wanted):
            return
        yield seed
