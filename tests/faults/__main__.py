"""The command `python -m tests.faults`: injects randomly chosen faults for a given time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import structlog
import typer

from coranto.errors import ClusterError
from coranto.testing.histories import History
from coranto.testing.history_files import elle_lines, porcupine_lines
from tests.faults import nemesis, planted
from tests.faults.namespaces import Namespaces
from tests.faults.run import FaultRun, RunOptions
from tests.faults.verdict import FaultVerdict
from tests.servers.s3 import S3Server

_FAULTS_OF_A_ROUND = 5


def main(
    seed: Annotated[int | None, typer.Option(help="Seed of the faults. Default: random.")] = None,
    minutes: Annotated[float, typer.Option(help="Duration of the faults.")] = 5.0,
    brokers: Annotated[int, typer.Option(help="Number of brokers.", min=3)] = 4,
    lease: Annotated[float, typer.Option(help="Lease time of brokers in seconds.")] = 4.0,
    fault: Annotated[list[str] | None, typer.Option(help="Choose among these only. nemesis.py has all.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of logs and spools. Default: a new one.")] = None,
    pace: Annotated[float, typer.Option(help="Average seconds between a writer's appends.")] = 0.05,
    outstanding: Annotated[int, typer.Option(help="Appends in flight of a writer of batches.", min=1)] = 6,
    journals: Annotated[int, typer.Option(help="Number of journals.", min=2)] = 2,
    namespaces: Annotated[
        bool, typer.Option(help="Run each broker in a network namespace, and let the kernel drop packets (as root).")
    ] = False,
    histories: Annotated[
        Path | None, typer.Option(help="Folder for each round's history, for Porcupine and Elle.")
    ] = None,
) -> None:
    """Run real brokers under load and faults, then check that nothing acknowledged was lost and no offset changed.

    The same seed injects the same faults in the same order. Their timing relative to the load depends on the machine.
    """
    chosen = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    available = nemesis.NAMESPACE_FAULTS if namespaces else nemesis.FAULTS
    known = {each.__name__: each for each in available}
    if unknown := set(fault or ()) - known.keys():
        raise typer.BadParameter(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    faults = [known[name] for name in fault] if fault else list(available)
    where = folder or Path(tempfile.mkdtemp(prefix="coranto-faults-"))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    replications = tuple((2, min(3, brokers - 1))[number % 2] for number in range(journals))
    options = RunOptions(
        chosen, brokers, replications=replications, lease_seconds=lease, pace=pace, outstanding=outstanding
    )
    replay = " ".join(
        [
            f"python -m tests.faults --seed {chosen} --minutes {minutes:g} --brokers {brokers}",
            f"--lease {lease:g} --pace {pace:g} --outstanding {outstanding} --journals {journals}",
            *(["--namespaces"] if namespaces else []),
            *(f"--fault {name}" for name in fault or ()),
        ]
    )
    print(f"replay: {replay}", flush=True)  # noqa: T201
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that processes and namespaces are removed.
    problems = asyncio.run(_run(options, where, faults, minutes * 60, namespaces, histories))
    if problems:
        print(f"FAILED. Logs and spools are in {where}; replay: {replay}")  # noqa: T201
        sys.exit(1)
    print("sound")  # noqa: T201


async def _run(
    options: RunOptions,
    folder: Path,
    faults: list[nemesis.Fault],
    seconds: float,
    namespaces: bool,
    histories: Path | None,
) -> list[str]:
    """Run rounds of a few faults, each with a new cluster, until the time is over. Return the problems."""
    chance = random.Random(options.seed)
    end, number, problems = time.monotonic() + seconds, 0, list[str]()
    async with contextlib.AsyncExitStack() as stack:
        network = await stack.enter_async_context(Namespaces()) if namespaces else None
        host = network.gateway if network is not None else "127.0.0.1"
        server = stack.enter_context(S3Server(folder / "s3", host=host))
        while not problems and time.monotonic() < end:
            number += 1
            where = folder / f"round-{number}"
            chosen = [chance.choice(faults) for _ in range(_FAULTS_OF_A_ROUND)]
            verdict = await _round(
                replace(options, seed=chance.randrange(1 << 32)), where, server, chosen, network, histories
            )
            problems = verdict.problems
            print(f"round {number}: {verdict}", flush=True)  # noqa: T201
            if not problems:
                await asyncio.to_thread(shutil.rmtree, where)
    return problems


async def _round(
    options: RunOptions,
    folder: Path,
    server: S3Server,
    faults: list[nemesis.Fault],
    network: Namespaces | None,
    histories: Path | None,
) -> FaultVerdict:
    async with FaultRun(folder, server, options, network) as run:
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
        if histories is not None:
            history, contents = run.workload.history, verdict.contents
            await asyncio.to_thread(_write, histories / folder.name, history, contents)
            if not verdict.problems:
                await asyncio.to_thread(_write_planted, histories / "planted", history, contents, options.seed)
        return verdict


def _write(path: Path, history: History, contents: Mapping[str, bytes]) -> None:
    """Write a round's history: `path.jsonl` for Porcupine, `path.edn` for Elle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, lines in ((".jsonl", porcupine_lines(history, contents)), (".edn", elle_lines(history))):
        with path.with_suffix(suffix).open("w") as file:
            file.writelines(f"{line}\n" for line in lines)


def _write_planted(folder: Path, history: History, contents: Mapping[str, bytes], seed: int) -> None:
    """Write one journal's history with each planted fault."""
    journal, content = min(contents.items())
    for fault in planted.PLANTS:
        changed, other = planted.plant(fault, history, journal, content, seed)
        _write(folder / fault.__name__, changed, {journal: other})


if __name__ == "__main__":
    typer.run(main)
