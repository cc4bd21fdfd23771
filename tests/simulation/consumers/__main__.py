"""The command `python -m tests.simulation.consumers`: runs seeds and prints how to replay failed ones."""

from __future__ import annotations

import typer

from tests.simulation.broker.playing import First, Quiet, Seed, Seeds, play_seeds

from .options import options_of
from .run import run


def main(seed: Seed = None, seeds: Seeds = 100, first: First = 0, quiet: Quiet = False) -> None:
    """Run simulations. The exit code is 1 when a run fails."""
    play_seeds(
        lambda number, tell: run(options_of(number), tell=tell), seed=seed, seeds=seeds, first=first, quiet=quiet
    )


if __name__ == "__main__":
    typer.run(main)
