"""The environment of an experiment: a real etcd, and a view of the brokers and journals in it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coranto.cluster.etcd_server import EtcdServer
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd_client import EtcdCoordinator
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.layout import Layout, MemberId
from coranto.process.staged import StagedContext
from coranto.wire import protocol_pb2 as pb

PREFIX = "/gazette/cluster"
"""The prefix of the brokers' keys in etcd."""


class Ground(StagedContext):
    """An etcd with its files in `folder`. Use as `async with`, in the main thread.

    `keyspace` mirrors the brokers' part of etcd directly, without any proxies between etcd and brokers.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.etcd = EtcdServer(folder, fsync=False)
        self.coordinator: EtcdCoordinator
        self.keyspace: KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]

    async def _start(self) -> None:
        self.etcd.start()
        self._exits.push_async_callback(asyncio.to_thread, self.etcd.stop)
        self.coordinator = await self._exits.enter_async_context(EtcdCoordinator(self.etcd.endpoint))
        self.keyspace = KeySpace(self.coordinator, Layout(PREFIX), JournalEntities())
        self._exits.push_async_callback(self.keyspace.close)
        await self.keyspace.start()

    def is_member(self, member: MemberId) -> bool:
        """Return True if etcd has a broker as a member, until its lease ends."""
        return self.keyspace.state.member(member) is not None

    def is_whole(self, journal: str) -> bool:
        """Return True if a journal has all its replicas, and they are in sync."""
        state = self.keyspace.state
        item = state.item(journal)
        if item is None:
            return False
        wanted = self.keyspace.entities.replication(item.spec)
        return len(state.assignments(journal)) == wanted and state.consistent(journal)
