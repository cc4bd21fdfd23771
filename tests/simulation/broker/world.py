"""The simulated world: machines with brokers, etcd, an object store, and the network between them and clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from coranto.client import JournalClient
from coranto.client.config import ClientConfig, parse_endpoint
from coranto.client.connection import Connection
from coranto.coordination.entities import implied_route
from coranto.coordination.etcd import KeyValue, Put
from coranto.coordination.layout import AssignmentKey, Layout, MemberId
from coranto.coordination.lease import MemberSession
from coranto.errors import CorantoError, WrongCluster
from coranto.fragments.fragment import Fragment, sum_of
from coranto.labels import label_set
from coranto.specs.validation import effective_replication, routes_equivalent
from coranto.testing.histories import History
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.etcd import SimCoordinator, SimEtcd
from coranto.testing.sim.loop import SimLoop
from coranto.testing.sim.network import Delays, Network
from coranto.testing.sim.object_store import SimObjectStore, SimStores
from coranto.testing.sim.rpc import Rpc
from coranto.testing.sim.timeline import Process
from coranto.transport.calls import FrameDialer
from coranto.wire import append_stream_pb2_grpc as stream_grpc
from coranto.wire import heads_pb2_grpc as heads_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto_broker.append.states import ProposalPath
from coranto_broker.broker import Broker
from coranto_broker.server.frames import FrameServer
from coranto_broker.server.in_process import StubPeers, serve
from coranto_broker.server.service import JournalService, frame_methods
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool import commit_log
from coranto_broker.spool.durable_spool import Sealed, folder_of
from coranto_broker.spool.in_sync import Judgement
from tests.simulation.broker.options import DEMANDS, Options
from tests.simulation.kit.checker import Anomaly
from tests.simulation.kit.coverage import PathCoverage
from tests.simulation.kit.disk import SimDisk
from tests.simulation.kit.tcp import SimTcp

STORE_URL = "s3://fragments/sim/"
LAYOUT = Layout("/gazette/cluster")
JOURNAL_BACKLOG_BYTES = 2 << 10
BROKER_BACKLOG_BYTES = 5 << 10
FRAME_PORT = 8082
_FRAMES_GRACE_SECONDS = 1.0
_RESTART_SECONDS = (0.2, 1.5)


class World:
    """The brokers of one run and their environment. Larger worlds extend it."""

    def __init__(self, loop: SimLoop, options: Options, journals: Sequence[str] = ()) -> None:
        """Let `journals`, if any, replace the names of the options."""
        self.loop = loop
        self.options = options
        self.rng = loop.rng
        self.coverage = PathCoverage()
        self.history = History()
        self.anomalies: list[Anomaly] = []
        """Promises that were broken during the run."""
        self.problems: list[str] = []
        """Problems that no program may have, independent of the journals' content."""
        self.network = Network(loop, self.rng, Delays(congestion=options.congestion))
        self.rpc = Rpc(self.network)
        self.tcp = SimTcp(self.network, loop)
        self.etcd = SimEtcd(loop, self.network)
        self.etcd.on_expiry.append(self._lease_ran_out)
        self.store = SimObjectStore(self.network, self.rng)
        self.disks: list[SimDisk] = []
        self.flips: list[BitFlip] = []
        """Bytes that disks have damaged."""
        self.clients = Process(loop, "clients")
        self.client_clock = SimClock(loop, self.clients)
        self.journals = list(journals) or options.names
        self.machines = [BrokerHost(self, number) for number in range(options.brokers)]
        self.unsure = False
        """True while a restored etcd has no record of the content of each broker."""

    def start(self) -> None:
        puts = [Put(LAYOUT.item_key(name), self.new_spec(name).SerializeToString()) for name in self.journals]
        self.etcd.txn([], puts, [])
        for machine in self.machines:
            machine.boot(self.rng.uniform(0, 0.3))

    def new_spec(self, journal: str) -> pb.JournalSpec:
        options = self.options
        fragment = pb.JournalSpec.Fragment(
            length=options.fragment_length,
            compression_codec=int(options.codec),  # type: ignore[arg-type]
            stores=[STORE_URL],
            refresh_interval=Duration(seconds=5),
        )
        return pb.JournalSpec(
            name=journal,
            replication=options.replication,
            labels=label_set(DEMANDS[options.durability]) if options.durability else None,
            fragment=fragment,
            flags=pb.JournalSpec.O_RDWR,
        )

    # -- State of etcd itself ------------------------------------------------------------------------------------------

    def spec(self, journal: str) -> pb.JournalSpec:
        return pb.JournalSpec.FromString(self.etcd.kvs[LAYOUT.item_key(journal)].value)

    def create_revision(self, journal: str) -> int:
        return self.etcd.kvs[LAYOUT.item_key(journal)].create_revision

    def assignments(self, journal: str) -> list[tuple[AssignmentKey, KeyValue]]:
        found = []
        for kv in self.etcd.prefixed(LAYOUT.assignments_of(journal)):
            key = LAYOUT.decode(kv.key)
            assert isinstance(key, AssignmentKey)
            found.append((key, kv))
        return found

    def exists(self, journal: str) -> bool:
        """Return True if the journal's item is in etcd, which a restore may have emptied."""
        return LAYOUT.item_key(journal) in self.etcd.kvs

    def is_consistent(self, journal: str) -> bool:
        """Return True if the journal has all its replicas, one of them is primary, and they agree on the Route."""
        if not self.exists(journal):
            return False
        found = self.assignments(journal)
        route = implied_route([key for key, _ in found])
        return (
            len(found) == effective_replication(self.spec(journal), 9)
            and route.primary != -1
            and all(routes_equivalent(synced(kv), route) for _, kv in found)
        )

    def is_whole(self, journal: str) -> bool:
        """Return True if the journal is consistent, or is fully suspended until the next append."""
        if self.exists(journal) and effective_replication(self.spec(journal), 9) == 0:
            return not self.assignments(journal)
        return self.is_consistent(journal)

    @property
    def bounds_backlog(self) -> bool:
        """True if brokers bound their backlog and delay appends."""
        return "store refuses fragments" in self.options.faults

    def is_damaged(self, machine: BrokerHost, journal: str, offset: int) -> bool:
        """Return True if a machine's local content at an offset is in a fragment that its disk has damaged."""
        return any(
            flip.machine is machine
            and flip.fragment.journal == journal
            and flip.fragment.begin <= offset < flip.fragment.end
            for flip in self.flips
        )

    def unflipped(self, journal: str, offset: int, content: bytes) -> bytes:
        """Return content as it was before a disk damaged it. Readers may see damage until the broker detects it."""
        for flip in self.flips:
            position = flip.offset - offset
            if flip.fragment.journal == journal and 0 <= position < len(content) and content[position] == flip.wrong:
                content = content[:position] + bytes([flip.wrong ^ 0xFF]) + content[position + 1 :]
        return content

    def machine_of(self, member: MemberId | pb.ProcessSpec.ID) -> BrokerHost:
        return next(machine for machine in self.machines if machine.name == member.suffix)

    def count_faults(self) -> Counter[str]:
        """Count the effects of faults. An injected fault may have none."""
        counts: Counter[str] = Counter({"network: a message was held": self.network.held}) + self.tcp.counts
        for place, found in (
            ("store: a call was", self.store.faulty),
            *(("disk: a write was", d.faulty) for d in self.disks),
        ):
            counts.update({f"{place} {what}": count for what, count in found.items()})
        return counts

    def _lease_ran_out(self, lease: int) -> None:
        self.coverage.sometimes("a lease ran out")

    # -- Clients -------------------------------------------------------------------------------------------------------

    def client(self, node: str, machine: BrokerHost, retry_timeout: float) -> JournalClient:
        return self.client_over(self.connection(node, machine), retry_timeout)

    def client_over(self, connection: WorldConnection, retry_timeout: float) -> JournalClient:
        return JournalClient(
            connection.endpoint,
            clock=self.client_clock,
            retry_timeout=retry_timeout,
            connection=connection,
            append_streams=self.options.append_streams,
        )

    def connection(self, node: str, machine: BrokerHost) -> WorldConnection:
        return WorldConnection(self.rpc, node, machine.endpoint, dialer=self.dialer(node, machine.endpoint))

    def dialer(self, node: str, endpoint: str) -> FrameDialer | None:
        """Return the dialer of frames from a node to the broker at an endpoint; None in a run without frames."""
        if not self.options.frames:
            return None

        async def connect(protocol: asyncio.Protocol, host: str, port: int, tls: object) -> None:
            await self.tcp.connect(node, protocol, host, port)

        host = parse_endpoint(endpoint).address.partition(":")[0]
        return FrameDialer(host, None, connect=connect, read_bytes=self.options.frame_read_bytes)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until `condition` holds and return True, or return False after `seconds` of virtual time."""
        end = self.loop.time() + seconds
        while not condition():
            if self.loop.time() >= end:
                return False
            await asyncio.sleep(0.1)
        return True


@dataclass(frozen=True, slots=True)
class BitFlip:
    """A damaged byte in a machine's copy of a fragment: the journal's byte at `offset` is now `wrong`."""

    machine: BrokerHost
    fragment: Fragment
    offset: int
    wrong: int


def synced(kv: KeyValue) -> pb.Route:
    """Return the synchronized Route in an assignment's value."""
    return pb.Route.FromString(kv.value) if kv.value else pb.Route(primary=-1)


class Host:
    """A machine that runs one program, and restarts it whenever its process ends."""

    def __init__(self, world: World, name: str, zone: str) -> None:
        self.name = name
        self.zone = zone
        self.endpoint = f"http://{name}:8080"
        self.member = MemberId(zone, name)
        self.process: Process | None = None
        self.stop_requested = asyncio.Event()
        self.stays_down = False
        self.locked = False
        """True while an operator prevents all starts."""
        self.suspended: list[Process] = []
        """Processes that are or were suspended, and that others may consider dead."""
        self._loop = world.loop
        self._rng = world.rng
        self._problems = world.problems
        self._incarnation = 0

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.alive

    def boot(self, delay: float) -> None:
        """Start a process after `delay` seconds, unless one runs or starts are prevented."""
        self._loop.later(delay, self._boot)

    def kill(self) -> None:
        """End the process as `kill -9` does. Another starts some time later."""
        if self.process is not None:
            self.process.kill()

    def end(self) -> None:
        """End all its processes, and start no more."""
        self.stays_down = True
        self.kill()
        for process in self.suspended:
            process.kill()

    async def serve(self, process: Process) -> None:
        """Run the program until it ends, on simulated effects."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop references to a process that has ended."""

    def _boot(self) -> None:
        if self.stays_down or self.locked or (self.process is not None and self.process.alive):
            return
        self._incarnation += 1
        process = Process(self._loop, f"{self.name}.{self._incarnation}")
        process.on_death.append(partial(self._died, process))
        self.process = process
        self.stop_requested = asyncio.Event()
        self._loop.note(f"start {process.name}")
        process.start(self._run(process))

    def _died(self, process: Process) -> None:
        self._loop.note(f"end of {process.name}")
        self.forget()
        self.boot(self._rng.uniform(*_RESTART_SECONDS))

    async def _run(self, process: Process) -> None:
        try:
            await self.serve(process)
        except (CorantoError, OSError) as error:
            self._loop.note(f"{process.name} cannot continue: {error}")
        except Exception as error:  # noqa: BLE001  # Reported with the run.
            self._problems.append(f"{process.name} failed: {error!r}")
        finally:
            process.kill()


class BrokerHost(Host):
    """A host that runs brokers, and its disk."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"broker-{number}", f"zone-{number % world.options.zones}")
        self.disk = self._new_disk(world)
        self.broker: Broker | None = None
        self.session: MemberSession | None = None
        self.flips_next = False
        """True if the disk damages the next fragment that is about to be stored and that a replica has too."""
        self._world = world
        skew = world.options.skew
        self._skew, self._rate = world.rng.uniform(-skew, skew), world.rng.uniform(0.999, 1.001)
        self.settings = BrokerSettings(
            etcd="etcd:2379",
            zone=self.zone,
            id=self.name,
            data_dir=Path(f"/{self.name}"),
            lease_seconds=world.options.lease_seconds,
            fsync=world.options.fsync,
            min_append_rate=world.options.min_append_rate,
            group_append_bytes=world.options.group_append_bytes,
            exit_seconds=10.0,
            advertise=self.endpoint,
            # A run writes little, so the bounds are low enough for some runs to reach them.
            max_unpersisted_journal_bytes=JOURNAL_BACKLOG_BYTES if world.bounds_backlog else 0,
            max_unpersisted_bytes=BROKER_BACKLOG_BYTES if world.bounds_backlog else 0,
        )

    @property
    def is_up(self) -> bool:
        return super().is_up and self.broker is not None

    def crash(self) -> None:
        """Lose power. Unsynced content may be lost."""
        self.kill()
        self.disk.crash()

    def replace_disk(self) -> None:
        """Put in an empty disk. The machine must be down."""
        self.disk = self._new_disk(self._world)

    @staticmethod
    def _new_disk(world: World) -> SimDisk:
        disk = SimDisk(world.loop, world.rng)
        world.disks.append(disk)
        return disk

    def forget(self) -> None:
        self.broker = self.session = None

    def _has_complete(self, sealed: Sealed) -> bool:
        """Return True if the disk has exactly this fragment, complete, not as part of one that may have diverged."""
        fragment = sealed.fragment
        folder = folder_of(self.settings.data_dir / "spools", fragment.journal, sealed.create_revision)
        begin = f"{fragment.begin:016x}."
        content = self.disk.content(folder / f"{begin}content") or b""
        logs = [name for name in self.disk.names(folder) if name.startswith(begin) and name.endswith(".commits")]
        lasts = [commit_log.decode(self.disk.content(folder / name) or b"").last for name in logs]
        committed = any(last is not None and last.fragment.sum == fragment.sum for last in lasts)
        return committed and sum_of(content) == fragment.sum

    def _about_to_store(self, sealed: Sealed) -> None:
        """Let the disk damage the fragment immediately before it is stored, so that few reads see the damage.

        Damages it only if another machine of the Route has it and no disk has damaged it before. A machine that has
        left the Route may have to set its copy aside, together with the content that it alone wrote after it.
        """
        world, fragment = self._world, sealed.fragment
        if not self.flips_next or any(flip.fragment.content_name == fragment.content_name for flip in world.flips):
            return
        ours = self.disk.content(sealed.content.path) or b""
        members = {key.member.suffix for key, _ in world.assignments(fragment.journal)}
        others = (machine for machine in world.machines if machine is not self and machine.name in members)
        elsewhere = any(machine._has_complete(sealed) for machine in others)
        if sum_of(ours) != fragment.sum or not elsewhere:
            return
        self.flips_next = False
        position = world.rng.randrange(fragment.length)
        self.disk.corrupt(sealed.content.path, position)
        world.flips.append(BitFlip(self, fragment, fragment.begin + position, ours[position] ^ 0xFF))
        world.coverage.sometimes("a bit was flipped in a fragment that was about to be stored")
        world.loop.note(f"{self.name} has damaged {fragment.content_path} at {position}")

    async def serve(self, process: Process) -> None:
        world = self._world
        clock = SimClock(world.loop, process, skew=self._skew, rate=self._rate)
        stopped = await self._serve(process, clock)
        world.coverage.sometimes("a broker exited gracefully" if stopped else "a broker lost its lease or etcd")

    async def _serve(self, process: Process, clock: SimClock) -> bool:
        world = self._world
        try:
            return await self._serve_anywhere(process, clock)
        except WrongCluster:
            world.coverage.sometimes("a broker refused an etcd that does not go with its disk")
            raise

    async def _serve_anywhere(self, process: Process, clock: SimClock) -> bool:
        world = self._world
        return await serve(
            self.settings,
            clock=clock,
            disk=self.disk.for_process(process),
            coordinator=SimCoordinator(world.etcd, world.network, self.name, process, clock),
            stores=SimStores(world.store, world.network, self.name, process),
            peers=StubPeers(
                self.zone,
                lambda endpoint: world.rpc.stub(self.name, endpoint, process),
                lambda endpoint: world.dialer(self.name, endpoint),
            ),
            layout=LAYOUT,
            place=_SimServing(self, world, process),
            stop=self.stop_requested,
            make=lambda *args, **effects: _SimBroker(world.coverage, self._about_to_store, *args, **effects),
            entropy=world.rng.randbytes,
        )


class _SimServing:
    """The place where a machine's broker listens."""

    def __init__(self, machine: BrokerHost, world: World, process: Process) -> None:
        self._machine = machine
        self._world = world
        self._process = process

    def endpoint(self, broker: Broker) -> str:
        return self._machine.endpoint

    @asynccontextmanager
    async def listening(self, broker: Broker, session: MemberSession) -> AsyncIterator[None]:
        machine, endpoints = self._machine, self._world.rpc.endpoints
        service = JournalService(broker)
        frames = self._frames(broker, service) if self._world.options.frames else None
        endpoints.listen(machine.endpoint, machine.name, self._process, service)
        machine.broker, machine.session = broker, session
        try:
            yield
        finally:
            if frames is not None:
                await frames.stop(_FRAMES_GRACE_SECONDS)
            endpoints.close(machine.endpoint, self._process)

    def _frames(self, broker: Broker, service: JournalService) -> FrameServer:
        """Serve frames, at the same port in each of the machine's processes."""
        world = self._world
        server = FrameServer(
            frame_methods(service),
            world.tcp.listen(self._machine.name, FRAME_PORT, self._process),
            max_message_bytes=self._machine.settings.max_message_bytes,
            entropy=world.rng.randbytes,
            read_bytes=world.options.frame_read_bytes,
        )
        broker.frames = server.start()
        return server


class _SimBroker(Broker):
    """A broker that reports group commits, and fragments that it is about to store."""

    def __init__(
        self, coverage: PathCoverage, about_to_store: Callable[[Sealed], None], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        proposed = self.appends.proposed

        def noted(path: ProposalPath, appends: int) -> None:
            coverage.sometimes(f"append was proposed: {path.value}")
            proposed(path, appends)

        self.appends.proposed = noted  # type: ignore[method-assign]
        self._about_to_store = about_to_store

    async def _judge(self, sealed: Sealed) -> Judgement:
        judgement = await super()._judge(sealed)
        if judgement is Judgement.FINAL:
            self._about_to_store(sealed)
        return judgement


class WorldConnection(Connection):
    """A client's connection over the simulated network."""

    def __init__(
        self,
        rpc: Rpc,
        node: str,
        endpoint: str,
        process: Process | None = None,
        dialer: FrameDialer | None = None,
    ) -> None:
        """Without `dialer` all calls use the twin of gRPC."""
        self._sim_dialer = dialer
        super().__init__(ClientConfig(endpoint))
        self._sim_stub = rpc.stub(node, endpoint, process)
        self._sim_channel = rpc.channel(node, endpoint)

    def _dialer(self, config: ClientConfig) -> FrameDialer | None:
        return self._sim_dialer

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._sim_channel

    @property
    def stub(self) -> pb_grpc.JournalAsyncStub:
        return self._sim_stub

    @property
    def heads_stub(self) -> heads_grpc.JournalsAsyncStub:
        return cast("heads_grpc.JournalsAsyncStub", self._sim_stub)

    @property
    def streams_stub(self) -> stream_grpc.AppendsAsyncStub:
        return cast("stream_grpc.AppendsAsyncStub", self._sim_stub)
