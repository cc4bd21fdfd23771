"""`python -m tests.simulation.streams`: run seeds, and say how to repeat those that fail."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Annotated

import typer

from .options import options_of, shared_options_of
from .run import run


def main(
    seed: Annotated[int | None, typer.Option(help="Run this seed alone, and tell everything that happens.")] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds to run.")] = 60,
    first: Annotated[int, typer.Option(help="The first of them.")] = 0,
    groups: Annotated[bool, typer.Option(help="With transactions on several keys, and a reader group.")] = False,
    quiet: Annotated[bool, typer.Option(help="With --seed: only the result.")] = False,
) -> None:
    """Run simulations. The exit code is 1 when one of them found something."""
    of = shared_options_of if groups else options_of
    if seed is not None:
        report = run(of(seed), tell=None if quiet else print)
        print(report)  # noqa: T201
        sys.exit(0 if report.sound else 1)
    began = time.process_time()
    failed: list[int] = []
    total: Counter[str] = Counter()
    for number in range(first, first + seeds):
        report = run(of(number))
        total += report.coverage + report.outcomes
        if not report.sound:
            failed.append(number)
            print(report, flush=True)  # noqa: T201
    for name, count in sorted(total.items()):
        print(f"{count:8} {name}")  # noqa: T201
    seconds = time.process_time() - began
    print(f"{seeds} seeds, {len(failed)} failed {failed}; {seconds:.1f} s of CPU")  # noqa: T201
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
