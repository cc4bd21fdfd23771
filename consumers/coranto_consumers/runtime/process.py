"""A consumer process: from its settings to shards at work, until it is told to end or loses its lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import grpc.aio
import structlog
from prometheus_client import start_http_server

from coranto.call_tokens import CallTokens
from coranto.client import JournalClient
from coranto.coordination.allocator import AllocatorLoop, may_drain
from coranto.coordination.etcd import EtcdCoordinator, KeyValue, Put, unmodified
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.coordination.lease import MemberSession, open_session
from coranto.effects import Clock, SystemClock
from coranto.errors import ClusterError, CorantoError, TxnOutcomeUnknown, Unavailable
from coranto.wire import consumer_pb2 as pc
from coranto.wire import consumer_pb2_grpc as pc_grpc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.peers import MAX_MESSAGE_BYTES, ShardPeers
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.resolver import ShardResolver
from coranto_consumers.runtime.security import (
    Authorizer,
    check_exposure,
    etcd_tls,
    keys_of,
    peer_tls,
    server_credentials,
)
from coranto_consumers.runtime.service import ShardService
from coranto_consumers.runtime.settings import ConsumerSettings
from coranto_consumers.runtime.specs import ShardEntities, validate_consumer_spec

_log = structlog.get_logger(__name__)

GRACE_SECONDS = 1.0
"""How long calls in progress may go on once the process has stopped serving."""


async def run(settings: ConsumerSettings, app: Application[Any], client: JournalClient) -> int:
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
    """A running consumer process; also for tests, within their process.

    `settings.etcd` and `settings.etcd_prefix` must be given. The client is not closed.
    """

    def __init__(self, settings: ConsumerSettings, app: Application[Any], client: JournalClient) -> None:
        self.settings = settings
        self.member = MemberId(settings.zone, settings.id or f"{socket.gethostname()}-{os.getpid()}")
        self.clock: Clock = SystemClock()
        self.metrics = ConsumerMetrics()
        keys = keys_of(settings)
        self.authorizer = Authorizer(keys, self.clock)
        self.tokens = CallTokens(keys, self.clock)
        self.peers = ShardPeers(peer_tls(settings))
        self.endpoint = ""
        self.metrics_endpoint = ""
        self._app = app
        self._client = client
        self._exits = contextlib.AsyncExitStack()
        self._stopping: set[asyncio.Task[None]] = set()
        self._allocation: asyncio.Task[None]
        self.recovery_folder: Path
        self.coordinator: EtcdCoordinator
        self.keyspace: KeySpace[pc.ShardSpec, pc.ConsumerSpec, pc.ReplicaStatus]
        self.session: MemberSession
        self.resolver: ShardResolver

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
        """Serve until `stop` (hands over, 0), or until lease, key space or the allocator are lost (1)."""
        waits = [
            asyncio.create_task(stop.wait()),
            asyncio.create_task(self.session.lost.wait()),
            asyncio.create_task(self._wait_failed()),
        ]
        try:
            await asyncio.wait([*waits, self._allocation], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if stop.is_set():
            await self.exit_gracefully()
            return 0
        _log.error("this process can no longer know what is assigned to it, and ends")
        await self.stop_shards()
        return 1

    async def exit_gracefully(self) -> None:
        """Hand shards over to others that can take them, then stop those that are left."""
        _log.info("exiting")
        state = self.keyspace.state
        member = state.member(self.member)
        if member is not None and may_drain(state, self.member):
            spec = pc.ConsumerSpec()
            spec.CopyFrom(member.spec)
            spec.exiting = True
            try:
                await self.session.update(spec.SerializeToString(deterministic=True))
                await self.keyspace.wait_until(
                    lambda now: not now.by_member.get(self.member) or not may_drain(now, self.member),
                    timeout=self.settings.exit_seconds,
                )
            except TimeoutError:
                _log.warning("shards were not taken over in time", shards=len(self.resolver.replicas))
            except CorantoError as error:
                _log.warning("shards could not be handed over", error=str(error))
        await self.stop_shards()

    async def stop_shards(self) -> None:
        """Complete what local shards have consumed, in bounded time, and process nothing more."""
        self.resolver.stop()
        while self._stopping:
            await asyncio.wait(set(self._stopping))

    def unrouted_header(self) -> pb.Header:
        """A header of a response that is not about one shard."""
        return pb.Header(
            process_id=pb.ProcessSpec.ID(zone=self.member.zone, suffix=self.member.suffix),
            route=pb.Route(primary=-1),
            etcd=self.keyspace.state.header.to_wire(),
        )

    # -- Replicas ------------------------------------------------------------------------------------------------------

    def _start_replica(self, spec: pc.ShardSpec) -> ShardReplica:
        _log.info("starting shard", shard=spec.id)
        replica = ShardReplica(self._app, spec, self._client, self, clock=self.clock, metrics=self.metrics)
        replica.start()
        return replica

    def _stop_replica(self, replica: ShardReplica) -> None:
        _log.info("stopping shard", shard=replica.spec.id)
        task = asyncio.create_task(replica.stop(), name=f"stop {replica.spec.id}")
        self._stopping.add(task)
        task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("shard did not stop cleanly", task=task.get_name(), exc_info=error)

    def assignment_of(self, shard: str) -> KeyValue | None:
        """This process's assignment to a shard."""
        return next((each.kv for each in self.keyspace.state.assignments(shard) if each.member == self.member), None)

    async def set_status(self, shard: str, status: pc.ReplicaStatus) -> None:
        """Write a replica's status into its assignment, for as long as there is one."""
        value = status.SerializeToString(deterministic=True)
        while True:
            state = self.keyspace.state
            mine = next((each for each in state.assignments(shard) if each.member == self.member), None)
            if mine is None or mine.value == status:
                return
            try:
                result = await self.coordinator.txn([unmodified(mine.kv)], [Put(mine.kv.key, value, keep_lease=True)])
                await self.keyspace.wait_for_revision(result.header.revision)
            except (TxnOutcomeUnknown, Unavailable) as error:
                _log.warning("status could not be written", shard=shard, error=str(error))
                await self.clock.sleep(0.5)

    # -- Starting ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        settings = self.settings
        folder = tempfile.TemporaryDirectory(prefix="coranto-consumer-", dir=settings.data_dir)
        self.recovery_folder = Path(self._exits.enter_context(folder))
        self._exits.push_async_callback(self.peers.close)
        self.coordinator = EtcdCoordinator(settings.etcd, clock=self.clock, tls=etcd_tls(settings))
        self._exits.push_async_callback(self.coordinator.close)
        layout = Layout(settings.etcd_prefix)
        entities = ShardEntities(max_hot_standbys=settings.max_hot_standbys)
        self.keyspace = KeySpace(self.coordinator, layout, entities, clock=self.clock)
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
        check_exposure(settings, self.endpoint)
        if settings.metrics_port is not None:
            self._serve_metrics(settings.host, settings.metrics_port)
        self.session = await open_session(self.coordinator, ttl_seconds=settings.lease_seconds, clock=self.clock)
        self._exits.push_async_callback(self._close_session)
        spec = pc.ConsumerSpec(
            process_spec=pb.ProcessSpec(
                id=pb.ProcessSpec.ID(zone=self.member.zone, suffix=self.member.suffix), endpoint=self.endpoint
            ),
            shard_limit=settings.shard_limit,
        )
        validate_consumer_spec(spec)
        await self.session.announce(layout.member_key(self.member), spec.SerializeToString(deterministic=True))
        await self.keyspace.start()
        self._exits.push_async_callback(self.keyspace.close)
        self.resolver = ShardResolver(self.keyspace, self.member, self._start_replica, self._stop_replica)
        self._exits.push_async_callback(self.stop_shards)
        allocator = AllocatorLoop(self.keyspace, self.coordinator, self.member, clock=self.clock)
        self._allocation = self._spawn(allocator.run())
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
        pc_grpc.add_ShardServicer_to_server(ShardService(self), server)
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self._exits.push_async_callback(end)
        return task

    async def _wait_failed(self) -> None:
        await self.keyspace.wait_failed()

    async def _close_session(self) -> None:
        await self.session.close(revoke=not self.session.lost.is_set())
