"""The parts of an in-process cluster: machines with brokers, their network, etcd and store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from coranto.client import JournalClient
from coranto.coordination.entities import JournalEntities
from coranto.coordination.layout import AssignmentKey, Layout, MemberId
from coranto.errors import ClusterError
from coranto.specs.validation import effective_replication
from coranto.testing.in_process import BrokerEffects, BrokerPlace, RunBroker
from coranto.testing.sim import etcd as sim_etcd
from coranto.testing.sim import object_store
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.disk import MemoryDisk
from coranto.testing.sim.etcd import SimCoordinator, SimEtcd
from coranto.testing.sim.network import Delays, Network
from coranto.testing.sim.object_store import SimObjectStore, SimStores
from coranto.testing.sim.rpc import Rpc
from coranto.testing.sim.timeline import Process, Timeline
from coranto.wire import protocol_pb2 as pb

LAYOUT = Layout("/gazette/cluster")
SERVICES = frozenset({sim_etcd.NODE, object_store.NODE})
"""Nodes of the network that are neither brokers nor clients."""

_ENTITIES = JournalEntities()
_GIVE_UP_SECONDS = (0.05, 0.2)  # Range of the time after which an end gives up a connection over a cut link.
_UNWIND_SECONDS = 30.0


class RunningCluster:
    """The parts of a running cluster. Use it on the cluster's event loop, and `close` it at the end."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        run_broker: RunBroker,
        places: Sequence[BrokerPlace],
        *,
        delay: float,
    ) -> None:
        self.timeline = timeline
        self.network = Network(timeline, rng, Delays(usual=(delay, delay), congestion=0.0))
        self.rpc = Rpc(self.network, give_up=_GIVE_UP_SECONDS)
        self.etcd = SimEtcd(timeline, self.network)
        self.etcd.on_commit.append(self._etcd_changed)
        self.store = SimObjectStore(self.network, rng)
        self.machines = [Machine(self, place, run_broker, rng) for place in places]
        self.clients: list[JournalClient] = []
        self.client_nodes: set[str] = set()
        self.cuts: list[Callable[[], None]] = []
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on etcd's content holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def is_ready(self, journal: str) -> bool:
        """Return True if a journal exists, with all replicas of its spec, which agree on the Route."""
        item = self.etcd.kvs.get(LAYOUT.item_key(journal))
        if item is None:
            return False
        found: list[tuple[AssignmentKey, pb.Route]] = []
        for kv in self.etcd.prefixed(LAYOUT.assignments_of(journal)):
            key = LAYOUT.decode(kv.key)
            assert isinstance(key, AssignmentKey)
            found.append((key, _ENTITIES.decode_assignment(key, kv.value)))
        wanted = effective_replication(pb.JournalSpec.FromString(item.value))
        primary = any(key.slot == 0 for key, _ in found)
        return len(found) == wanted and primary and all(_ENTITIES.consistent(found))

    def expire(self, member: MemberId) -> None:
        """Expire a member's lease."""
        kv = self.etcd.kvs.get(LAYOUT.member_key(member))
        if kv is not None and kv.lease:
            self.etcd.revoke(kv.lease)

    async def close(self) -> None:
        """End all clients and brokers. Raises TimeoutError when a broker's tasks do not end."""
        await asyncio.gather(*(client.close() for client in self.clients), return_exceptions=True)
        await asyncio.gather(*(machine.kill() for machine in self.machines))

    def _etcd_changed(self) -> None:
        self._changed.set()


@dataclass(slots=True)
class _Life:
    """One incarnation of a broker."""

    process: Process
    serves: asyncio.Event
    stop: asyncio.Event
    task: asyncio.Task[None]


class Machine:
    """A machine with a disk and, unless it is down, a broker."""

    def __init__(self, world: RunningCluster, place: BrokerPlace, run_broker: RunBroker, rng: random.Random) -> None:
        self.place = place
        self.endpoint = place.endpoint
        self.disk = MemoryDisk()
        self._world = world
        self._run_broker = run_broker
        self._life: _Life | None = None

    @property
    def member(self) -> MemberId:
        return MemberId(self.place.zone, self.place.id)

    @property
    def process(self) -> Process | None:
        return self._life.process if self._life is not None and self._life.process.alive else None

    async def start(self) -> None:
        if self.process is not None:
            raise ClusterError(f"{self.place.id} is running already; kill or stop it first")
        world, place = self._world, self.place
        process = Process(world.timeline, place.id)
        serves, stop = asyncio.Event(), asyncio.Event()
        clock = SimClock(world.timeline, process)
        effects = BrokerEffects(
            clock=clock,
            disk=self.disk.for_process(process),
            coordinator=SimCoordinator(world.etcd, world.network, place.id, process, clock),
            stores=SimStores(world.store, world.network, place.id, process),
            stub=lambda endpoint: world.rpc.stub(place.id, endpoint, process),
        )

        @contextmanager
        def listen(endpoint: str, service: Any) -> Iterator[None]:
            if place.port is not None:  # Listen on the same port again after a restart.
                self.place = replace(place, port=urlsplit(endpoint).port)
            self.endpoint = endpoint
            world.rpc.endpoints.listen(endpoint, place.id, process, service)
            serves.set()
            try:
                yield
            finally:
                world.rpc.endpoints.close(endpoint, process)

        async def live() -> None:
            try:
                await self._run_broker(place, effects, listen, stop)
            finally:
                process.kill()

        life = self._life = _Life(process, serves, stop, process.start(live(), name=place.id))
        serving = asyncio.ensure_future(serves.wait())
        try:
            await asyncio.wait((serving, life.task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if not serves.is_set():
            await self.kill()
            error = life.task.exception() if not life.task.cancelled() else None
            raise ClusterError(f"{place.id} could not be started: {error or 'it ended immediately'}") from error

    async def stop(self) -> None:
        """Stop the broker gracefully."""
        life = self._life
        if life is not None and life.process.alive:
            life.stop.set()
            await asyncio.wait((life.task,))
        await self.kill()

    async def kill(self) -> None:
        """Kill the broker, and return when all its tasks have ended, also if it had ended by itself."""
        life = self._life
        if life is None:
            return
        life.process.kill()
        async with asyncio.timeout(_UNWIND_SECONDS):
            while tasks := life.process.tasks:
                await asyncio.wait(tasks)
        self._life = None
