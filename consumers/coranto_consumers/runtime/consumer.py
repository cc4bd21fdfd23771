"""`Consumer`: a consumer process with injected effects. It starts, runs shards, and stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from coranto.client import JournalClient
from coranto.coordination.etcd import Coordinator, KeyValue, Put, unmodified
from coranto.coordination.headers import process_id, unrouted_header
from coranto.coordination.layout import MemberId
from coranto.coordination.lease import MemberSession
from coranto.effects import Clock, Entropy
from coranto.errors import TxnOutcomeUnknown, Unavailable
from coranto.member.etcd_budget import EtcdBudget
from coranto.security.admission import Authorizer
from coranto.security.call_tokens import CallTokens
from coranto.security.server import keys_of, peer_tls, provider_of
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.authorization import RULES
from coranto_consumers.runtime.metrics import ConsumerMetrics
from coranto_consumers.runtime.peers import ShardPeers
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.resolver import ShardKeySpace, ShardResolver
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.specs import validate_consumer_spec

_log = structlog.get_logger(__name__)


class Consumer:
    """The effects and long-lived parts of one consumer process. `close` closes only its channels, no other effects."""

    def __init__(
        self,
        settings: ConsumerProcessSettings,
        app: Application[Any],
        client: JournalClient,
        *,
        member: MemberId,
        clock: Clock,
        entropy: Entropy,
        coordinator: Coordinator,
        keyspace: ShardKeySpace,
        recovery_folder: Path,
        metrics: ConsumerMetrics,
        peers: ShardPeers | None = None,
    ) -> None:
        """Recovery logs are played into folders below `recovery_folder`."""
        self.settings = settings
        self.member = member
        self.clock = clock
        self.entropy = entropy
        self.coordinator = coordinator
        self.keyspace = keyspace
        self.recovery_folder = recovery_folder
        self.metrics = metrics
        keys = keys_of(settings)
        self.provider = provider_of(settings, metrics.registry)
        self.authorizer = Authorizer(keys, clock, RULES, self.provider)
        self.etcd_budget = EtcdBudget(
            coordinator,
            clock,
            metrics.etcd_budget,
            caller_bytes=lambda _: settings.etcd_caller_bytes,
            total_bytes=settings.max_etcd_bytes,
        )
        self.tokens = CallTokens(keys, clock)
        self.peers = peers if peers is not None else ShardPeers(peer_tls(settings))
        self._app = app
        self._client = client
        self._stopping: set[asyncio.Task[None]] = set()
        self.resolver: ShardResolver

    def member_spec(self, endpoint: str) -> pc.ConsumerSpec:
        """Return the spec of this process for etcd. Raises InvalidInput."""
        process = pb.ProcessSpec(id=process_id(self.member), endpoint=endpoint)
        spec = pc.ConsumerSpec(process_spec=process, shard_limit=self.settings.shard_limit)
        validate_consumer_spec(spec)
        return spec

    def start(self, session: MemberSession) -> None:
        """Start to run the shards that are assigned to this process. The key space must have been loaded."""
        self.resolver = ShardResolver(self.keyspace, self.member, self._start_replica, self._stop_replica)

    async def stop(self) -> None:
        """Complete the open transactions of local shards in bounded time, and process nothing more."""
        self.resolver.stop()
        while self._stopping:
            await asyncio.wait(set(self._stopping))

    async def exit(self) -> None:
        """Do the same as `stop`: other processes continue from the checkpoints."""
        await self.stop()

    async def close(self) -> None:
        """Close the channels to other processes."""
        await self.peers.close()

    def unrouted_header(self) -> pb.Header:
        """Return the header of a response that is not about one shard."""
        return unrouted_header(self.member, self.keyspace.state.header)

    # -- Replicas ------------------------------------------------------------------------------------------------------

    def _start_replica(self, spec: pc.ShardSpec) -> ShardReplica:
        _log.info("shard.starting", shard=spec.id)
        replica = ShardReplica(self._app, spec, self._client, self, clock=self.clock, metrics=self.metrics)
        replica.start()
        return replica

    def _stop_replica(self, replica: ShardReplica) -> None:
        _log.info("shard.stopping", shard=replica.spec.id)
        task = asyncio.create_task(self._ended(replica, replica.stop()), name=f"stop {replica.spec.id}")
        self._stopping.add(task)
        task.add_done_callback(self._stopped)

    async def _ended(self, replica: ShardReplica, stopping: Coroutine[Any, Any, None]) -> None:
        await stopping
        shard = replica.spec.id
        if not self.resolver.has(shard):
            self.metrics.forget(shard)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("shard.stop_failed", task=task.get_name(), exc_info=error)

    @property
    def accept_changes(self) -> str:
        return self.settings.accept_changes

    def fqn_of(self, shard: str) -> str:
        return self.keyspace.layout.item_key(shard)

    def assignment_of(self, shard: str) -> KeyValue | None:
        """This process's assignment to a shard."""
        return next((each.kv for each in self.keyspace.state.assignments(shard) if each.member == self.member), None)

    def earlier_shards(self, shard: str) -> Sequence[pc.ShardSpec]:
        """Return the specs of the shards created before a shard. For shards created together, the smaller id
        is earlier."""
        state = self.keyspace.state
        item = state.item(shard)
        if item is None:
            return ()
        age = item.create_revision, item.id
        return [other.spec for other in state.items if (other.create_revision, other.id) < age]

    async def set_status(self, shard: str, status: pc.ReplicaStatus, is_due: Callable[[], bool]) -> None:
        """Write a replica's status into its assignment. Retries while there is an assignment and `is_due`."""
        value = status.SerializeToString(deterministic=True)
        while is_due():
            state = self.keyspace.state
            mine = next((each for each in state.assignments(shard) if each.member == self.member), None)
            if mine is None or mine.value == status:
                return
            try:
                result = await self.coordinator.txn([unmodified(mine.kv)], [Put(mine.kv.key, value, keep_lease=True)])
                await self.keyspace.wait_for_revision(result.header.revision)
            except (TxnOutcomeUnknown, Unavailable) as error:
                _log.warning("shard.status_not_written", shard=shard, error=str(error))
                await self.clock.sleep(0.5)
