"""The common part of all simulations: run a script in a world, report, and run many seeds from the command line.

Each simulation has its own options, made from a seed, its own `World`, and a script: a coroutine that runs the
simulation and adds its findings to the report.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

import structlog
import typer

from coranto.testing.sim.loop import Deadlock
from tests.simulation.broker.world import BrokerHost, World

Tell = Callable[[str], None]

Seed = Annotated[int | None, typer.Option(help="Run this seed alone, and print every event.")]
Seeds = Annotated[int, typer.Option(help="The number of seeds to run.")]
First = Annotated[int, typer.Option(help="The first seed.")]
Quiet = Annotated[bool, typer.Option(help="With --seed: print only the result.")]

_SHOWN = 12


class Seeded(Protocol):
    """The options of a simulation."""

    @property
    def seed(self) -> int: ...


O_co = TypeVar("O_co", bound=Seeded, covariant=True)
A = TypeVar("A")
W = TypeVar("W", bound=World)
R = TypeVar("R", bound="SeedReport[Any, Any]")


@dataclass(slots=True)
class SeedReport(Generic[O_co, A]):
    """The result of a run with options `O_co`: anomalies `A` (broken promises), and general problems."""

    command: ClassVar[str]
    """The shell command that plays the simulation."""

    options: O_co
    anomalies: list[A] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    steps: int = 0
    virtual_seconds: float = 0.0

    @property
    def sound(self) -> bool:
        return not self.anomalies and not self.problems

    @property
    def flags(self) -> str:
        """The flags of the command after the seed, each preceded by a space."""
        return ""

    @property
    def replay(self) -> str:
        """The command that replays the run."""
        return f"{self.command} --seed {self.options.seed}{self.flags}"

    @property
    def remarks(self) -> list[str]:
        """Remarks that are worth printing even for a sound run."""
        return []

    def __str__(self) -> str:
        lines = [
            f"seed {self.options.seed}: {'sound' if self.sound else 'FAILED'}; {dict(self.outcomes)}; "
            f"{self.steps} steps, {self.virtual_seconds:.1f} virtual s, digest {self.digest:08x}"
        ]
        if not self.sound:
            found = (*self.anomalies[:_SHOWN], *self.problems[:_SHOWN], *self.remarks[:_SHOWN])
            lines += [f"  {each}" for each in found]
            lines += [f"  options: {self.options}", f"  replay: {self.replay}"]
        return "\n".join(lines)


def play(
    world: W,
    report: R,
    script: Callable[[W, R], Awaitable[None]],
    *,
    tell: Tell | None,
    prepare: Callable[[W], None] | None,
    machines: Iterable[BrokerHost] = (),
) -> None:
    """Play the script on the world's loop, end all programs, and complete the report.

    `tell` is called with events as they happen. `prepare` may change the world beforehand. `machines` are the world's
    machines other than its brokers.
    """
    loop = world.loop
    with listening(world, tell):
        if prepare is not None:
            prepare(world)
        try:
            loop.run_until_complete(script(world, report))
        except Deadlock as error:
            report.problems.append(f"deadlock: {error}")
        finally:
            for machine in (*world.machines, *machines):
                machine.end()
            world.clients.kill()
    report.problems += world.problems + world.rpc.problems + loop.unnoticed() + loop.problems
    report.coverage = world.coverage.counts
    report.digest, report.steps, report.virtual_seconds = loop.digest, loop.steps, loop.time()


@contextlib.contextmanager
def listening(world: World, tell: Tell | None) -> Iterator[None]:
    """Capture the log during the run: events become coverage, errors with a traceback become problems."""
    before = structlog.get_config()

    def take(_: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        what = str(event.get("event"))
        world.coverage.sometimes(f"log: {what}")
        error = event.get("exc_info")
        if error is True:  # Logged within its handler.
            error = sys.exception()
        if method == "error" and error and not isinstance(error, OSError):  # Disks may fail.
            world.problems.append(
                f"logged: {what}: {error!r} { ({k: str(v) for k, v in event.items() if k != 'event'}) }"
            )
        if tell is not None:
            details = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
            tell(f"{world.loop.time():10.4f}   {what} {details}")
        raise structlog.DropEvent

    def note(what: str) -> None:
        if tell is not None:
            tell(f"{world.loop.time():10.4f} {what}")

    world.loop.on_note = note if tell is not None else None
    structlog.configure(
        processors=[take],
        wrapper_class=structlog.make_filtering_bound_logger(10 if tell is not None else 20),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def play_seeds(
    play_one: Callable[[int, Tell | None], SeedReport[Any, Any]],
    *,
    seed: int | None,
    seeds: int,
    first: int,
    quiet: bool,
) -> None:
    """Play `seed` alone, or `seeds` seeds from `first` on, print the results, and exit the process.

    The exit code is 1 when a run fails, otherwise 0.
    """
    if seed is not None:
        report = play_one(seed, None if quiet else print)
        print(report)  # noqa: T201
        sys.exit(0 if report.sound else 1)
    began = time.process_time()
    failed: list[int] = []
    remarks: list[str] = []
    total: Counter[str] = Counter()
    for number in range(first, first + seeds):
        report = play_one(number, None)
        total += report.coverage + report.outcomes
        remarks += [f"seed {number}: {remark}" for remark in report.remarks]
        if not report.sound:
            failed.append(number)
            print(report, flush=True)  # noqa: T201
    for remark in remarks:
        print(remark)  # noqa: T201
    for name, count in sorted(total.items()):
        print(f"{count:8} {name}")  # noqa: T201
    seconds = time.process_time() - began
    print(f"{seeds} seeds, {len(failed)} failed {failed}; {seconds:.1f} s of CPU")  # noqa: T201
    sys.exit(1 if failed else 0)
