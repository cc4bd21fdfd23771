"""A process that is a member: from its settings to a served port, until a signal or a failure ends it."""

from __future__ import annotations

import asyncio
import signal
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry

from coranto.coordination.etcd import Coordinator
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import LeaseRecord, MemberSession
from coranto.effects import SystemClock
from coranto.errors import ClusterError
from coranto.member import health
from coranto.member.membership import DataDirectory, MemberPhase, Membership, MemberWork
from coranto.member.settings import MemberSettings
from coranto.member.site import Site
from coranto.process.memory import reduce_garbage_collection
from coranto.process.staged import StagedContext
from coranto.security.server import check_exposure, etcd_tls, server_credentials
from coranto.security.tls import is_loopback

if TYPE_CHECKING:
    from coranto.security.oidc.provider import Provider

SettingsT = TypeVar("SettingsT", bound=MemberSettings)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MemberParts:
    """The parts of a member that differ between brokers and consumers."""

    work: MemberWork
    keyspace: KeySpace[Any, Any, Any]
    server: grpc.aio.Server
    """The gRPC server of the work, not yet bound to a port."""
    registry: CollectorRegistry
    close: Callable[[], Awaitable[None]]
    """Closes the work's resources. Called last."""
    provider: Provider | None = None
    """The provider whose tokens the server accepts."""
    residence: DataDirectory | None = None
    record: LeaseRecord | None = None
    takeover_timeout: float | None = None
    """See `Membership` and `Membership.join` for the last three."""


class MemberProcess(StagedContext, Generic[SettingsT]):
    """A running member with its own etcd connection, lease and ports. Tests run it in their own process.

    Entering the context starts the member, and leaving it stops the member immediately. `membership` has its phases.
    """

    grace_seconds: float
    """The time for calls in flight to finish after the member has stopped serving."""

    def __init__(self, settings: SettingsT, member: MemberId) -> None:
        super().__init__()
        self.settings = settings
        self.member = member
        self.endpoint = ""
        self.metrics_endpoint = ""
        """Endpoint of /metrics, /ready and /live, or "" if there is none."""
        self.membership: Membership
        self._started = False

    @abstractmethod
    async def _make(self, coordinator: Coordinator, layout: Layout) -> MemberParts:
        """Create the parts of the member. Nothing is announced yet."""

    async def _start(self) -> None:
        settings = self.settings
        coordinator = EtcdCoordinator(settings.etcd, clock=SystemClock(), tls=etcd_tls(settings))
        self._exits.push_async_callback(coordinator.close)
        parts = await self._make(coordinator, Layout(settings.etcd_prefix))
        self._exits.push_async_callback(parts.close)
        if parts.provider is not None:
            parts.provider.start()
            self._exits.push_async_callback(parts.provider.close)
        if settings.metrics_port is not None:
            application = health.application(parts.registry, self.readiness, local=is_loopback(settings.host))
            site = Site(application, grace_seconds=0.1)
            self._exits.push_async_callback(site.stop)
            self.metrics_endpoint = await site.start(settings.host, settings.metrics_port)
        self.endpoint = self._bind(parts.server)
        check_exposure(settings, self.endpoint, harm=settings.harm)
        self.membership = Membership(
            self.member,
            parts.work,
            coordinator=coordinator,
            keyspace=parts.keyspace,
            clock=SystemClock(),
            exit_seconds=settings.exit_seconds,
            residence=parts.residence,
        )
        self._exits.push_async_callback(self.membership.close)
        await self.membership.join(
            self.endpoint,
            lease_seconds=settings.lease_seconds,
            record=parts.record,
            takeover_timeout=parts.takeover_timeout,
        )
        await parts.server.start()
        self._exits.push_async_callback(parts.server.stop, self.grace_seconds)
        self._started = True

    def _bind(self, server: grpc.aio.Server) -> str:
        """Bind `server` to the port of the settings, and return the endpoint to announce. Raises ClusterError."""
        settings, credentials = self.settings, server_credentials(self.settings)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.port}"
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        if port == 0:
            raise ClusterError(f"cannot listen on {address}: is the port taken? Free it, or choose another --port")
        return settings.advertise or f"{'http' if credentials is None else 'https'}://{host}:{port}"

    @property
    def session(self) -> MemberSession:
        """The member's lease. Available after the member has joined."""
        return self.membership.session

    async def serve_until(self, stop: asyncio.Event) -> int:
        """Serve until `stop` (returns 0, after a graceful exit), or until a failure (returns 1)."""
        return await self.membership.serve_until(stop)

    async def exit_gracefully(self) -> None:
        """Hand items over to other members that can take them, then stop the remaining items."""
        await self.membership.exit_gracefully()

    def readiness(self) -> dict[str, bool]:
        """Return the conditions of readiness by name; True for each that holds."""
        started = self._started
        return {
            "started": started,  # The key space is loaded, and calls are served.
            "lease": started and not self.session.lost.is_set(),
            "announced": started and self.membership.is_announced,
            "staying": not started or self.membership.phase is MemberPhase.SERVING,
        }

    def facts(self) -> dict[str, object]:
        """Return the facts to log when the member is ready."""
        settings = self.settings
        return {
            "member": str(self.member),
            "endpoint": self.endpoint,
            "metrics": self.metrics_endpoint,
            "etcd": settings.etcd,
            "etcd_prefix": settings.etcd_prefix,
        }

    async def run(self) -> int:
        """Run the member until SIGTERM or SIGINT (returns 0), or until a failure (returns 1)."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with self:
            reduce_garbage_collection()
            _log.info("member.ready", **self.facts())
            return await self.serve_until(stop)
