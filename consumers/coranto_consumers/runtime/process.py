"""A consumer process: it builds a consumer from settings, and runs it until it is stopped or loses its lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from prometheus_client import start_http_server

from coranto.client import JournalClient
from coranto.coordination.etcd import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import MemberSession, open_session
from coranto.effects import SystemClock
from coranto.errors import ClusterError
from coranto.security.server import check_exposure, etcd_tls, server_credentials
from coranto.wire import consumer_pb2 as pc
from coranto.wire import consumer_pb2_grpc as pc_grpc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.consumer import Consumer
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.peers import MAX_MESSAGE_BYTES
from coranto_consumers.runtime.resolver import ShardKeySpace
from coranto_consumers.runtime.service import ShardService
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.specs import ShardEntities, validate_consumer_spec

_log = structlog.get_logger(__name__)

GRACE_SECONDS = 1.0
"""The time for which calls in progress may go on once the process has stopped serving."""


async def run(settings: ConsumerProcessSettings, app: Application[Any], client: JournalClient) -> int:
    """Run a consumer process until SIGTERM or SIGINT (returns 0) or until it cannot go on (returns 1)."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with client, ConsumerProcess(settings, app, client) as process:
        _log.info(
            "ready",
            endpoint=process.endpoint,
            process=str(process.member),
            etcd=settings.etcd,
            etcd_prefix=settings.etcd_prefix,
            metrics=process.metrics_endpoint,
        )
        return await process.serve_until(stop)


class ConsumerProcess:
    """A running consumer with its own etcd connection, lease and port. Tests run it within their own process.

    `settings.etcd` and `settings.etcd_prefix` must be given. The client is not closed.
    """

    def __init__(self, settings: ConsumerProcessSettings, app: Application[Any], client: JournalClient) -> None:
        self.settings = settings
        self.member = MemberId(settings.zone, settings.id or f"{socket.gethostname()}-{os.getpid()}")
        self.metrics = ConsumerMetrics()
        self.endpoint = ""
        self.metrics_endpoint = ""
        self._app = app
        self._client = client
        self._exits = contextlib.AsyncExitStack()
        self.keyspace: ShardKeySpace
        self.session: MemberSession
        self.consumer: Consumer

    async def __aenter__(self) -> ConsumerProcess:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def serve_until(self, stop: asyncio.Event) -> int:
        """Serve until `stop` is set or the process cannot go on, and return the exit code.

        On `stop` it hands shards over and returns 0. It returns 1 when the lease, key space or allocator is lost.
        """
        return await self.consumer.serve_until(stop)

    async def exit_gracefully(self) -> None:
        """Hand shards over to other processes that can take them, then stop the remaining ones."""
        await self.consumer.exit_gracefully()

    async def _start(self) -> None:
        settings, clock = self.settings, SystemClock()
        folder = tempfile.TemporaryDirectory(prefix="coranto-consumer-", dir=settings.data_dir)
        recovery_folder = Path(self._exits.enter_context(folder))
        coordinator = EtcdCoordinator(settings.etcd, clock=clock, tls=etcd_tls(settings))
        self._exits.push_async_callback(coordinator.close)
        layout = Layout(settings.etcd_prefix)
        entities = ShardEntities(max_hot_standbys=settings.max_hot_standbys)
        self.keyspace = KeySpace(coordinator, layout, entities, clock=clock)
        self.consumer = Consumer(
            settings,
            self._app,
            self._client,
            member=self.member,
            clock=clock,
            entropy=os.urandom,
            coordinator=coordinator,
            keyspace=self.keyspace,
            recovery_folder=recovery_folder,
            metrics=self.metrics,
        )
        server = self._make_server()
        address, credentials = f"{settings.host}:{settings.port}", server_credentials(settings)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        if port == 0:
            raise ClusterError(f"cannot listen on {address}; is the port taken?")
        scheme = "http" if credentials is None else "https"
        self.endpoint = settings.advertise or f"{scheme}://{settings.host}:{port}"
        check_exposure(settings, self.endpoint, harm="change shards")
        if settings.metrics_port is not None:
            self._serve_metrics(settings.host, settings.metrics_port)
        self.session = await open_session(coordinator, ttl_seconds=settings.lease_seconds, clock=clock)
        self._exits.push_async_callback(self._close_session)
        spec = member_spec(self.member, self.endpoint, settings)
        await self.session.announce(layout.member_key(self.member), spec.SerializeToString(deterministic=True))
        await self.keyspace.start()
        self._exits.push_async_callback(self.keyspace.close)
        self._exits.push_async_callback(self.consumer.close)
        self.consumer.start(self.session)
        await server.start()
        self._exits.push_async_callback(server.stop, GRACE_SECONDS)

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Two processes must not share a port unnoticed.
                ("grpc.so_reuseport", 0),
            ]
        )
        pc_grpc.add_ShardServicer_to_server(ShardService(self.consumer), server)
        return server

    def _serve_metrics(self, host: str, port: int) -> None:
        server, thread = start_http_server(port, host, self.metrics.registry)

        def close() -> None:
            server.shutdown()
            server.server_close()
            assert isinstance(thread, threading.Thread)
            thread.join()

        self.metrics_endpoint = f"http://{host}:{server.server_port}"
        self._exits.push_async_callback(asyncio.to_thread, close)

    async def _close_session(self) -> None:
        await self.session.close(revoke=not self.session.lost.is_set())


def member_spec(member: MemberId, endpoint: str, settings: ConsumerProcessSettings) -> pc.ConsumerSpec:
    """Return the spec of a process for etcd. Raises InvalidInput."""
    spec = pc.ConsumerSpec(
        process_spec=pb.ProcessSpec(id=pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix), endpoint=endpoint),
        shard_limit=settings.shard_limit,
    )
    validate_consumer_spec(spec)
    return spec
