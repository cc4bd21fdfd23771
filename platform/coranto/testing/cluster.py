"""`Cluster`: real brokers in this process, with their whole environment in memory.

The brokers run production code. etcd, network, disks and the fragment store are twins of the outside world
(`coranto.testing.sim`) in real time, on the running event loop. The cluster uses no other process, no thread, no file,
and no port unless `grpc` asks for ports.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog
from google.protobuf.duration_pb2 import Duration

from coranto.client import JournalClient
from coranto.client.config import DEFAULT_RETRY_TIMEOUT
from coranto.errors import ClusterError, InvalidInput
from coranto.fragments.fragment import Fragment
from coranto.labels import label_set, union
from coranto.testing.in_process import BrokerPlace, find_broker
from coranto.testing.machines import LAYOUT, SERVICES, Machine, RunningCluster
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.connection import SimConnection
from coranto.testing.sim.loop import SimLoop
from coranto.testing.sim.real_time import RealTimeline
from coranto.testing.sim.timeline import Timeline
from coranto.wire import protocol_pb2 as pb

STORE_URL = "file:///fragments/"
"""The fragment store of journals that `Cluster.create` makes from a name."""

_FRAGMENT_BYTES = 1 << 26
_REFRESH_SECONDS = 30
_EXIT_SECONDS = 10.0


class Cluster:
    """Brokers in this process: `async with Cluster(brokers=3) as cluster:`. Use it on one event loop.

    Over several cells of a notebook: `cluster = await Cluster(brokers=3)`, and `await cluster.close()` at the end.

    A cluster starts in some hundredths of a second. The broker must be installed: `coranto[broker]`.
    """

    def __init__(
        self,
        brokers: int = 3,
        *,
        zones: Sequence[str] = ("local",),
        lease_seconds: float = 10.0,
        delay: float = 0.0,
        grpc: bool = False,
        log_level: str = "warning",
    ) -> None:
        """Prepare a cluster; it starts when entered or awaited. `zones` are assigned to the brokers in turn.

        `lease_seconds` (at least 2) is the time until others notice that a broker has ended, unless `expire` is called.
        `delay` is the latency of every message, in seconds. With `grpc` the brokers also listen on free ports of this
        machine, for other programs and for `SyncJournalClient`. Unless the program has configured structlog, nothing
        below `log_level` is logged while the cluster runs.
        """
        if brokers < 1:
            raise InvalidInput(f"a cluster cannot have {brokers} brokers; give at least one", field="brokers")
        if not zones:
            raise InvalidInput("a cluster needs at least one zone; name one", field="zones")
        if lease_seconds < 2:
            raise InvalidInput(
                f"{lease_seconds:g} is less than the 2 s of the shortest lease; give more", field="lease_seconds"
            )
        if delay < 0:
            raise InvalidInput(f"messages cannot take {delay:g} s; give 0 or more", field="delay")
        self._names = [f"broker-{number}" for number in range(brokers)]
        self._zones = [zones[number % len(zones)] for number in range(brokers)]
        self._lease_seconds = lease_seconds
        self._delay = delay
        self._grpc = grpc
        self._log_level = log_level
        self._exits = AsyncExitStack()
        self._running: RunningCluster | None = None

    async def __aenter__(self) -> Cluster:
        if self._running is not None:
            raise ClusterError("this cluster is running already; create another one")
        run_broker = find_broker()
        async with AsyncExitStack() as exits:
            exits.enter_context(_quiet(self._log_level))
            timeline, rng = exits.enter_context(_timeline())
            world = self._running = RunningCluster(timeline, rng, run_broker, list(self._places()), delay=self._delay)
            exits.callback(self._ended)
            exits.push_async_callback(world.close)
            await asyncio.gather(*(self.start(number) for number in range(len(self._names))))
            self._exits = exits.pop_all()
            return self
        raise AssertionError("nothing above swallows exceptions")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __await__(self) -> Generator[Any, None, Cluster]:
        return self.__aenter__().__await__()

    async def close(self) -> None:
        """End the cluster, as leaving its block does. No effect if it does not run.

        If cancelled, tasks of its brokers may be left on the event loop.
        """
        await self._exits.aclose()

    def __repr__(self) -> str:
        brokers = f"{len(self._names)} broker{'' if len(self._names) == 1 else 's'}"
        if self._running is None:
            return f"<Cluster of {brokers}, not running>"
        down = [name for number, name in enumerate(self._names) if not self.is_up(number)]
        return f"<Cluster of {brokers}, {'without ' + ', '.join(down) if down else 'running'}>"

    # -- Clients and journals --------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints of all brokers, including brokers that are down.

        Without `grpc`, only this cluster's clients can use them.
        """
        return tuple(machine.endpoint for machine in self._world.machines)

    @property
    def endpoint(self) -> str:
        """All endpoints in one text, in the form that clients accept."""
        return ",".join(self.endpoints)

    def client(
        self,
        *,
        name: str = "client",
        zone: str = "",
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT,
        append_streams: bool = True,
    ) -> JournalClient:
        """Return a client, ready for use. It is closed with the cluster, if not earlier.

        `name` is its node of the network, for `cut` and `calls`. Clients may share a name.
        """
        client = self._new_client(name, zone, retry_timeout, append_streams)
        self._world.clients.append(client)
        return client

    async def create(
        self,
        journal: str | pb.JournalSpec,
        *,
        replication: int = 0,
        labels: Mapping[str, str] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Create a journal, and return once it can be appended to.

        A name stands for a spec with a fragment store. Its replication is the number of brokers less one, between 1 and
        3, so that the journal survives the end of a broker. `replication` (unless 0) overrides the spec's, and `labels`
        are added to the spec's. Raises the errors of `JournalClient.apply`, and ClusterError if the journal cannot be
        served within `timeout` seconds. If cancelled, the journal may exist or not.
        """
        spec = pb.JournalSpec()
        if isinstance(journal, str):
            spec.name, spec.flags = journal, pb.JournalSpec.O_RDWR
            spec.replication = max(1, min(3, len(self._names) - 1))
            spec.fragment.length = _FRAGMENT_BYTES
            spec.fragment.compression_codec = pb.NONE
            spec.fragment.stores.append(STORE_URL)
            spec.fragment.refresh_interval.CopyFrom(Duration(seconds=_REFRESH_SECONDS))
        else:
            spec.CopyFrom(journal)
        if replication:
            spec.replication = replication
        if spec.replication > len(self._names):
            raise InvalidInput(
                f"{spec.name} cannot have {spec.replication} replicas on {len(self._names)} brokers; "
                "start more brokers, or ask for fewer replicas",
                field="replication",
            )
        if labels:
            spec.labels.CopyFrom(union(spec.labels, label_set(labels)))
        async with self._new_client("cluster", "", timeout) as client:
            await client.apply([pb.ApplyRequest.Change(upsert=spec)])
        await self.ready(spec.name, timeout=timeout)

    async def ready(self, *journals: str, timeout: float = 30.0) -> None:
        """Wait until journals have all replicas, which agree on the Route. Raises ClusterError after `timeout` seconds.

        Cancelling ends only the wait.
        """
        for journal in journals:
            try:
                async with asyncio.timeout(timeout):
                    await self._world.until(functools.partial(self._world.is_ready, journal))
            except TimeoutError:
                raise ClusterError(
                    f"{journal} has no full set of replicas after {timeout:g} s; "
                    "does it exist, and are enough brokers up?"
                ) from None

    # -- Faults ----------------------------------------------------------------------------------------------------

    async def kill(self, number: int, *, expire: bool = False) -> None:
        """End a broker as `kill -9` does, and return when all its tasks have ended. No effect if it is down already.

        Its disk is kept for `start`. The other brokers continue without it once its lease has expired; with `expire`,
        immediately. If cancelled, the broker still ends, but its lease does not expire early.
        """
        machine = self._machine(number)
        await machine.kill()
        if expire:
            self.expire(number)

    def expire(self, number: int) -> None:
        """Expire the lease of a broker that is down now."""
        machine = self._machine(number)
        if machine.process is not None:
            raise ClusterError(f"broker {number} is running; kill it first")
        self._world.expire(machine.member)

    async def stop(self, number: int) -> None:
        """Stop a broker gracefully: it hands its journals over and persists the content that only it has.

        If cancelled, the broker continues to exit.
        """
        await self._machine(number).stop()

    async def start(self, number: int) -> None:
        """Start a broker that is down, and return when it serves. Raises ClusterError if it cannot start.

        If cancelled, the broker continues to start.
        """
        await self._machine(number).start()

    def is_up(self, number: int) -> bool:
        """Return True if a broker runs. A broker that was cut off from etcd for too long loses its lease and ends."""
        return self._machine(number).process is not None

    def cut(self, one: int | str, other: int | str, *, one_way: bool = False) -> None:
        """Cut the link between two nodes until `heal`; with `one_way`, only in the direction from `one` to `other`.

        Nodes are brokers (by number), clients (by name), `etcd`, and `store`. Ends of connections notice within 0.2 s.
        Traffic of other programs over gRPC is not cut.
        """
        source, target = self._node(one), self._node(other)
        network = self._world.network
        self._world.cuts.append(network.cut(source, target) if one_way else network.cut_both(source, target))

    def heal(self) -> None:
        """Restore all links. Brokers that ended stay down."""
        cuts, self._world.cuts = self._world.cuts, []
        for restore in cuts:
            restore()

    # -- Observations ----------------------------------------------------------------------------------------------

    def calls(self, method: str, *, client: str = "client") -> int:
        """Return the number of calls of an RPC, such as `List`, that clients of this name have begun."""
        return self._world.rpc.calls[client, method]

    def appends(self, *, client: str = "client") -> int:
        """Return the number of appends that clients of this name have begun, in separate calls or on streams."""
        return self._world.rpc.appends[client]

    @property
    def revision(self) -> int:
        """etcd's revision. Every change of etcd raises it by one."""
        return self._world.etcd.revision

    def fragments(self, journal: str) -> dict[Fragment, bytes]:
        """Return a journal's persisted fragments, with the content of their files in the store."""
        stored = self._world.store.objects.values()
        return {each.fragment: each.data for each in stored if each.fragment.journal == journal}

    def files(self, number: int) -> dict[Path, bytes]:
        """Return the files on a broker's disk, with their content."""
        disk = self._machine(number).disk
        return {Path(path): disk.content(Path(path)) or b"" for path in disk.paths()}

    # -- Parts -----------------------------------------------------------------------------------------------------

    @property
    def _world(self) -> RunningCluster:
        if self._running is None:
            raise ClusterError("the cluster does not run; use it in `async with Cluster() as cluster:`")
        return self._running

    def _ended(self) -> None:
        self._running = None

    def _new_client(self, name: str, zone: str, retry_timeout: float, append_streams: bool = True) -> JournalClient:
        if not name or name in (*SERVICES, *self._names):
            raise InvalidInput(f"{name!r} cannot be the name of a client; choose one that no broker has", field="name")
        world = self._world
        world.client_nodes.add(name)
        return JournalClient(
            self.endpoint,
            zone=zone,
            retry_timeout=retry_timeout,
            append_streams=append_streams,
            clock=SimClock(world.timeline),
            connect=functools.partial(SimConnection, world.rpc, name),
        )

    def _places(self) -> Iterator[BrokerPlace]:
        for name, zone in zip(self._names, self._zones, strict=True):
            yield BrokerPlace(
                zone=zone,
                id=name,
                endpoint=f"http://{name}:8080",
                data_dir=Path(f"/{name}"),
                layout=LAYOUT,
                lease_seconds=self._lease_seconds,
                exit_seconds=_EXIT_SECONDS,
                port=0 if self._grpc else None,
            )

    def _machine(self, number: int) -> Machine:
        if not 0 <= number < len(self._names):
            raise InvalidInput(f"there is no broker {number}, only 0 to {len(self._names) - 1}", field="number")
        return self._world.machines[number]

    def _node(self, name: int | str) -> str:
        if isinstance(name, int):
            return self._machine(name).place.id
        known = {*self._names, *SERVICES, *self._world.client_nodes}
        if name not in known:
            raise InvalidInput(f"{name!r} is not a node; there are {', '.join(sorted(known))}", field="node")
        return name


@contextmanager
def _timeline() -> Iterator[tuple[Timeline, random.Random]]:
    """Yield the timeline of the running event loop, whose time may be virtual, and its random number generator."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, SimLoop):
        yield loop, loop.rng
        return
    timeline = RealTimeline(loop)
    try:
        yield timeline, random.Random()
    finally:
        timeline.close()


@contextmanager
def _quiet(level: str) -> Iterator[None]:
    """Drop log events below `level`, unless the program has configured structlog itself."""
    if structlog.is_configured():
        yield
        return
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise InvalidInput(f"{level!r} is not a log level; use debug, info, warning or error", field="log_level")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))
    try:
        yield
    finally:
        structlog.reset_defaults()
