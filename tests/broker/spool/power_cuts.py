"""Spools on a disk that loses power at any instant: `python -m tests.broker.spool.power_cuts --cuts 10000`.

One spool is appended to, rolled, started over, rolled back, killed, stored and dropped; its syncs overlap with commits,
and some of them fail. At any instant the machine may lose unsynced content, in any part and order. The recovered
content is compared with the promises, and the next life continues with it. `test_power_cuts.py` runs fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, NoReturn
from unittest.mock import patch

import structlog
import typer

from coranto import labels
from coranto.fragments.fragment import Codec, Fragment, sum_of
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from coranto_broker.spool import durable_spool
from coranto_broker.spool.durable_spool import Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.recovery import Recovered, recover
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import empty_at
from tests.simulation.kit.disk import SimDisk

JOURNAL = "a/journal"
LIVES = 6
"""Lives of one spool, each ended by a power cut, a kill, or a failed sync."""
_COMPACT_BYTES = 700
_RARER = ("roll", "roll", "abort", "follow", "store", "commit", "proposed", "proposed")


class Broken(AssertionError):
    """A broken promise."""


@dataclass
class Model:
    """The fragment store, and the content and promises of the spool."""

    fsync: Fsync
    content: bytes = b""
    """All committed content, in the journal's order."""
    registers: dict[int, pb.LabelSet] = field(default_factory=lambda: {0: pb.LabelSet()})
    """Registers at the end of each commit."""
    certain: int = 0
    """The end of the last commit that the spool confirmed."""
    promised: int = 0
    """The journal's end at the last completed flush."""
    revision: int = 1
    promised_revision: int = 0
    stored: dict[int, bytes] = field(default_factory=dict)
    """Content of fragments in the store, by their begin."""
    has_hole: bool = False
    """True if content is missing that was not promised, and later content that was not promised is present."""
    seen: Counter[str] = field(default_factory=Counter)

    def cut_back(self, end: int) -> None:
        """Continue the journal at `end`: later content was never promised."""
        self.certain = end
        self.content = self.content[:end]
        self.registers = {at: each for at, each in self.registers.items() if at <= end}

    def piece(self, begin: int, end: int) -> bytes:
        return self.content[begin:end]


@dataclass
class Observer:
    """Keeps completed fragments."""

    sealed: list[Sealed] = field(default_factory=list)

    def spool_skip(self, offset: int) -> None:
        """Do nothing: there are no gaps."""

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        """Do nothing: there are no readers."""

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.sealed.append(sealed)

    def spool_ahead(self, end: int) -> None:
        """Do nothing: there are no readers."""


class Life:
    """The work of one process on the spool, until the process ends."""

    def __init__(self, model: Model, rng: random.Random, folder: SpoolFolder, recovered: Recovered) -> None:
        self.model = model
        self._rng = rng
        self._folder = folder
        self._observer = Observer(list(recovered.sealed))
        self.spool = recovered.durable(folder, self._observer, model.fsync)
        self.failed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.spool.on_failure = self.failed.set

    async def run(self) -> None:
        """Act on the spool until a sync fails."""
        rng, spool, model = self._rng, self.spool, self.model
        if model.fsync is Fsync.INTERVAL:
            self._start(self._keep_flushed())
        while not self.failed.is_set():
            try:
                await self._act(rng.choice(("append",) * 8 + _RARER))
            except OSError:
                model.seen["a write or sync failed"] += 1
            if rng.random() < 0.6:
                await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.0004), rng.uniform(0, 0.003))))
        spool.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _act(self, what: str) -> None:
        rng, spool, model = self._rng, self.spool, self.model
        if what in ("append", "commit"):
            content = rng.randbytes(rng.choice((1, 7, 100, 511, 512, 700, 3000)))
            registers = labels.label_set(end=str(spool.end + len(content)))
            if what == "commit" and model.fsync is not Fsync.COMMIT:
                self._committing(content, registers)
                with self._or_not():
                    spool.commit(content, registers, model.revision)
            else:
                half = rng.randrange(len(content) + 1)
                for piece in (content[:half], content[half:]):
                    if piece:
                        spool.write(spool.delta, piece)
                        if rng.random() < 0.2:
                            await asyncio.sleep(rng.uniform(0, 0.0005))
                self._propose(content, registers)
            self._start(self._flush())
        elif what == "proposed":
            self._commit_proposed(rng.randbytes(rng.choice((1, 100, 512, 3000))))
            self._start(self._flush())
        elif what == "roll":
            before = spool.fragment
            codec = rng.choice((Codec.NONE, Codec.GZIP))
            spool.propose(empty_at(before, before.end, codec), spool.registers, primary=True, revision=model.revision)
            if rng.random() < 0.5:
                self._start(self._flush())
            elif rng.random() < 0.5:
                self._store()
        elif what == "abort":
            spool.write(0, rng.randbytes(rng.choice((5, 900))))
            await asyncio.sleep(rng.uniform(0, 0.0005))
            spool.propose(spool.fragment, spool.registers, primary=False, revision=model.revision)
        elif what == "follow":
            model.revision += 1
            spool.propose(spool.fragment, spool.registers, primary=False, revision=model.revision)
            self._start(self._flush())
        else:
            self._store()

    def _store(self) -> None:
        """Store completed fragments, as the persister does, and drop them, as after a listing."""
        model, sealed_ones = self.model, self._observer.sealed
        for _ in range(min(len(sealed_ones), self._rng.choice((1, 1, 9)))):
            sealed = sealed_ones.pop(0)
            with sealed.content.borrow() as file:
                model.stored[sealed.fragment.begin] = file.read_at(0, sealed.fragment.length)
            sealed.drop()

    def _commit_proposed(self, content: bytes) -> None:
        """Commit as a replica that gets content with its proposal."""
        spool, registers, revision = self.spool, self.spool.registers, self.model.revision
        begin = spool.fragment.begin
        whole = self.model.piece(begin, spool.end) + content
        proposal = replace(spool.fragment, end=begin + len(whole), sum=sum_of(whole))
        self._committing(content, registers)
        with self._or_not():
            if spool.commit_proposed(content, proposal.to_wire(), revision):
                self.model.seen["content came with its proposal"] += 1
                return
            spool.write(0, content)
            spool.propose(proposal, registers, primary=False, revision=revision)

    def _propose(self, content: bytes, registers: pb.LabelSet) -> None:
        spool = self.spool
        self._committing(content, registers)
        with self._or_not():
            spool.propose(spool.next_fragment(), registers, primary=True, revision=self.model.revision)

    def _committing(self, content: bytes, registers: pb.LabelSet) -> None:
        self.model.content += content
        self.model.registers[len(self.model.content)] = registers

    @contextlib.contextmanager
    def _or_not(self) -> Iterator[None]:
        """Note that a commit counts, unless it cannot be written. After a kill, either is possible."""
        model = self.model
        try:
            yield
        except OSError:
            model.cut_back(model.certain)
            raise
        model.certain = len(model.content)

    async def _flush(self) -> None:
        """Flush and promise the content, as a broker that acknowledges a commit."""
        spool, model = self.spool, self.model
        end, revision = spool.end, spool.stamp.synced
        try:
            await (spool.flush_commits() if model.fsync is not Fsync.INTERVAL else spool.flush())
        except OSError:
            return
        if model.fsync is not Fsync.NEVER:
            model.promised = max(model.promised, end)
            model.promised_revision = max(model.promised_revision, revision)
            model.seen["acknowledged"] += 1

    async def _keep_flushed(self) -> None:
        while not self.failed.is_set():
            await asyncio.sleep(self._rng.uniform(0.001, 0.01))
            await self._flush()


def check(model: Model, disk: SimDisk, folder: SpoolFolder, recovered: Recovered, *, cut: bool) -> None:
    """Compare the recovered content with the model. `cut`: after a loss of power. Raises Broken."""
    end = recovered.spool.end
    if not cut and (end < model.certain or recovered.lost_end):
        raise Broken(f"a process ended, and [{end}, {model.certain}) is gone")
    if end < model.promised:
        raise Broken(f"promised was {model.promised}, recovered is {end}")
    if recovered.lost_end and model.fsync is Fsync.COMMIT:
        raise Broken(f"an operator is to confirm a loss up to {recovered.lost_end}, and nothing is lost")
    if end > len(model.content) or end not in model.registers:
        raise Broken(f"recovered is {end}, which is not the end of a commit; committed was {len(model.content)}")
    if end and recovered.spool.registers != model.registers[end]:
        raise Broken(f"registers at {end} are {recovered.spool.registers}")
    if recovered.stamp.synced < model.promised_revision:
        raise Broken(f"the pipeline of {model.promised_revision} is forgotten: {recovered.stamp}")
    pieces = dict(model.stored)
    pieces.update((each.fragment.begin, disk.content(each.content.path) or b"") for each in recovered.sealed)
    current = recovered.spool.fragment
    if current.length:
        pieces[current.begin] = (disk.content(folder.content(current.begin).path) or b"")[: current.length]
    covered = 0
    for begin, piece in sorted(pieces.items()):
        if piece != model.piece(begin, begin + len(piece)):
            raise Broken(f"[{begin}, {begin + len(piece)}) differs from the committed content")
        covered = max(covered, begin + len(piece)) if begin <= covered else covered
    # Acknowledgements without a flush may leave a gap before later content that has reached the disk.
    if covered < (end if model.fsync is Fsync.COMMIT else model.promised):
        raise Broken(f"only [0, {covered}) of {end} is here or stored")
    if recovered.lost_end:
        model.seen["a loss was told"] += 1
    model.has_hole = covered < end
    if end < model.certain:
        model.seen["commits were undone"] += 1


async def _lives(loop: SimLoop, seed: int, model: Model) -> int:
    """Run the lives of one spool, and return the number of power cuts."""
    rng = random.Random(f"power cuts {seed}")
    disk = SimDisk(loop, rng)
    cuts = 0
    for number in range(LIVES):
        process = Process(loop, f"life {number}")
        folder = _folder(loop, disk, process)
        life = Life(model, rng, folder, _recover(model, disk, rng, folder))
        task = process.start(life.run())
        end = rng.choice(("cut", "cut", "cut in write", "kill", "fail", "fail"))
        if end == "cut in write":
            countdown = rng.randint(1, 30)

            def due(_: str) -> bool:
                nonlocal countdown
                countdown -= 1
                return countdown <= 0

            disk.kill_in_write = due
        elif end == "fail":
            _fail_syncs(disk, rng)
        await asyncio.wait((task,), timeout=rng.uniform(0.0005, 0.03))
        model.seen[f"life ended: {end}"] += 1
        failed = life.failed.is_set()
        process.kill()
        await asyncio.gather(task, return_exceptions=True)
        disk.kill_in_write = disk.fail_sync = None
        cut = end.startswith("cut") or (end == "fail" and rng.random() < 0.5)
        if cut:
            disk.crash()
            cuts += 1
            model.seen["power cuts"] += 1
        folder = _folder(loop, disk, Process(loop, "auditor"))
        recovered = recover(folder)
        if failed:
            model.seen["a spool failed and was recovered"] += 1
        check(model, disk, folder, recovered, cut=cut)
        stored = max((begin + len(piece) for begin, piece in model.stored.items()), default=0)
        if recovered.lost_end or recovered.spool.end < stored or model.has_hole:
            if model.fsync is Fsync.COMMIT:
                raise Broken(f"the store has content up to {stored}, recovered is {recovered.spool.end}")
            break  # Needs an operator, or the next listing of the store.
        model.cut_back(recovered.spool.end)
    return cuts


def _recover(model: Model, disk: SimDisk, rng: random.Random, folder: SpoolFolder) -> Recovered:
    """Recover as a broker does: again, after a disk failure."""
    if rng.random() < 0.3:
        _fail_syncs(disk, rng, after=0)
    while True:
        try:
            return recover(folder)
        except OSError:
            model.seen["recovery met a sync that failed"] += 1
        finally:
            disk.fail_sync = None


def _folder(loop: SimLoop, disk: SimDisk, process: Process) -> SpoolFolder:
    root = Path("/broker/spools")
    return SpoolFolder(folder_of(root, JOURNAL, 7), JOURNAL, 7, disk.for_process(process), SimClock(loop))


def _fail_syncs(disk: SimDisk, rng: random.Random, after: int = 5) -> None:
    """Have one or two syncs fail, after at most `after` others."""
    wanted, left, skipped = rng.choice((".content", ".commits", "")), rng.choice((1, 1, 2)), rng.randint(0, after)

    def fails(name: str) -> bool:
        nonlocal left, skipped
        if not name.endswith(wanted) or left <= 0:
            return False
        if skipped:
            skipped -= 1
            return False
        left -= 1
        return True

    disk.fail_sync = fails


def run(seed: int, seen: Counter[str] | None = None) -> int:
    """Run the lives of one spool, and return the number of power cuts. Raises Broken."""
    rng = random.Random(f"policy {seed}")
    model = Model(rng.choice((Fsync.COMMIT, Fsync.COMMIT, Fsync.COMMIT, Fsync.INTERVAL, Fsync.NEVER)))
    if seen is not None:
        model.seen = seen
    with patch.object(durable_spool, "COMPACT_LOG_BYTES", _COMPACT_BYTES), _silence(), simulated(seed) as loop:
        return loop.run_until_complete(_lives(loop, seed, model))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop log entries of recovery."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(*_: object) -> NoReturn:
    raise structlog.DropEvent


def main(
    cuts: Annotated[int, typer.Option(help="How many power cuts.")] = 10_000,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Run this seed alone.")] = None,
) -> None:
    """Run spools until they have had this many power cuts. The exit code is 1 if a promise was broken."""
    if seed is not None:
        run(seed)
        return
    seen: Counter[str] = Counter()
    broken: list[int] = []
    done, number, began = 0, first, time.process_time()
    while done < cuts:
        try:
            done += run(number, seen)
        except Broken as error:
            broken.append(number)
            print(f"seed {number}: {error}", flush=True)  # noqa: T201
            done += 1
        number += 1
    for what, count in sorted(seen.items()):
        print(f"{count:8} {what}")  # noqa: T201
    spent = time.process_time() - began
    print(f"{done} power cuts of {number - first} spools, {len(broken)} broken; {spent:.1f} s of CPU")  # noqa: T201
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    typer.run(main)
