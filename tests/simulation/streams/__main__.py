"""The command `python -m tests.simulation.streams`: runs seeds and prints how to replay failed ones."""

from __future__ import annotations

from typing import Annotated

import typer

from tests.simulation.broker.playing import First, Quiet, Seed, Seeds, play_seeds

from .options import lost_answers_options_of, options_of, shared_options_of
from .run import run


def main(
    seed: Seed = None,
    seeds: Seeds = 60,
    first: First = 0,
    groups: Annotated[bool, typer.Option(help="With transactions on several keys, and a reader group.")] = False,
    lost_answers: Annotated[
        bool, typer.Option(help="A short run of one writer, with a fault in each of its appends.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run simulations. The exit code is 1 when a run fails."""
    of = shared_options_of if groups else lost_answers_options_of if lost_answers else options_of
    play_seeds(lambda number, tell: run(of(number), tell=tell), seed=seed, seeds=seeds, first=first, quiet=quiet)


if __name__ == "__main__":
    typer.run(main)
