"""The command `python -m tests.simulation.broker`: runs seeds and prints how to replay failed ones."""

from __future__ import annotations

from typing import Annotated

import typer

from tests.simulation.broker.options import options_of
from tests.simulation.broker.playing import First, Quiet, Seed, Seeds, play_seeds
from tests.simulation.broker.run import run


def main(
    seed: Seed = None,
    seeds: Seeds = 200,
    first: First = 0,
    quiet: Quiet = False,
    append_streams: Annotated[
        bool | None, typer.Option(help="Let small appends share streams, or none. By default, most seeds let them.")
    ] = None,
) -> None:
    """Run simulations. The exit code is 1 when a run fails."""
    given = {} if append_streams is None else {"append_streams": append_streams}
    play_seeds(
        lambda number, tell: run(options_of(number, **given), tell=tell),
        seed=seed,
        seeds=seeds,
        first=first,
        quiet=quiet,
    )


if __name__ == "__main__":
    typer.run(main)
