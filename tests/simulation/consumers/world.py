"""The brokers' world extended by consumers, their database, and clients of both."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from coranto.client import AppendResult, Chunk, JournalClient
from coranto.coordination.etcd import Op, Put
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import AssignmentKey, Layout
from coranto.errors import Unavailable
from coranto.labels import CONTENT_TYPE, JSON_LINES, RECOVERY_LOG, label_set
from coranto.member.membership import Membership
from coranto.messages import Flags, JsonLines, iter_messages
from coranto.testing.histories import Observation
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator
from coranto.testing.sim.loop import SimLoop
from coranto.testing.sim.rpc import Rpc
from coranto.testing.sim.timeline import Process
from coranto.wire import consumer_pb2 as pc
from coranto.wire import consumer_pb2_grpc as pc_grpc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.application import Shard
from coranto_consumers.runtime.consumer import Consumer
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.peers import ShardPeers
from coranto_consumers.runtime.service import ShardService
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.specs import ShardEntities
from coranto_consumers.runtime.testing import shard_spec
from tests.simulation.broker.world import Host, World, WorldConnection

from . import tables
from .application import AsyncTally, BookStore, JsonBook, SqlBook, SqliteBook, TablesBook, Tally
from .database import SimDatabase, SimSqlStore
from .history import Acknowledgement, Owner, Record
from .options import Options

SHARDS = Layout("/gazette/consumers/tally")
LOGS = "logs"
HINTS = "/hints/tally"
TIMEOUT = 60.0
STEPS = ("fence", "publish", "update", "commit", "log", "acknowledge")
"""Steps of a transaction. `fence`, `update` and `commit` are the database's, `log` is an append to a recovery log."""


class ConsumerWorld(World):
    """The brokers, consumers and stores of one run. `folder` is a real one, for played recovery logs."""

    def __init__(self, loop: SimLoop, options: Options, folder: Path) -> None:
        self.of_consumers = options
        self.inputs = [f"in/{number}" for number in range(options.inputs)]
        self.outputs = [f"out/{number}" for number in range(options.outputs)]
        self.shards = [f"{kind}-{number}" for number, kind in enumerate(options.shards)]
        self.logs = [f"{LOGS}/{shard}" for shard in self.shards if has_log(shard)]
        super().__init__(loop, options.brokers, [*self.inputs, *self.outputs, *self.logs])
        self.folder = folder
        self.record = Record()
        self.database = SimDatabase(loop, self.network)
        self.failures: list[str] = []
        """Reasons of shards that were FAILED."""
        self.consumers = [ConsumerMachine(self, number) for number in range(options.consumers)]
        self.etcd.before_txn.append(self._note_failures)

    def start(self) -> None:
        super().start()
        for machine in self.consumers:
            machine.boot(self.rng.uniform(0, 0.5))

    def new_spec(self, journal: str) -> pb.JournalSpec:
        spec = super().new_spec(journal)
        content_type = RECOVERY_LOG if journal in self.logs else JSON_LINES
        spec.labels.CopyFrom(label_set([(CONTENT_TYPE, content_type)]))
        return spec

    def tables_of(self, shard: str) -> Path:
        """Return the SQLite file of a shard with tables."""
        return self.folder / f"{shard}.db"

    def sources_of(self, shard: str) -> list[str]:
        return [self.inputs[number] for number in self.of_consumers.sources[self.shards.index(shard)]]

    def shard_spec(self, shard: str) -> pc.ShardSpec:
        options = self.of_consumers
        log = {"recovery_log_prefix": LOGS, "hint_prefix": HINTS, "hint_backups": 1} if has_log(shard) else {}
        return shard_spec(
            shard,
            self.sources_of(shard),
            min_seconds=options.min_txn_seconds,
            max_seconds=options.max_txn_seconds,
            hot_standbys=options.standbys,
            ring_buffer_size=options.ring_size,
            read_channel_size=options.read_ahead,
            **log,
        )

    def journal_client(self, node: str, process: Process | None = None, clock: SimClock | None = None) -> JournalClient:
        """Return a client that may call every broker, and learns the locations of journals."""
        return JournalClient(**self._client_options(node, process, clock))

    def watched_client(self, machine: ConsumerMachine, process: Process, clock: SimClock) -> WatchedClient:
        return WatchedClient(self, machine, process, **self._client_options(machine.name, process, clock))

    def _client_options(self, node: str, process: Process | None, clock: SimClock | None) -> dict[str, Any]:
        return {
            "endpoint": ",".join(machine.endpoint for machine in self.machines),
            "clock": clock or self.client_clock,
            "retry_timeout": TIMEOUT,
            "connect": lambda config, _clock, _tokens: WorldConnection(self.rpc, node, config.endpoint, process),
            "entropy": self.rng.randbytes,
            "append_streams": self.options.append_streams,
        }

    def any_stub(self) -> pc_grpc.ShardAsyncStub:
        """Return a stub of any consumer's service, as an operator has it."""
        return self.rpc.shard_stub("operator", self.rng.choice(self.consumers).endpoint)

    def _note_failures(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Put) and op.key.startswith(SHARDS.assignments):
                status = pc.ReplicaStatus.FromString(op.value)
                if status.code == pc.ReplicaStatus.FAILED:
                    key = SHARDS.decode(op.key)
                    assert isinstance(key, AssignmentKey)
                    self.failures.append(f"{key.item} in {key.member.suffix}: {'; '.join(status.errors)}")
                    self.coverage.sometimes("a shard failed")


class ConsumerMachine(Host):
    def __init__(self, world: ConsumerWorld, number: int) -> None:
        super().__init__(world, f"consumer-{number}", f"zone-{number % 2}")
        self.consumer: Consumer | None = None
        self.at_step: dict[str, Callable[[], None]] = {}
        """The faults to inject when the process reaches a step, by step."""
        self._world = world
        options = world.of_consumers
        self._skew, self._rate = world.rng.uniform(-options.skew, options.skew), world.rng.uniform(0.999, 1.001)
        self._settings = ConsumerProcessSettings(
            etcd="etcd:2379",
            etcd_prefix=SHARDS.prefix,
            zone=self.zone,
            id=self.name,
            lease_seconds=options.lease_seconds,
            exit_seconds=8.0,
        )

    @property
    def is_up(self) -> bool:
        return super().is_up and self.consumer is not None

    def forget(self) -> None:
        self.consumer = None
        self.at_step.clear()

    def reached(self, step: str) -> None:
        """Inject the fault of a step that the process is about to take."""
        action = self.at_step.pop(step, None)
        if action is not None:
            self._loop.note(f"{self.name} has reached: {step}")
            action()

    async def serve(self, process: Process) -> None:
        """Run the same parts as `coranto_consumers.runtime.process.ConsumerProcess`, with simulated effects."""
        world = self._world
        clock = SimClock(world.loop, process, skew=self._skew, rate=self._rate)
        coordinator = SimCoordinator(world.etcd, world.network, self.name, process, clock)
        keyspace = KeySpace(coordinator, SHARDS, ShardEntities(), clock=clock)
        folder = world.folder / process.name
        folder.mkdir()
        consumer = Consumer(
            self._settings,
            self._application(process, clock),
            world.watched_client(self, process, clock),
            member=self.member,
            clock=clock,
            entropy=world.rng.randbytes,
            coordinator=coordinator,
            keyspace=keyspace,
            recovery_folder=folder,
            metrics=ConsumerMetrics(),
            peers=_SimShardPeers(world.rpc, self.name, process),
        )
        membership = Membership(
            self.member,
            consumer,
            coordinator=coordinator,
            keyspace=keyspace,
            clock=clock,
            exit_seconds=self._settings.exit_seconds,
        )
        await membership.join(self.endpoint, lease_seconds=self._settings.lease_seconds)
        world.rpc.endpoints.listen(self.endpoint, self.name, process, ShardService(consumer))
        self.consumer = consumer
        ended = await membership.serve_until(self.stop_requested)
        world.coverage.sometimes("a consumer lost its lease or etcd" if ended else "a consumer exited gracefully")
        world.rpc.endpoints.close(self.endpoint, process)
        await membership.close()
        await consumer.close()

    def _application(self, process: Process, clock: SimClock) -> Tally:
        world = self._world

        def open_book(shard: Shard) -> tuple[BookStore, Owner]:
            process.check_alive()
            owner = Owner(len(world.record.owners), shard.id, process.name, world.loop.time())
            world.record.owners.append(owner)
            book: BookStore
            if shard.id.startswith("sql-"):
                book = SqlBook(SimSqlStore(world.database, self.name, process, clock, self.reached))
            elif shard.id.startswith("tables-"):
                path = world.tables_of(shard.id)
                faults = functools.partial(getattr, world.database, "faults")
                book = TablesBook(tables.open_store(path, process, faults, world.rng.random, self.reached), path)
            elif shard.id.startswith("json-"):
                book = JsonBook(shard.recorder)
            else:
                book = SqliteBook(shard.recorder, world.of_consumers.copy_bytes)
            return book, owner

        # Synchronous methods over tables wait for commits in their own thread, and simulations have no threads.
        has_tables = any(shard.startswith("tables-") for shard in world.shards)
        kind = Tally if world.of_consumers.plain and not has_tables else AsyncTally
        defers = world.of_consumers.defers
        return kind(open_book, world.record, world.outputs, world.rng, world.loop.time, defers=defers)


class WatchedClient(JournalClient):
    """A consumer's client that records its reads, and its ACKs with the commits known at that time."""

    def __init__(self, world: ConsumerWorld, machine: ConsumerMachine, process: Process, **options: Any) -> None:
        super().__init__(**options)
        self._world = world
        self._machine = machine
        self._process = process

    async def append(
        self, journal: str, content: bytes | Sequence[bytes] | AsyncIterable[bytes], **options: Any
    ) -> AppendResult:
        if journal in self._world.outputs:
            assert isinstance(content, Sequence)
            acknowledges = self._note_acknowledgements(journal, _joined(content))
            self._machine.reached("acknowledge" if acknowledges else "publish")
        elif journal in self._world.logs:
            self._machine.reached("log")
        self._process.check_alive()
        return await super().append(journal, content, **options)

    def _note_acknowledgements(self, journal: str, content: bytes) -> bool:
        """Record the ACKs in an append. Return True if there are any."""
        self._process.check_alive()
        record, found = self._world.record, False
        for envelope in iter_messages(JsonLines(), journal, [content], 0):
            if envelope.flags == Flags.ACK_TXN:
                line = envelope.content + b"\n"
                found = True
                licensed = (journal, line) in record.intents
                record.acknowledgements.append(
                    Acknowledgement(self._process.name, journal, line, self._world.loop.time(), licensed)
                )
        return found

    async def read(self, journal: str, offset: int = 0, **options: Any) -> AsyncGenerator[Chunk]:
        world = self._world
        async with contextlib.aclosing(super().read(journal, offset, **options)) as chunks:
            async for chunk in chunks:
                world.history.observations.append(
                    Observation(self._process.name, journal, chunk.offset, chunk.content, world.loop.time())
                )
                yield chunk


class _SimShardPeers(ShardPeers):
    """Stubs of other consumers over the simulated network."""

    def __init__(self, rpc: Rpc, node: str, process: Process) -> None:
        super().__init__()
        self._reach = rpc, node, process

    def stub(self, endpoint: str) -> pc_grpc.ShardAsyncStub:
        if not endpoint:
            raise Unavailable("the asked process is no longer there")
        rpc, node, process = self._reach
        return rpc.shard_stub(node, endpoint, process)


def _joined(content: bytes | Sequence[bytes]) -> bytes:
    return content if isinstance(content, bytes) else b"".join(content)


def has_log(shard: str) -> bool:
    return shard.partition("-")[0] in ("json", "sqlite")


async def apply_shards(world: ConsumerWorld) -> None:
    """Create the shards, as `coranto shards apply` does."""
    changes = [pc.ApplyRequest.Change(upsert=world.shard_spec(shard), expect_mod_revision=-1) for shard in world.shards]
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):  # It may not be up yet.
            response = await world.any_stub().Apply(pc.ApplyRequest(changes=changes))
            if response.status == pc.OK:
                return
        await asyncio.sleep(0.2)
