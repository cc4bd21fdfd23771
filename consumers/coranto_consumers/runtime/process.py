"""A consumer process: it builds a consumer from settings, and runs it until it is stopped or fails."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import grpc.aio

from coranto.client import JournalClient
from coranto.coordination.etcd import Coordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.effects import SystemClock
from coranto.member.process import MemberParts, MemberProcess
from coranto.wire import consumer_pb2_grpc as pc_grpc
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.consumer import Consumer
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.peers import MAX_MESSAGE_BYTES
from coranto_consumers.runtime.resolver import ShardKeySpace
from coranto_consumers.runtime.service import ShardService
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.specs import ShardEntities


async def run(settings: ConsumerProcessSettings, app: Application[Any], client: JournalClient) -> int:
    """Run a consumer process until SIGTERM or SIGINT (returns 0) or until it fails (returns 1)."""
    async with client:
        return await ConsumerProcess(settings, app, client).run()


class ConsumerProcess(MemberProcess[ConsumerProcessSettings]):
    """A running consumer. `settings.etcd` and `settings.etcd_prefix` must be given. The client is not closed."""

    grace_seconds = 1.0

    def __init__(self, settings: ConsumerProcessSettings, app: Application[Any], client: JournalClient) -> None:
        super().__init__(settings, MemberId(settings.zone, settings.id or f"{socket.gethostname()}-{os.getpid()}"))
        self.metrics = ConsumerMetrics()
        self._app = app
        self._client = client
        self.keyspace: ShardKeySpace
        self.consumer: Consumer

    async def _make(self, coordinator: Coordinator, layout: Layout) -> MemberParts:
        settings, clock = self.settings, SystemClock()
        folder = tempfile.TemporaryDirectory(prefix="coranto-consumer-", dir=settings.data_dir)
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
            recovery_folder=Path(self._exits.enter_context(folder)),
            metrics=self.metrics,
        )
        return MemberParts(
            self.consumer,
            self.keyspace,
            self._make_server(),
            self.metrics.registry,
            self.consumer.close,
            provider=self.consumer.provider,
        )

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
