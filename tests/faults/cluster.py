"""etcd and brokers as processes, behind proxies, so that faults can hit each link."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coranto.cluster.brokers import serves
from coranto.cluster.processes import free_port
from coranto.coordination.layout import MemberId
from coranto.errors import ClusterError
from coranto.process.staged import StagedContext
from tests.faults.links import ProxiedLink, Proxy
from tests.faults.namespaces import Namespaces
from tests.servers.ground import PREFIX, Ground
from tests.servers.processes import ProcessSlot, broker_command, until

CLIENTS = "clients"
_STARTS = 5


class BrokerNode:
    """A broker's name, zone, folder and ports, which survive its processes."""

    def __init__(self, cluster: FaultyCluster, number: int, zone: str) -> None:
        self.name = f"broker-{number}"
        self.zone = zone
        self.member = MemberId(zone, self.name)
        self.is_wanted = True
        """True if it should run while there is no fault."""
        self.is_harmed = False
        """True while a fault holds it, so that it is not restarted when it ends."""
        self._changing = asyncio.Lock()
        self._cluster = cluster
        self._folder = cluster.folder / self.name
        self._port = free_port(taken=cluster.ports)
        cluster.ports.add(self._port)
        self._to_me = Proxy(self._port, cluster.link_to(self.name), cluster.sockets / self.name)
        self.to_etcd = ProxiedLink()
        self._host = "127.0.0.1"
        network = cluster.network
        self._etcd = Proxy(cluster.etcd_port, lambda _: self.to_etcd, host=network.gateway if network else self._host)
        self._slot = ProcessSlot(
            self.name,
            cluster.folder,
            lambda: cluster.environment,
            self._command,
            lambda _: asyncio.to_thread(serves, self.own_endpoint),
        )

    @property
    def endpoint(self) -> str:
        """The address for others: its proxy's, or in a namespace its own."""
        return self._to_me.endpoint if self._cluster.network is None else self.own_endpoint

    @property
    def own_endpoint(self) -> str:
        """The address of the broker itself, without its proxy."""
        return f"{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        return self._slot.pid

    @property
    def is_running(self) -> bool:
        return self._slot.is_running

    @property
    def is_member(self) -> bool:
        """True while etcd has it as a member, until its lease ends."""
        return self._cluster.ground.is_member(self.member)

    async def start(self) -> None:
        """Start a process, and return once it serves and is a member."""
        async with self._changing:
            await self._start()
            self.is_wanted, self.is_harmed = True, False

    async def _start(self) -> None:
        if not self._etcd.endpoint:
            if self._cluster.network is not None:
                self._host = await self._cluster.network.add(self.name)
            else:
                await self._to_me.start()
            await self._etcd.start()
        for _ in range(_STARTS):
            if not self.is_running:
                self._slot.spawn()
            await self._slot.serving()
            await until(lambda: self.is_member or not self.is_running, f"{self.name} is a member")
            if self.is_running:
                return
            # On a stalled machine, the lease may expire during the start.
        raise ClusterError(f"{self.name} ended {_STARTS} times before it was a member:\n{self.log_tail()}")

    async def seize(self) -> None:
        """Wait for a start in progress, and prevent automatic restarts."""
        async with self._changing:
            self.is_harmed = True

    async def kill(self) -> None:
        """Send SIGKILL, and return when the process has ended."""
        await self.seize()
        async with self._changing:
            await self._slot.kill()

    async def stop(self) -> None:
        """Send SIGTERM, and return once it has ended. It is not restarted."""
        async with self._changing:
            self.is_wanted = False
            await self._slot.stop()

    async def pause(self) -> None:
        await self.seize()
        self._slot.pause()

    def resume(self) -> None:
        self._slot.resume()

    async def ended(self) -> None:
        """Wait until its process has exited."""
        await until(lambda: not self.is_running, f"{self.name} has ended")

    async def gone(self) -> None:
        """Wait until its lease has expired."""
        await until(lambda: not self.is_member, f"etcd has dropped {self.name} as a member")

    async def close(self) -> None:
        await asyncio.to_thread(self._slot.close)
        await self._to_me.close()
        await self._etcd.close()

    async def restart(self) -> None:
        """Restart it if it has exited and should run."""
        async with self._changing:
            if self.is_wanted and not self.is_harmed and self.pid and not self.is_running:
                await self._start()

    def log_tail(self) -> str:
        return self._slot.log_tail(8)

    def _command(self, _: int) -> list[str]:
        command = broker_command(
            etcd=self._etcd.endpoint,
            prefix=PREFIX,
            port=self._port,
            zone=self.zone,
            id=self.name,
            data_dir=self._folder,
            file_root=self._cluster.folder / "fragments",
            lease_seconds=self._cluster.lease_seconds,
            host=self._host,
        )
        if self._cluster.network is not None:
            return self._cluster.network.command(self.name, command)
        return [*command, "--advertise", self.endpoint]


class FaultyCluster(StagedContext):
    """etcd and brokers, which are assigned to `zones` in turn. Use as `async with`, in the main thread."""

    def __init__(
        self,
        folder: Path,
        *,
        brokers: int = 3,
        zones: Sequence[str] = ("a", "b"),
        lease_seconds: float = 4.0,
        environment: Mapping[str, str] | None = None,
        network: Namespaces | None = None,
    ) -> None:
        """Create a cluster. With a `network`, each broker has a namespace, and brokers have no proxies.

        Faults of their links then have no effect.
        """
        super().__init__()
        self.network = network
        self.folder = folder.absolute()
        self.lease_seconds = lease_seconds
        self.environment = {**os.environ, "CORANTO_BROKER_EXIT_SECONDS": "60", **(environment or {})}
        self.brokers: list[BrokerNode] = []
        self.sockets = Path()
        """The folder of proxies' sockets. Its name is short, because the length of a socket's path is limited."""
        self.ports: set[int] = set()
        self._zones = zones
        self._count = brokers
        self._links: dict[tuple[str, str], ProxiedLink] = {}
        self.ground = Ground(self.folder)

    @property
    def etcd_port(self) -> int:
        return int(self.ground.etcd.endpoint.rpartition(":")[2])

    @property
    def endpoint(self) -> str:
        """The endpoints of all running brokers, as a client's seeds."""
        return ",".join(broker.endpoint for broker in self.brokers if broker.is_running)

    async def _start(self) -> None:
        self.sockets = Path(tempfile.mkdtemp(prefix="coranto-"))
        self._exits.push_async_callback(asyncio.to_thread, shutil.rmtree, self.sockets)
        await self._exits.enter_async_context(self.ground)
        self._exits.push_async_callback(self._close_brokers)
        await asyncio.gather(*(self.add().start() for _ in range(self._count)))

    async def _close_brokers(self) -> None:
        self.heal()
        await asyncio.gather(*(broker.close() for broker in self.brokers))

    def add(self) -> BrokerNode:
        """Add another broker, not started yet."""
        number = len(self.brokers)
        broker = BrokerNode(self, number, self._zones[number % len(self._zones)])
        self.brokers.append(broker)
        return broker

    def link(self, source: str, target: str) -> ProxiedLink:
        """Return the link of connections from `source` to `target`, both by name. CLIENTS means all clients."""
        return self._links.setdefault((source, target), ProxiedLink())

    def between(self, one: BrokerNode, other: BrokerNode) -> tuple[ProxiedLink, ProxiedLink]:
        """Return the links of both directions."""
        return self.link(one.name, other.name), self.link(other.name, one.name)

    def link_to(self, target: str) -> Callable[[int], ProxiedLink]:
        def link_of(pid: int) -> ProxiedLink:
            names = (broker.name for broker in self.brokers if broker.is_running and broker.pid == pid)
            return self.link(next(names, CLIENTS), target)

        return link_of

    async def supervise(self) -> None:
        """Restart brokers that exit, for example because their lease expired on a busy machine."""
        while True:
            await asyncio.gather(*(broker.restart() for broker in self.brokers))
            await asyncio.sleep(0.2)

    def heal(self) -> None:
        """Heal all links, and resume all paused processes."""
        for link in (*self._links.values(), *(broker.to_etcd for broker in self.brokers)):
            link.heal()
        for broker in self.brokers:
            if broker.is_running:
                broker.resume()

    def members_of(self, journal: str) -> list[BrokerNode]:
        """Return the brokers that have a replica of a journal, the primary first."""
        members = [assignment.member for assignment in self.ground.keyspace.state.assignments(journal)]
        by_member = {broker.member: broker for broker in self.brokers}
        return [by_member[member] for member in members if member in by_member]

    def processes_of(self, journal: str) -> tuple[tuple[str, int, bool], ...]:
        """Identify the processes that serve a journal, the primary first. The value changes when one is replaced."""
        return tuple((broker.name, broker.pid, broker.is_running) for broker in self.members_of(journal))

    def state_of(self, journals: Sequence[str]) -> str:
        """Describe for messages the running brokers and their journals."""
        running = ", ".join(f"{b.name}{'' if b.is_running else ' (down)'}" for b in self.brokers)
        held = "; ".join(
            f"{journal}: {[b.name for b in self.members_of(journal)]}{'' if whole else ' (not whole)'}"
            for journal in journals
            for whole in (self.ground.is_whole(journal),)
        )
        return f"{running}; {held}"
