"""The paths and planted bugs that a test's simulations must reach, and the number of runs for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from .broker.playing import SeedReport

PLANTED_SEEDS = 64
"""Seeds to search for a planted bug. After each change of the order of events in a loop, other seeds show it."""


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


def finds_anomaly(
    names: Collection[str], run: Callable[[int], SeedReport[Any, Any]], first: int = 0, seeds: int = PLANTED_SEEDS
) -> bool:
    """Return True if one of `seeds` seeds from `first` on shows an anomaly of one of these names. Stops there."""
    return any(anomaly.name in names for seed in range(first, first + seeds) for anomaly in run(seed).anomalies)
