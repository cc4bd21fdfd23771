"""Simulation of forks: a source with retention is forked repeatedly under faults.

Forks are made at any offset, of the source and of other forks. Calls that make them are cancelled and repeated, forks
are dropped, and all journals are appended to. At the end, and before a fork is dropped, its content must equal its
source's up to the fork's offset, whatever retention has removed. Retention of the source is short, and stores are slow,
so that content is often removed while a fork is made.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import typer

from coranto import labels
from coranto.client.values import Chunk
from coranto.errors import (
    ContentGone,
    CorantoError,
    CorruptData,
    JournalNotFound,
    OffsetJump,
    OffsetNotYetAvailable,
)
from coranto.forks import drop_fork, fork_journal
from coranto.fragments.forks import Fork, fork_of
from coranto.fragments.fragment import Fragment
from coranto.fragments.stores import verified_content
from coranto.testing.histories import unique_content
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool.durable_spool import Fsync
from tests.simulation.broker import playing
from tests.simulation.broker.nemesis import Nemesis
from tests.simulation.broker.options import CRASH, Options, options_of
from tests.simulation.broker.playing import First, Quiet, Seed, Seeds, Tell, play, play_seeds
from tests.simulation.broker.world import World
from tests.simulation.kit.checker import Anomaly

SOURCE = "sim/source"
RETENTION_SECONDS = 40
HEALING_SECONDS = 300.0
FAULTS = (
    "kill",
    "kill in write",
    "pause",
    "long pause",
    "cut brokers",
    "cut etcd",
    "cut client",
    "cut store",
    "break calls",
    "break watches",
    "compact",
    "store errors",
    "slow store",
    "exit gracefully",
    "change spec",
    "long outage",
    CRASH,
    "isolate broker",
    "cut one way",
    "disk full",
    "disk fails",
    "suspend",
    "store refuses fragments",
    "store loses a fragment",
)


class ForkWorld(World):
    """A world that remembers all content that the store ever had."""

    def __init__(self, loop: SimLoop, options: Options) -> None:
        super().__init__(loop, options, [SOURCE])
        self.content: dict[str, dict[int, bytes]] = {SOURCE: {}}
        self.forks: dict[str, Fork] = {}
        """All forks that were ever complete, by name."""
        put = self.store.put

        def remember(fragment: Fragment, data: bytes) -> None:
            self.note(fragment.journal, fragment.begin, verified_content(fragment, data, source="a broker"))
            put(fragment, data)

        self.store.put = remember  # type: ignore[method-assign]

    def new_spec(self, journal: str) -> pb.JournalSpec:
        spec = super().new_spec(journal)
        spec.fragment.retention.FromSeconds(RETENTION_SECONDS)
        return spec

    def note(self, journal: str, begin: int, content: bytes) -> None:
        known = self.content.setdefault(journal, {})
        if len(known.get(begin, b"")) < len(content):
            known[begin] = content

    def lost_of(self, name: str) -> list[Fragment]:
        """Return the fragments that the store has lost of a journal, and of the journals that it is forked from."""
        chain = {name}
        while name in self.forks:
            name = self.forks[name].source
            chain.add(name)
        return [each for each in self.store.lost if each.journal in chain]

    def bytes_of(self, journal: str, begin: int, end: int) -> list[int]:
        """Return the bytes [begin, end) that a journal must have, with -1 for unknown ones."""
        fork = self.forks.get(journal)
        if fork is not None and begin < min(end, fork.offset):
            middle = min(end, fork.offset)
            return self.bytes_of(fork.source, begin, middle) + self.bytes_of(journal, middle, end)
        found = [-1] * max(0, end - begin)
        for at, content in self.content.get(journal, {}).items():
            for position in range(max(at, begin), min(at + len(content), end)):
                found[position - begin] = content[position - at]
        return found


@dataclass(slots=True)
class ForkReport(playing.SeedReport[Options, Anomaly]):
    command = "python -m tests.simulation.broker.forks"


@dataclass(slots=True)
class Forker:
    """A client that makes forks, drops some, and appends to all journals."""

    world: ForkWorld
    number: int = 0
    asked: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    """Forks that may be incomplete, with source and offset."""
    dropped: set[str] = field(default_factory=set)
    """Forks whose drop was requested. Its outcome may be unknown."""

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    async def run(self) -> None:
        world, rng = self.world, self.rng
        until = world.loop.time() + world.options.seconds
        while world.loop.time() < until:
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            kind = rng.random()
            try:
                if kind < 0.7:
                    await self.append(rng.choice([SOURCE, SOURCE, SOURCE, *world.forks]))
                elif kind < 0.85 and len(self.asked) < 3:
                    await self.begin()
                elif kind < 0.93 and self.asked:
                    await self.resume(rng.choice([*self.asked]))
                elif kind < 0.95 and any(fork.shares for fork in world.forks.values()):
                    await self.harm()
                elif world.forks:
                    await self.drop(rng.choice([*world.forks]))
            except (ContentGone, OffsetJump) as error:
                world.coverage.sometimes(f"fork: {type(error).__name__}")
            except CorruptData as error:
                if not world.store.lost:
                    world.problems.append(f"{error}")
            except CorantoError as error:
                world.coverage.sometimes(f"fork: {type(error).__name__}")

    async def append(self, journal: str, retry_timeout: float = 5.0) -> None:
        world, rng = self.world, self.rng
        client = world.client("writer-0", rng.choice(world.machines), retry_timeout)
        content = unique_content(world.loop.number(), rng, 100, 700)
        result = await client.append(journal, content)
        world.note(journal, result.begin, content)
        fork = world.forks.get(journal)
        if fork is not None and result.begin < fork.offset:
            what = f"an append is at {result.begin}, and the fork's offset is {fork.offset}"
            world.anomalies.append(Anomaly("offset-twice", journal, what))

    async def begin(self) -> None:
        world, rng = self.world, self.rng
        source = rng.choice([SOURCE, SOURCE, *world.forks])
        self.number += 1
        name = f"sim/fork-{self.number}"
        client = world.client("writer-1", rng.choice(world.machines), 5.0)
        head = await client.head(source)
        at = None if rng.random() < 0.5 else max(0, head - rng.randrange(4000))
        self.asked[name] = source, at
        await self.resume(name)

    async def resume(self, name: str, *, whole: bool = False) -> None:
        """Make a fork or resume it. Unless `whole`, the call may be cancelled after a random time."""
        world, rng = self.world, self.rng
        source, at = self.asked[name]
        client = world.client("writer-1", rng.choice(world.machines), 5.0)
        try:
            async with asyncio.timeout(None if whole or rng.random() < 0.5 else rng.uniform(0.0, 4.0)):
                made = await fork_journal(client, source, name, at=at, clock=world.client_clock)
        except TimeoutError:
            world.coverage.sometimes("making a fork was given up midway")
            return
        except ContentGone:
            del self.asked[name]
            raise
        del self.asked[name]
        world.forks[name] = made
        world.loop.note(f"forked {made}")
        world.coverage.sometimes("a fork was complete")
        world.coverage.sometimes("a fork of a fork was complete", made.source != SOURCE)
        world.coverage.sometimes("a fork shares fragments", made.begin < made.shared_end)
        world.coverage.sometimes("a fork begins later than its source", made.begin > 0)
        # Without retention, all of its content can be compared at the end.
        for _ in range(20):
            try:
                (info,) = (await client.list(labels.label_selector(include={labels.NAME: name}))).journals
                info.spec.fragment.retention.Clear()
                change = pb.ApplyRequest.Change(upsert=info.spec, expect_mod_revision=info.mod_revision)
                await client.apply([change])
            except CorantoError:
                await asyncio.sleep(0.5)
                continue
            return

    async def harm(self) -> None:
        """Try to delete a journal that a fork shares fragments of, or to remove its hold. Brokers must refuse both."""
        world, rng = self.world, self.rng
        fork = rng.choice([each for each in world.forks.values() if each.shares])
        if not world.exists(fork.source):
            return  # Its removal is known.
        client = world.client("writer-2", rng.choice(world.machines), 5.0)
        change = pb.ApplyRequest.Change(delete=fork.source, expect_mod_revision=-1)
        if rng.random() < 0.5:
            spec = world.spec(fork.source)
            spec.labels.CopyFrom(labels.without(spec.labels, labels.FORK_HOLD))
            change = pb.ApplyRequest.Change(upsert=spec, expect_mod_revision=-1)
        await client.apply([change])
        world.anomalies.append(Anomaly("unheld-fork", fork.name, f"its source could be changed: {change}"))

    async def drop(self, name: str) -> None:
        world = self.world
        await self.compare(name)
        self.dropped.add(name)
        await drop_fork(world.client("writer-2", self.rng.choice(world.machines), 5.0), name)
        del world.forks[name]
        world.coverage.sometimes("a fork was dropped")

    async def compare(self, name: str) -> None:
        """Compare a fork's content with its source's. Raises the client's errors if it cannot be read.

        Raises OffsetJump if content is missing that the store has not lost.
        """
        world = self.world
        fork = world.forks[name]
        client = world.client("writer-2", self.rng.choice(world.machines), 20.0)
        at = fork.begin
        while at < fork.offset:
            lost = world.lost_of(name)
            try:
                async for chunk in client.read(name, at, end_offset=fork.offset, direct=False, fail_on_jump=not lost):
                    self.check(fork, chunk)
                    at = chunk.end
            except (ContentGone, OffsetNotYetAvailable):
                # Brokers skip missing content only once the content after it is hours old.
                ends = [each.end for each in lost if each.begin <= at < each.end]
                if not ends:
                    raise
                world.coverage.sometimes("a fork lacks what the store has lost")
                at = max(ends)
            else:
                world.coverage.sometimes("a fork was read only in part", at != fork.offset)
                return

    def check(self, fork: Fork, chunk: Chunk) -> None:
        right = self.world.bytes_of(fork.name, chunk.offset, chunk.end)
        wrong = [n for n, (one, two) in enumerate(zip(chunk.content, right, strict=True)) if two not in (one, -1)]
        if wrong:
            what = f"its byte {chunk.offset + wrong[0]} differs from {fork.source}"
            self.world.anomalies.append(Anomaly("other-content", fork.name, what))


async def _run(world: ForkWorld, report: ForkReport) -> None:
    world.start()
    if not await world.until(lambda: world.is_consistent(SOURCE), 30.0):
        report.anomalies.append(Anomaly("stuck", SOURCE, "it was not assigned and synchronized at first"))
        return
    forker, nemesis = Forker(world), Nemesis(world)
    harm = asyncio.ensure_future(nemesis.run())
    await world.clients.start(forker.run())
    harm.cancel()
    await asyncio.gather(harm, return_exceptions=True)
    nemesis.heal()
    world.loop.note("healed")
    await world.clients.start(_finish(world, forker, report))
    await world.clients.start(_examine(world, forker, report))


async def _finish(world: ForkWorld, forker: Forker, report: ForkReport) -> None:
    """Complete all incomplete forks, and forget those that cannot be completed."""
    until = world.loop.time() + HEALING_SECONDS
    for name in list(forker.asked):
        while name in forker.asked:
            try:
                await forker.resume(name, whole=True)
            except (ContentGone, OffsetJump, JournalNotFound):
                forker.asked.pop(name, None)
            except CorantoError as error:
                if isinstance(error, (CorruptData, OffsetNotYetAvailable)) and world.store.lost:
                    forker.asked.pop(name, None)  # Content of the fork or its source is lost.
                elif world.loop.time() > until:
                    report.anomalies.append(Anomaly("stuck", name, f"it is not completed: {error}"))
                    return
                await asyncio.sleep(1.0)


async def _examine(world: ForkWorld, forker: Forker, report: ForkReport) -> None:
    """Let retention run for a while, then compare all forks and append to all journals."""
    await asyncio.sleep(2.5 * RETENTION_SECONDS)
    for name in [each for each in forker.dropped if each in world.forks and not world.exists(each)]:
        del world.forks[name]
    for name in list(world.forks):
        found = fork_of(world.spec(name)) if world.exists(name) else None
        if found != world.forks[name]:
            report.anomalies.append(Anomaly("other-labels", name, f"{found} was {world.forks[name]}"))
    for name in list(world.forks):
        until = world.loop.time() + HEALING_SECONDS
        while True:
            try:
                await forker.compare(name)
                await forker.append(name, retry_timeout=30.0)
            except CorantoError as error:
                if isinstance(error, OffsetJump) or world.loop.time() > until:
                    what = f"{world.forks[name]} cannot be read: {type(error).__name__} {error}"
                    report.anomalies.append(Anomaly("lost-write", name, what))
                    break
                await asyncio.sleep(1.0)
            else:
                break
    stored = [each.fragment for each in world.store.objects.values() if each.fragment.journal == SOURCE]
    removed = set(world.content[SOURCE]) - {each.begin for each in stored}
    world.coverage.sometimes("retention has removed content of the source", bool(removed))


def options_for(seed: int) -> Options:
    """Return the options of a seed: as in the broker's simulation, but with little skew and one source."""
    rng = random.Random(f"forks of {seed}")
    faults = tuple(each for each in FAULTS if rng.random() < rng.choice((0.1, 0.4)))
    # Only synced content survives a machine crash.
    synced = {"fsync": Fsync.COMMIT} if CRASH in faults else {}
    return options_of(
        seed,
        **synced,
        journals=1,
        writers=3,
        seconds=rng.choice((60.0, 90.0, 150.0)),
        lease_seconds=3.0,
        fragment_length=1024,
        skew=rng.choice((0.0, 0.5)),
        nested=False,
        durability="",
        faults=faults,
    )


def run(options: Options, *, tell: Tell | None = None) -> ForkReport:
    """Run one simulation. `tell` is called with events as they happen."""
    report = ForkReport(options)
    with simulated(options.seed, shuffle=options.shuffle) as loop:
        world = ForkWorld(loop, options)
        play(world, report, _run, tell=tell, prepare=None)
        report.anomalies = world.anomalies + report.anomalies
    return report


def main(
    seed: Seed = None,
    seeds: Seeds = 60,
    first: First = 0,
    quiet: Quiet = False,
) -> None:
    """Run simulations of forks. The exit code is 1 when a run fails."""
    play_seeds(
        lambda number, tell: run(options_for(number), tell=tell), seed=seed, seeds=seeds, first=first, quiet=quiet
    )


if __name__ == "__main__":
    typer.run(main)
