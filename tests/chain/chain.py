"""The chain: etcd, brokers, a SQL store, the members of three consumers, and publishers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coranto.client import ClientConfig, JournalClient
from coranto.client.committed import async_committed_reader
from coranto.cluster.brokers import serves
from coranto.cluster.processes import free_port
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import KeySpaceState
from coranto.coordination.layout import Layout, MemberId
from coranto.errors import Unavailable
from coranto.messages import JsonLines
from coranto.process.staged import StagedContext
from coranto.specs.validation import ANY_REVISION
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.client import ShardClient
from coranto_consumers.runtime.specs import ShardEntities
from tests.chain.applications import STORE_VARIABLE
from tests.chain.model import ALERTS, STAGES, ExpectedStream, Stage, journal_specs
from tests.chain.publishing import StreamPublisher
from tests.servers.applying import apply_specs
from tests.servers.ground import PREFIX, Ground
from tests.servers.processes import CORANTO, SECONDS, ProcessSlot, broker_command, until
from tests.servers.sql import PostgresServer

ZONES = ("a", "b")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class ChainOptions:
    seed: int = 0
    brokers: int = 4
    replication: int = 3
    members: int = 2
    """The number of processes of each consumer."""
    publishers: int = 2
    streams: int = 12
    """The number of streams of each publisher."""
    lease_seconds: float = 4.0
    sql: str = "postgresql"
    """The second consumer's store: postgresql or sqlite."""


@dataclass(slots=True)
class ChainConsumer:
    """The members of one consumer, and the key space of its shards."""

    stage: Stage
    keyspace: KeySpace[pc.ShardSpec, pc.ConsumerSpec, pc.ReplicaStatus]
    members: list[ProcessSlot] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """The errors of shards that were FAILED at any time."""

    def member_id(self, number: int, incarnation: int) -> MemberId:
        return MemberId(ZONES[number % len(ZONES)], f"{self.stage.name}-{number}.{incarnation}")

    def knows(self, number: int, incarnation: int) -> bool:
        """Return True if a process is a member in etcd."""
        return self.keyspace.state.member(self.member_id(number, incarnation)) is not None

    def note_failures(self, state: KeySpaceState[pc.ShardSpec, pc.ConsumerSpec, pc.ReplicaStatus]) -> None:
        for each in state.all_assignments:
            if each.value.code == pc.ReplicaStatus.FAILED:
                said = f"{each.item} failed in {each.member}: {' '.join(each.value.errors)}"
                if said not in self.failures:
                    self.failures.append(said)

    @property
    def is_complete(self) -> bool:
        """True if every process is a member in etcd, and so is ready."""
        return all(place.is_running and self.knows(n, place.incarnation) for n, place in enumerate(self.members))

    @property
    def is_serving(self) -> bool:
        """True if every shard has a primary."""
        state = self.keyspace.state
        return all(
            any(each.value.code == pc.ReplicaStatus.PRIMARY for each in state.assignments(spec.id))
            for spec in self.stage.specs()
        )

    def status(self) -> str:
        """Return the members of each shard with their statuses, for messages."""
        state = self.keyspace.state
        return "; ".join(
            f"{spec.id}: "
            + (
                ", ".join(
                    f"{each.member.suffix} {pc.ReplicaStatus.Code.Name(each.value.code)} {' '.join(each.value.errors)}"
                    for each in state.assignments(spec.id)
                )
                or "no member"
            )
            for spec in self.stage.specs()
        )


class Chain(StagedContext):
    """A running chain. Use as `async with Chain(folder, options) as chain:`, in the main thread."""

    def __init__(self, folder: Path, options: ChainOptions) -> None:
        super().__init__()
        self.folder = folder.absolute()
        self.options = options
        self.brokers: list[ProcessSlot] = []
        self.consumers: list[ChainConsumer] = []
        self.publishers: list[StreamPublisher] = []
        self.alerts: list[dict[str, Any]] = []
        """Messages of the last journals that read-committed readers got, in order within each journal."""
        self.streams_done = 0
        """The number of streams whose last number these readers got."""
        self.store_url = ""
        self.client: JournalClient
        self.ground = Ground(self.folder)
        self._members_may_end = False
        self._ports: list[int] = []
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._publishing: list[asyncio.Task[None]] = []

    def is_member(self, number: int) -> bool:
        """Return True if a broker is a member in etcd, until its lease ends."""
        return self.ground.is_member(MemberId(ZONES[number % len(ZONES)], f"broker-{number}"))

    @property
    def endpoint(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    @property
    def file_root(self) -> Path:
        return self.folder / "fragments"

    @property
    def places(self) -> list[ProcessSlot]:
        return [*self.brokers, *(member for consumer in self.consumers for member in consumer.members)]

    @property
    def expected(self) -> dict[str, ExpectedStream]:
        return {stream: each for publisher in self.publishers for stream, each in publisher.expected.items()}

    def check(self) -> None:
        """Raise the error of a task that ended unexpectedly."""
        for task in (*self._tasks, *self._publishing):
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def progress(self, seconds: float = SECONDS) -> None:
        """Wait until a new alert arrives at the chain's end."""
        seen = len(self.alerts)
        await self.until(lambda: len(self.alerts) > seen, "alerts arrive", seconds)

    async def until(self, condition: Any, what: str, seconds: float = SECONDS) -> None:
        """Wait like `processes.until`. An error has the state of all processes as a note."""

        def checked() -> bool:
            self.check()
            return bool(condition())

        try:
            await until(checked, what, seconds)
        except Exception as error:
            error.add_note(self.status())
            raise

    async def end_publishing(self) -> None:
        """Let publishers publish the last number of each stream, and wait until they have ended."""
        self._ending.set()
        await self.until(lambda: all(task.done() for task in self._publishing), "publishers end")

    def let_members_end(self) -> None:
        """Stop restarting members that end."""
        self._members_may_end = True

    def status(self) -> str:
        """Return the state of all processes, for messages."""
        down = ", ".join(place.name for place in self.places if not place.is_running) or "none"
        return "\n".join((f"down: {down}", *(consumer.status() for consumer in self.consumers)))

    # -- Starting ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        await self._exits.enter_async_context(self.ground)
        self._exits.callback(self._close_places)
        starting_store = asyncio.create_task(self._start_store())
        self._exits.push_async_callback(_cancel, [starting_store])
        for number in range(self.options.brokers):
            self._ports.append(free_port(taken=self._ports))
            self.brokers.append(self._broker(number))
        for broker in self.brokers:
            broker.spawn()
        for stage in STAGES:
            self.consumers.append(await self._consumer(stage))
        members = asyncio.create_task(self._start_members(starting_store))
        self._exits.push_async_callback(_cancel, [members])
        await asyncio.gather(*(broker.serving() for broker in self.brokers))
        config = ClientConfig(self.endpoint, self.file_root, retry_timeout=SECONDS)
        self.client = await self._exits.enter_async_context(JournalClient.of(config))
        self._exits.push_async_callback(self._end_tasks)
        self._spawn(self._supervise())
        await self._create_journals()
        await members
        await asyncio.gather(*(self._apply(consumer) for consumer in self.consumers))
        for journal in ALERTS:
            self._spawn(self._follow(journal))
        self._start_publishing()
        await self.progress()

    def _close_places(self) -> None:
        for place in self.places:
            place.close()

    async def _start_members(self, starting_store: asyncio.Task[None]) -> None:
        """Start the members of each consumer as soon as its store is ready."""
        for consumer in sorted(self.consumers, key=lambda each: not each.stage.logged):
            if not consumer.stage.logged:
                await starting_store
            for member in consumer.members:
                member.spawn()
        await asyncio.gather(*(member.serving() for consumer in self.consumers for member in consumer.members))

    async def _start_store(self) -> None:
        if self.options.sql == "sqlite":
            self.store_url = f"sqlite:///{self.folder}/aggregate.db"
            return
        server = PostgresServer()
        await asyncio.to_thread(server.__enter__)
        self._exits.push_async_callback(asyncio.to_thread, server.__exit__, None, None, None)
        self.store_url = await asyncio.to_thread(server.new_database)

    def _broker(self, number: int) -> ProcessSlot:
        name, port = f"broker-{number}", self._ports[number]

        def command(_: int) -> list[str]:
            return broker_command(
                etcd=self.ground.etcd.endpoint,
                prefix=PREFIX,
                port=port,
                zone=ZONES[number % len(ZONES)],
                id=name,
                data_dir=self.folder / name,
                file_root=self.file_root,
                lease_seconds=self.options.lease_seconds,
            )

        return ProcessSlot(name, self.folder, dict, command, lambda _: asyncio.to_thread(serves, f"127.0.0.1:{port}"))

    async def _create_journals(self) -> None:
        specs = journal_specs(self.options.replication)
        await apply_specs(self.client, specs)
        await self.until(
            lambda: all(self.ground.is_whole(spec.name) for spec in specs), "journals have all their replicas"
        )

    async def _consumer(self, stage: Stage) -> ChainConsumer:
        keyspace = KeySpace(self.ground.coordinator, Layout(stage.etcd_prefix), ShardEntities())
        await keyspace.start()
        self._exits.push_async_callback(keyspace.close)
        consumer = ChainConsumer(stage, keyspace)
        keyspace.observe(consumer.note_failures)
        consumer.members += [self._member(consumer, number) for number in range(self.options.members)]
        return consumer

    def _environment(self) -> dict[str, str]:
        # Consumer processes import their applications, which are below the repository's root.
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {STORE_VARIABLE: self.store_url, "CORANTO_FILE_ROOT": str(self.file_root), "PYTHONPATH": path}

    def _member(self, consumer: ChainConsumer, number: int) -> ProcessSlot:
        stage = consumer.stage

        def command(incarnation: int) -> list[str]:
            member = consumer.member_id(number, incarnation)
            return [
                *CORANTO,
                *("consumer", "serve", stage.application, "--endpoint", self.endpoint),
                *("--etcd", self.ground.etcd.endpoint, "--etcd-prefix", stage.etcd_prefix),
                *("--zone", member.zone, "--id", member.suffix, "--data-dir", str(self.folder / "play")),
                *("--lease-seconds", f"{self.options.lease_seconds:g}", "--exit-seconds", "5", "--log-level", "info"),
            ]

        async def joined(incarnation: int) -> bool:
            return consumer.knows(number, incarnation)

        (self.folder / "play").mkdir(exist_ok=True)
        return ProcessSlot(f"{stage.name}-{number}", self.folder, self._environment, command, joined)

    async def _apply(self, consumer: ChainConsumer) -> None:
        changes = [pc.ApplyRequest.Change(upsert=s, expect_mod_revision=ANY_REVISION) for s in consumer.stage.specs()]
        is_applied = False
        while not is_applied:
            await self.until(lambda: consumer.keyspace.state.members, f"{consumer.stage.name} has members")
            endpoint = consumer.keyspace.state.members[0].spec.process_spec.endpoint
            async with ShardClient(ClientConfig(endpoint)) as client:
                try:
                    await client.apply(changes)
                    is_applied = True
                except Unavailable:
                    await asyncio.sleep(0.1)  # The member has just ended, after the machine stalled.
        await self.until(lambda: consumer.is_serving, f"the shards of {consumer.stage.name} are served")

    def _start_publishing(self) -> None:
        rng = random.Random(f"{self.options.seed} publishing")
        for number in range(self.options.publishers):
            streams = [f"s{number}-{each:02}" for each in range(self.options.streams)]
            publisher = StreamPublisher(self.client, streams, random.Random(rng.random()), self._ending)
            self.publishers.append(publisher)
            self._publishing.append(asyncio.create_task(publisher.run()))

    # -- While it runs -------------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _end_tasks(self) -> None:
        await _cancel([*self._tasks, *self._publishing])

    async def _supervise(self) -> None:
        """Restart processes that end, for example when a lease expires on a busy machine."""
        while True:
            for place in self.brokers if self._members_may_end else self.places:
                if place.incarnation >= 0 and not place.is_harmed and not place.is_running:
                    place.note_end()
                    place.spawn()
            await asyncio.sleep(0.2)

    async def _follow(self, journal: str) -> None:
        reader = async_committed_reader(self.client, journal, JsonLines(), block=True)
        async with contextlib.aclosing(reader):
            async for envelope in reader:
                self.alerts.append(dict(envelope.message))
                self.streams_done += envelope.message["last"]


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
