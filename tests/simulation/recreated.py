"""Simulation of journals that are deleted and recreated, or lose content, and of a shard whose store is restored.

One shard reads three journals. Between its runs, and while it runs, journals grow, two of them are deleted and
recreated under their names, brokers are killed, all of their disks are lost, and the shard's store is restored from an
older copy of itself: rows and checkpoint. When disks are lost, an operator lets the third journal continue where its
store ends (`reset-head`). The shard continues after lost content, as its label says.

After each commit and at the end, the store must have the messages of each journal that ever existed, from the first one
on, in order, each once, except for lost ones. Of the present journals, it must have all at the end. A position that is
used for other content breaks that: messages are skipped or read twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from coranto.errors import CorantoError, JournalNotFound, JournalRecreated
from coranto.labels import CONTENT_TYPE, CONTINUE, DATA_LOSS, JSON_LINES, label_set
from coranto.messages import Checkpoint, Envelope, JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.recovery.heads import reset_head
from coranto.testing import Cluster
from coranto.testing.cluster import STORE_URL
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.loop import SimLoop, simulated
from coranto.testing.sim.timeline import Process
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.primary import Primary
from coranto_consumers.runtime.progress import Progress
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.testing import shard_spec
from coranto_consumers.stores.base import Store

JOURNALS = ("in/one", "in/two")
STORED = "in/stored"
"""It is never recreated."""
BROKERS = 2
STEPS = 12
SECONDS = 120.0
"""The time until a shard must have read all content."""

Row = tuple[str, int, int]
"""A message that counted: its journal, the number of earlier journals of that name, and its own number there."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of a store."""

    rows: tuple[Row, ...] = ()
    checkpoint: bytes = b""


@dataclass(slots=True)
class Report:
    """The result of a run: its anomalies, and the counts of interesting paths."""

    seed: int
    anomalies: list[str] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)


def run(seed: int) -> Report:
    report = Report(seed)

    async def whole(loop: SimLoop) -> None:
        async with Cluster(brokers=BROKERS, lease_seconds=2.0) as cluster:
            await _World(loop, cluster, report).play()

    with simulated(seed) as loop:
        loop.run_until_complete(whole(loop))
    return report


class _World:
    def __init__(self, loop: SimLoop, cluster: Cluster, report: Report) -> None:
        self.loop = loop
        self.cluster = cluster
        self.report = report
        self.rng: random.Random = loop.rng
        self.clock = SimClock(loop)
        self.client = cluster.client(name="operator")
        self.made: Counter[str] = Counter()
        self.published: Counter[tuple[str, int]] = Counter()
        self.present: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        """The messages of journals, with the offset of their commits."""
        self.kept = Kept()
        self.copies = [self.kept]
        self.running = False
        """True while the shard runs."""

    async def play(self) -> None:
        for journal in (*JOURNALS, STORED):
            await self.create(journal)
        for _ in range(STEPS):
            actions = [self.publish, self.publish, self.recreate, self.consume, self.consume, self.restore]
            await self.rng.choice([*actions, self.lose_disks])()
            if self.rng.random() < 0.2:
                await self.restart_broker()
        for journal in (*JOURNALS, STORED):
            await self.publish(journal)
        await self.consume(completely=True)
        for journal in (*JOURNALS, STORED):
            key = journal, self.made[journal]
            found = {row[2] for row in self.kept.rows if row[:2] == key}
            if missing := self.present[key].keys() - found:
                self.report.anomalies.append(f"{journal}: {sorted(missing)} do not count at the end")

    async def create(self, journal: str) -> None:
        spec = pb.JournalSpec(
            name=journal,
            replication=BROKERS,
            flags=pb.JournalSpec.O_RDWR,
            labels=label_set([(CONTENT_TYPE, JSON_LINES)]),
            fragment=pb.JournalSpec.Fragment(
                length=1 << 20 if journal != STORED else 1024,
                compression_codec=pb.NONE,
                stores=[STORE_URL] if journal == STORED else [],
            ),
        )
        spec.fragment.refresh_interval.FromSeconds(5)
        await self.cluster.create(spec, timeout=120.0)

    async def recreate(self, journal: str = "") -> None:
        journal = journal or self.rng.choice(JOURNALS)
        (info,) = (await self.client.list(f"name={journal}")).journals
        deletion = pb.ApplyRequest.Change(delete=journal, expect_mod_revision=info.mod_revision)
        await self.client.apply([deletion])
        self.made[journal] += 1
        await self.create(journal)
        self.report.coverage["a journal was created again"] += 1
        if self.rng.random() < 0.7:  # It may grow beyond the part that was read of the one before.
            await self.publish(journal)

    async def publish(self, journal: str = "") -> None:
        """Publish some messages, perhaps as a transaction, perhaps with one before them that is never acknowledged."""
        journal = journal or self.rng.choice((*JOURNALS, STORED))
        builder: TransactionBuilder[Any] = TransactionBuilder(
            new_producer_id(self.rng.randbytes), ProducerClock(lambda: int(self.clock.now() * 1e9)), JsonLines()
        )
        key = journal, self.made[journal]
        numbers = range(self.published[key], self.published[key] + self.rng.randint(1, 8))
        self.published[key] = numbers.stop
        for n in numbers:
            builder.add(journal, {"made": key[1], "n": n})
        for name, content in builder.take_batches(1 << 20):
            await self.append(name, content)
        builder.ack_intents()
        for name, content in builder.commit().items():
            end = await self.append(name, content)
            self.present[key].update(dict.fromkeys(numbers, end))
        builder.finish()

    async def append(self, journal: str, content: bytes) -> int:
        return (await self.client.append(journal, content, retry_unknown=True, retry_timeout=600.0)).end

    async def lose_disks(self) -> None:
        """Store all content, then lose all disks with the content written after that, perhaps after it was read.

        An operator lets the stored journal continue where its store ends, and recreates the others.
        """
        all_brokers = range(BROKERS)
        await asyncio.gather(*(self.cluster.stop(number) for number in all_brokers))
        await asyncio.gather(*(self.cluster.start(number) for number in all_brokers))
        await self.cluster.ready(STORED, timeout=120.0)
        await self.publish(STORED)
        await self.publish(STORED)
        if self.running:
            await asyncio.sleep(self.rng.uniform(0.0, 3.0))
        else:
            await self.consume(alone=True)
        for number in all_brokers:
            await self.cluster.kill(number, expire=True)
            machine = self.cluster._machine(number)
            disk = machine.disk.for_process(Process(self.cluster._world.timeline, "wiper"))
            for path in machine.disk.paths():
                disk.remove(Path(path))
        await asyncio.gather(*(self.cluster.start(number) for number in all_brokers))
        await self.cluster.ready(STORED, timeout=120.0)
        await reset_head(self.client, STORED)
        head = await self.client.head(STORED)
        before = self.present[STORED, 0]
        self.present[STORED, 0] = kept = {n: end for n, end in before.items() if end <= head}
        read = Checkpoint.from_bytes(self.kept.checkpoint).sources.get(STORED)
        if len(kept) < len(before):
            self.report.coverage["a journal lost messages"] += 1
            self.report.coverage["a shard had read lost messages"] += read is not None and read.read_through > head
        for journal in JOURNALS:
            await self.recreate(journal)
        if self.rng.random() < 0.7:
            await self.publish(STORED)
            await self.publish(STORED)

    async def restart_broker(self) -> None:
        number = self.rng.randrange(BROKERS)
        await self.cluster.kill(number)
        await asyncio.sleep(self.rng.uniform(0.0, 5.0))
        await self.cluster.start(number)

    async def restore(self) -> None:
        self.kept = self.rng.choice(self.copies)
        self.report.coverage["the store went back"] += 1

    async def consume(self, *, completely: bool = False, alone: bool = False) -> None:
        """Run the shard for a while, or until it has read all content. Restarts it after errors.

        Unless it runs `completely` or `alone`, journals may be recreated or lost while it runs.
        """
        deadline = self.loop.time() + (SECONDS if completely else self.rng.uniform(0.0, 10.0))
        disturbed = not completely and not alone and self.rng.random() < 0.4
        running = asyncio.ensure_future(self.keep_running())
        self.running = True
        if disturbed:
            await asyncio.sleep(self.rng.uniform(0.0, 3.0))
            await self.rng.choice([self.recreate, self.lose_disks])()
        while self.loop.time() < deadline:
            await asyncio.sleep(0.2)
            if completely and await self.is_read():
                break
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self.running = False

    async def is_read(self) -> bool:
        sources = Checkpoint.from_bytes(self.kept.checkpoint).sources
        for journal in (*JOURNALS, STORED):
            if journal not in sources or sources[journal].read_through != await self.client.head(journal):
                return False
        return True

    async def keep_running(self) -> None:
        while True:
            try:
                await self.run_shard()
            except JournalRecreated:
                self.report.coverage["a running shard noticed"] += 1
            except (CorantoError, TimeoutError) as error:
                name = type(error).__name__
                self.report.coverage[f"the shard failed: {name}"] += 1
                if not isinstance(error, JournalNotFound) and not error_is_passing(error):
                    self.report.anomalies.append(f"the shard failed: {name}: {error}")
            await asyncio.sleep(0.5)

    async def run_shard(self) -> None:
        client = self.cluster.client(name="shard")
        spec = shard_spec("shard-rows", (*JOURNALS, STORED), max_seconds=5)
        spec.labels.CopyFrom(label_set([(DATA_LOSS, CONTINUE)]))
        primary = Primary(
            _Rows(self),
            Shard(spec, client),
            clock=self.clock,
            producer=new_producer_id(self.rng.randbytes),
            progress=Progress(),
            metrics=ConsumerMetrics(),
        )
        try:
            with capture_logs() as logs:
                await primary.run()
        finally:
            self.report.coverage["a shard continued where content was lost"] += sum(
                each["event"] == "source.content_lost" for each in logs
            )
            with contextlib.suppress(CorantoError):
                await client.close()

    def commit(self, kept: Kept) -> None:
        self.kept = kept
        self.copies.append(kept)
        for (journal, made), count in Counter(row[:2] for row in kept.rows).items():
            found = [row[2] for row in kept.rows if row[:2] == (journal, made)]
            passed_over = {n for n in self.present[journal, made] if n < found[-1]} - set(found)
            if found != sorted(set(found)) or passed_over:
                self.report.anomalies.append(f"{journal}, created again {made} times: {found} of {count} count")


def error_is_passing(error: Exception) -> bool:
    """Return True for an error of unavailable brokers."""
    return isinstance(error, TimeoutError) or (isinstance(error, CorantoError) and error.retriable)


class _Rows(Application["_RowStore"]):
    """An application that keeps each message as a row."""

    def __init__(self, world: _World) -> None:
        self._world = world

    async def new_store(self, shard: Shard) -> _RowStore:  # type: ignore[override]
        return _RowStore(self._world)

    async def consume_message(  # type: ignore[override]
        self, shard: Shard, store: _RowStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        store.rows.append((message.journal, message.message["made"], message.message["n"]))

    async def finalize_txn(self, shard: Shard, store: _RowStore, publisher: ShardPublisher) -> None:  # type: ignore[override]
        """Do nothing."""


class _RowStore(Store):
    """A store that commits rows and checkpoint together, without delay."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self.rows: list[Row] = []

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        self.rows = list(self._world.kept.rows)
        return Checkpoint.from_bytes(self._world.kept.checkpoint)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        await asyncio.gather(*wait_for)
        self._world.commit(Kept(tuple(self.rows), checkpoint.to_bytes()))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def destroy(self) -> None:
        """Do nothing: it holds no resources."""
