"""The command `python -m tests.chain`: kills processes in a chain of consumers for a given time."""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from coranto.errors import CorantoError
from coranto.telemetry import configure_logging
from tests.chain.chain import ChainOptions
from tests.chain.run import run_chain

_ROUND_MINUTES = 3.0


def main(
    seed: Annotated[int | None, typer.Option(help="Seed of numbers and harm. Default: random.")] = None,
    minutes: Annotated[float, typer.Option(help="Duration of the harm.")] = 5.0,
    brokers: Annotated[int, typer.Option(help="Number of brokers.", min=3)] = 4,
    members: Annotated[int, typer.Option(help="Number of processes per consumer.", min=2)] = 2,
    lease: Annotated[float, typer.Option(help="Lease time in seconds.")] = 4.0,
    sql: Annotated[str, typer.Option(help="Store of the second consumer: postgresql or sqlite.")] = "postgresql",
    log_level: Annotated[str, typer.Option(help="debug logs each harm and the time to recover.")] = "info",
    folder: Annotated[Path | None, typer.Option(help="Folder of logs and spools. Default: a new one.")] = None,
) -> None:
    """Run three consumers in a chain while their processes and brokers are killed, then check every store and journal.

    The same seed gives the same order of numbers and of harm, but their timing depends on the machine. Runs of more
    than three minutes are split into rounds, each with a new chain.
    """
    if sql not in ("postgresql", "sqlite"):
        raise typer.BadParameter(f"{sql!r} is neither postgresql nor sqlite", param_hint="--sql")
    configure_logging(log_level)
    chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    where = folder or Path(tempfile.mkdtemp(prefix="coranto-chain-"))
    replay = (
        f"python -m tests.chain --seed {chosen} --minutes {minutes:g} --brokers {brokers} "
        f"--members {members} --lease {lease:g} --sql {sql}"
    )
    typer.echo(f"replay: {replay}")
    chance, left, number = random.Random(chosen), minutes * 60, 0
    while left > 0:
        number += 1
        seconds = min(left, _ROUND_MINUTES * 60)
        left -= seconds
        options = ChainOptions(
            chosen if minutes <= _ROUND_MINUTES else chance.randrange(1 << 32),
            brokers,
            members=members,
            lease_seconds=lease,
            sql=sql,
        )
        begun = time.monotonic()
        try:
            outcome = asyncio.run(run_chain(where / f"round-{number}", options, seconds))
        except CorantoError as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            _fail(f"{error}\n{notes}", where, replay)
        typer.echo(f"round {number}, {time.monotonic() - begun:.0f} s: {outcome}")
        if outcome.problems:
            _fail("the chain is wrong", where, replay)
        shutil.rmtree(where / f"round-{number}")
    if folder is None:
        shutil.rmtree(where)
    typer.echo("exact")


def _fail(why: str, where: Path, replay: str) -> None:
    typer.echo(f"FAILED: {why}\nLogs and spools are in {where}; replay: {replay}")
    sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
