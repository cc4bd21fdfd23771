"""Coverage: the paths that a test's simulations must reach, and the number of runs for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping


def missing(total: Counter[str], wanted: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the paths that were taken too rarely, with their actual and wanted counts."""
    return {name: (total[name], least) for name, least in wanted.items() if total[name] < least}


def seeds_until(least: int, total: Counter[str], wanted: Mapping[str, int]) -> Iterator[int]:
    """Yield at least `least` seeds, and more until their `total` has the wanted paths, up to four times as many.

    After each change of the order of events in a loop, other seeds reach the rare paths.
    """
    for seed in range(4 * least):
        if seed >= least and not missing(total, wanted):
            return
        yield seed
