"""A broker process: from its settings to a served port, until it is asked to end or loses its lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable

import structlog

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import LeaseRecord, MemberSession, open_session
from coranto.effects import LocalDisk, SystemClock
from coranto.errors import ClusterError, CorantoError
from coranto.fragments.store_endpoints import AllowedEndpoints
from coranto.fragments.stores import StoreRegistry
from coranto.process.dirlock import DirectoryLock
from coranto.process.memory import keep_freed_memory, spare_garbage_collection
from coranto.security.server import check_exposure, etcd_tls, server_context, server_credentials
from coranto.security.tls import is_loopback
from coranto.specs.validation import validate_broker_spec
from coranto.wire import protocol_pb2 as pb
from coranto_broker.broker import Broker
from coranto_broker.http import gateway, operation
from coranto_broker.http.site import Site
from coranto_broker.recovery.residence import Residence
from coranto_broker.server.service import make_server
from coranto_broker.settings import BrokerSettings

GRACE_SECONDS = 3.0
"""Time that calls in progress have to finish once the broker has stopped serving."""
EXIT_STEPS = 4
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
    """Run a broker until SIGTERM or SIGINT (returns 0) or until it cannot go on (returns 1)."""
    raise_file_limit()
    keep_freed_memory()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with DirectoryLock(settings.data_dir):
        async with BrokerProcess(settings) as process:
            spare_garbage_collection()
            _log.info(
                "ready",
                endpoint=process.endpoint,
                http=process.http_endpoint,
                metrics=process.metrics_endpoint,
                broker=f"{settings.zone}#{settings.id}",
                etcd=settings.etcd,
                data_dir=str(settings.data_dir),
            )
            return await process.serve_until(stop)


class BrokerProcess:
    """A running broker with its own etcd connection, lease and port. Tests run it in their own process."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._exits = contextlib.AsyncExitStack()
        self._exiting = False
        self._serving = False
        self.endpoint = ""
        self.http_endpoint = ""
        """Endpoint of the HTTP gateway, or "" if there is none. The same holds for `metrics_endpoint`."""
        self.metrics_endpoint = ""
        self.broker: Broker
        self.session: MemberSession

    async def __aenter__(self) -> BrokerProcess:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def serve_until(self, stop: asyncio.Event) -> int:
        """Serve until `stop`, or until the broker cannot go on. Returns an exit code.

        At `stop` it exits gracefully and returns 0. It returns 1 when its lease is lost, its key space or its allocator
        fails, or its data directory and etcd no longer match.
        """
        waits = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self.session.lost.wait()),
            asyncio.create_task(self._fail_of_keyspace()),
            asyncio.create_task(self.broker.allocation_ended()),
            asyncio.create_task(self._fail_of_residence()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if stop.is_set():
            await self.exit_gracefully()
            return 0
        _log.error("this broker can no longer know what is assigned to it, and ends")
        await self.broker.stop()
        return 1

    async def exit_gracefully(self) -> None:
        """Hand journals over, store fragments, and give up the lease."""
        self._exiting = True
        _log.info("exiting")
        await self.broker.exit_gracefully(self.session)
        try:
            await self._residence.refresh(*self.broker.seen)
        except (CorantoError, OSError) as error:
            _log.warning("the data directory's last use could not be noted", error=str(error))

    def readiness(self) -> dict[str, bool]:
        """Return the conditions of readiness by name, and whether each holds."""
        started = self._serving
        return {
            "started": started,  # The key space is loaded, and calls are served.
            "lease": started and not self.session.lost.is_set(),
            "announced": started and self.broker.keyspace.state.member(self.broker.member) is not None,
            "staying": not self._exiting,
            "spools": started and not self.broker.unreadable_spools,
        }

    async def _fail_of_keyspace(self) -> None:
        await self.broker.keyspace.wait_failed()

    async def _fail_of_residence(self) -> None:
        reason = await self._residence.keep(SystemClock(), lambda: self.broker.seen)
        _log.error("this broker's data directory and etcd do not go together any more", reason=reason)

    async def _close_session(self) -> None:
        # A lease that we only lost sight of may live on. With it, the next process can resume this one's assignments.
        await self.session.close(revoke=not self.session.lost.is_set())

    async def _start(self) -> None:
        settings = self._settings
        clock, disk = SystemClock(), LocalDisk()
        coordinator = EtcdCoordinator(settings.etcd, clock=clock, tls=etcd_tls(settings))
        self._exits.push_async_callback(coordinator.close)
        layout = Layout(settings.etcd_prefix)
        keyspace = KeySpace(coordinator, layout, JournalEntities(max_replication=settings.max_replication), clock=clock)
        stores = StoreRegistry(settings.file_root, AllowedEndpoints(settings.store_endpoints))
        member = MemberId(settings.zone, settings.id)
        self._residence = await Residence.check(coordinator, layout, member, settings.data_dir, disk, os.urandom)
        self.broker = Broker(
            settings,
            clock=clock,
            disk=disk,
            coordinator=coordinator,
            keyspace=keyspace,
            stores=stores,
            residence=self._residence,
        )
        self._exits.push_async_callback(self.broker.close)
        if settings.metrics_port is not None:
            self.broker.metrics.watch(
                {"zone": settings.zone, "id": settings.id, "fsync": settings.fsync.value},
                self.broker.values,
            )
            operations = operation.application(
                self.broker.metrics.registry, self.readiness, local=is_loopback(settings.host)
            )
            site = Site(operations, grace_seconds=0.1)
            self._exits.push_async_callback(site.stop)
            self.metrics_endpoint = await site.start(settings.host, settings.metrics_port)
        server = make_server(self.broker)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address, credentials = f"{host}:{settings.port}", server_credentials(settings)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        if port == 0:
            raise ClusterError(f"cannot listen on {address}; is the port taken?")
        scheme = "http" if credentials is None else "https"
        self.endpoint = settings.advertise or f"{scheme}://{host}:{port}"
        check_exposure(settings, self.endpoint, harm="read and write everything")
        self.session = await open_session(
            coordinator,
            ttl_seconds=settings.lease_seconds,
            record=LeaseRecord.within(settings.data_dir, disk),
            clock=clock,
        )
        self._exits.push_async_callback(self._close_session)
        spec = pb.BrokerSpec(
            process_spec=pb.ProcessSpec(
                id=pb.ProcessSpec.ID(zone=settings.zone, suffix=settings.id), endpoint=self.endpoint
            ),
            journal_limit=settings.journal_limit,
        )
        validate_broker_spec(spec)
        await self.session.announce(
            layout.member_key(member),
            spec.SerializeToString(deterministic=True),
            patience=EXIT_STEPS * settings.exit_seconds,
        )
        await self._residence.move_in()
        await keyspace.start()
        self._exits.push_async_callback(keyspace.close)
        self.broker.start(self.session)
        self._exits.push_async_callback(self.broker.stop)
        await server.start()
        self._exits.push_async_callback(server.stop, GRACE_SECONDS)
        if settings.http_port is not None:
            site = Site(gateway.application(self.broker), grace_seconds=GRACE_SECONDS)
            self._exits.push_async_callback(site.stop)
            self.http_endpoint = await site.start(settings.host, settings.http_port, server_context(settings))
        self._serving = True


def raise_file_limit() -> None:
    """Raise the limit of open files as far as the system allows: every journal with appends needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
