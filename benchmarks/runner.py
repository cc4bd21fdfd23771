"""Measurement and reports of benchmark figures.

Absolute figures do not compare across machines. So every entry measures a *floor* and the subject in turns within one
run (floor, subject, floor, subject, …), and reports the median ratio of the pairs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One measure: `subject` and `floor` are rates in `unit` (more is better), one per round, taken in pairs."""

    name: str
    unit: str
    subject: list[float]
    floor: list[float]
    floor_name: str
    note: str = ""

    @property
    def ratio(self) -> float:
        """The median over the rounds of subject ÷ floor."""
        return statistics.median(s / f for s, f in zip(self.subject, self.floor, strict=True))

    def row(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "subject_median": statistics.median(self.subject),
            "floor_median": statistics.median(self.floor),
            "floor": self.floor_name,
            "ratio": self.ratio,
            "ratios": [s / f for s, f in zip(self.subject, self.floor, strict=True)],
            "subject": self.subject,
            "floor_values": self.floor,
            "note": self.note,
        }


def measure_pairs(
    rounds: int, floor: Callable[[], float], subject: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Run both once to warm up, then `rounds` times in turns. Return the rates of (subject, floor)."""
    found = measure_interleaved(rounds, {"floor": floor, "subject": subject})
    return found["subject"], found["floor"]


def measure_interleaved(
    rounds: int, measures: Mapping[str, Callable[[], float]], *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Run all measures `rounds` times in turns, after one warm-up run of each. Return the rates of each."""
    if warm_up:
        for measure in measures.values():
            measure()
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
        "architecture": platform.machine(),
    }


def report(benchmark: str, figures: list[Figure]) -> Path:
    """Write `results/<benchmark>.json`, print the same as a table, and return the file's path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}.json"
    path.write_text(json.dumps({"machine": machine(), "figures": [f.row() for f in figures]}, indent=2) + "\n")
    table = Table(title=benchmark, title_justify="left")
    table.add_column("measure")
    table.add_column("rate", justify="right")
    table.add_column("floor", justify="right")
    table.add_column("unit")
    table.add_column("ratio (min … median … max)", justify="right")
    table.add_column("the floor is")
    for figure in figures:
        ratios = sorted(s / f for s, f in zip(figure.subject, figure.floor, strict=True))
        table.add_row(
            figure.name,
            f"{statistics.median(figure.subject):,.1f}",
            f"{statistics.median(figure.floor):,.1f}",
            figure.unit,
            f"{ratios[0]:.2f} … {figure.ratio:.2f} … {ratios[-1]:.2f}",
            figure.floor_name,
        )
    Console(file=sys.stdout, width=150).print(table)
    return path
