"""The command `python -m coranto_broker.simulation`: runs seeds, and prints how to repeat those that fail."""

from __future__ import annotations

from typing import Annotated

import typer

from coranto_broker.simulation.options import options_of
from coranto_broker.simulation.playing import First, Quiet, Seed, Seeds, play_seeds
from coranto_broker.simulation.run import run


def main(
    seed: Seed = None,
    seeds: Seeds = 200,
    first: First = 0,
    quiet: Quiet = False,
    append_streams: Annotated[bool, typer.Option(help="Let small appends share streams.")] = False,
) -> None:
    """Run simulations. The exit code is 1 when one of them found something."""
    play_seeds(
        lambda number, tell: run(options_of(number, append_streams=append_streams), tell=tell),
        seed=seed,
        seeds=seeds,
        first=first,
        quiet=quiet,
    )


if __name__ == "__main__":
    typer.run(main)
