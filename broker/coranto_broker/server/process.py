"""The broker process: creates a broker from settings, and serves its ports until a signal or a failure."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from typing import Final

import grpc.aio
import structlog

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import Coordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import LeaseRecord
from coranto.effects import LocalDisk, SystemClock
from coranto.errors import InvalidInput
from coranto.fragments.store_endpoints import AllowedEndpoints
from coranto.fragments.stores import StoreRegistry
from coranto.member.process import MemberParts, MemberProcess
from coranto.member.site import Site
from coranto.process.dirlock import DirectoryLock
from coranto.process.memory import keep_freed_memory
from coranto.security.server import server_context, server_contexts
from coranto.transport.calls import PROTOCOL
from coranto_broker.broker import Broker
from coranto_broker.handlers.heads import VERSION
from coranto_broker.http import gateway
from coranto_broker.recovery.residence import Residence
from coranto_broker.server.frame_listener import SocketListener
from coranto_broker.server.frames import FrameRefusal, FrameServer
from coranto_broker.server.service import JournalService, frame_methods, make_server
from coranto_broker.settings import BrokerSettings

EXIT_STEPS: Final = 4
"""A graceful exit takes at most this many times `exit_seconds`."""

_log = structlog.get_logger(__name__)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of uvloop's event loops, which are faster, or None (asyncio's own) if uvloop is missing."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def run(settings: BrokerSettings) -> int:
    """Run a broker until SIGTERM or SIGINT (returns 0) or until it fails (returns 1)."""
    raise_file_limit()
    keep_freed_memory()
    with DirectoryLock(settings.data_dir):
        return await BrokerProcess(settings).run()


class BrokerProcess(MemberProcess[BrokerSettings]):
    """A running broker. Its data directory must not be in use."""

    grace_seconds = 3.0

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings, MemberId(settings.zone, settings.id))
        self.http_endpoint = ""
        """Endpoint of the HTTP gateway, or "" if there is none."""
        self.broker: Broker
        self._frames: FrameServer | None = None

    @property
    def frame_connections(self) -> int:
        """The number of connections for frames."""
        return self._frames.connections if self._frames is not None else 0

    @property
    def replications_over_frames(self) -> int:
        """The number of Replicate calls from peers over frames."""
        return self._frames.under_way("Replicate") if self._frames is not None else 0

    def readiness(self) -> dict[str, bool]:
        found = super().readiness()
        return found | {"spools": found["started"] and not self.broker.replicas.unreadable_spools}

    def facts(self) -> dict[str, object]:
        found = {"http": self.http_endpoint, "data_dir": str(self.settings.data_dir)}
        return super().facts() | found | {"frame_port": self.broker.frames.port if self.broker.frames else None}

    async def _make(self, coordinator: Coordinator, layout: Layout) -> MemberParts:
        settings = self.settings
        clock, disk = SystemClock(), LocalDisk()
        keyspace = KeySpace(coordinator, layout, JournalEntities(max_replication=settings.max_replication), clock=clock)
        stores = StoreRegistry(settings.file_root, AllowedEndpoints(settings.store_endpoints))
        residence = await Residence.check(coordinator, layout, self.member, settings.data_dir, disk, os.urandom)
        self.broker = Broker(
            settings,
            clock=clock,
            disk=disk,
            coordinator=coordinator,
            keyspace=keyspace,
            stores=stores,
            residence=residence,
        )
        if settings.metrics_port is not None:
            facts = {"zone": settings.zone, "id": settings.id, "fsync": settings.fsync.value, "version": VERSION}
            self.broker.metrics.watch(facts, self.broker.values)
        self._service = JournalService(self.broker)
        return MemberParts(
            self.broker,
            keyspace,
            make_server(self.broker, self._service),
            self.broker.metrics.registry,
            self.broker.close,
            provider=self.broker.provider,
            residence=residence,
            record=LeaseRecord.within(settings.data_dir, disk),
            takeover_timeout=EXIT_STEPS * settings.exit_seconds,
        )

    async def _start(self) -> None:
        await super()._start()
        settings = self.settings
        if self._frames is not None:
            self._exits.push_async_callback(self._frames.stop, self.grace_seconds / 3)  # The rest is for gRPC.
            self.broker.frames = self._frames.start()
        if settings.http_port is not None:
            site = Site(gateway.application(self.broker), grace_seconds=self.grace_seconds)
            self._exits.push_async_callback(site.stop)
            self.http_endpoint = await site.start(settings.host, settings.http_port, server_context(settings))

    def _bind(self, server: grpc.aio.Server) -> str:
        endpoint = super()._bind(server)
        if self.settings.frame_port >= 0:
            self._bind_frames()
        return endpoint

    def _bind_frames(self) -> None:
        """Listen for frames, unless the TLS certificate cannot be used for them. Raises ClusterError."""
        settings = self.settings
        try:
            contexts = server_contexts(settings, PROTOCOL)
        except (InvalidInput, OSError) as error:  # gRPC accepts some certificates that Python's ssl rejects.
            _log.warning("frames.not_served", reason=str(error))
            return
        listener = SocketListener.bind(settings.host, settings.frame_port, contexts)
        methods = frame_methods(self._service)
        frames = FrameServer(methods, listener, max_message_bytes=settings.max_message_bytes)
        self.broker.metrics.watch_frames(frames, methods, FrameRefusal)
        self._exits.push_async_callback(frames.stop, 0.0)  # If the broker fails before it serves.
        self._frames = frames


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows: every journal with appends needs two files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
