"""`python -m tests.faults`: faults of all kinds, chosen at random, for a given time."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import structlog
import typer

from coranto.errors import ClusterError
from tests.faults import nemesis
from tests.faults.run import FaultRun, RunOptions
from tests.faults.verdict import FaultVerdict
from tests.servers.s3 import S3Server

_FAULTS_OF_A_ROUND = 5


def main(
    seed: Annotated[int | None, typer.Option(help="Chooses the faults. Default: by chance.")] = None,
    minutes: Annotated[float, typer.Option(help="How long faults happen.")] = 5.0,
    brokers: Annotated[int, typer.Option(help="How many brokers there are.", min=3)] = 4,
    lease: Annotated[float, typer.Option(help="Seconds of the brokers' leases.")] = 4.0,
    fault: Annotated[list[str] | None, typer.Option(help="Choose among these only; all: see nemesis.py.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to keep logs and spools. Default: a new one.")] = None,
) -> None:
    """Run real brokers under load and faults, then check that nothing acknowledged was lost and no offset changed.

    The same seed does the same faults in the same order; how they meet the load depends on the machine.
    """
    chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    known = {each.__name__: each for each in nemesis.FAULTS}
    if unknown := set(fault or ()) - known.keys():
        raise typer.BadParameter(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    faults = [known[name] for name in fault] if fault else list(nemesis.FAULTS)
    where = folder or Path(tempfile.mkdtemp(prefix="coranto-faults-"))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    options = RunOptions(chosen, brokers, replications=(2, min(3, brokers - 1)), lease_seconds=lease)
    replay = " ".join(
        [
            f"python -m tests.faults --seed {chosen} --minutes {minutes:g} --brokers {brokers}",
            f"--lease {lease:g}",
            *(f"--fault {name}" for name in fault or ()),
        ]
    )
    print(f"replay: {replay}", flush=True)  # noqa: T201
    problems = asyncio.run(_run(options, where, faults, minutes * 60))
    if problems:
        print(f"FAILED. Logs and spools are in {where}; replay: {replay}")  # noqa: T201
        sys.exit(1)
    print("sound")  # noqa: T201


async def _run(options: RunOptions, folder: Path, faults: list[nemesis.Fault], seconds: float) -> list[str]:
    """Run rounds of a few faults, each with a new cluster, until the time is over. Return the problems found."""
    chance = random.Random(options.seed)
    end, number, problems = time.monotonic() + seconds, 0, list[str]()
    with S3Server(folder / "s3") as server:
        while not problems and time.monotonic() < end:
            number += 1
            where = folder / f"round-{number}"
            chosen = [chance.choice(faults) for _ in range(_FAULTS_OF_A_ROUND)]
            verdict = await _round(replace(options, seed=chance.randrange(1 << 32)), where, server, chosen)
            problems = verdict.problems
            print(f"round {number}: {verdict}", flush=True)  # noqa: T201
            if not problems:
                await asyncio.to_thread(shutil.rmtree, where)
    return problems


async def _round(options: RunOptions, folder: Path, server: S3Server, faults: list[nemesis.Fault]) -> FaultVerdict:
    async with FaultRun(folder, server, options) as run:
        problems: list[str] = []
        for fault in faults:
            begun = time.monotonic()
            try:
                await fault(run)
            except ClusterError as error:
                problems.append(f"{fault.__name__}: {error}")
                break
            finally:
                print(f"  {fault.__name__}: {time.monotonic() - begun:.1f} s", flush=True)  # noqa: T201
        verdict = await run.conclude()
        verdict.problems[:0] = problems
        return verdict


if __name__ == "__main__":
    typer.run(main)
