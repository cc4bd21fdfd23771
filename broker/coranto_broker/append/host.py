"""The part of a broker that its appends use."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from coranto.coordination.etcd import Coordinator
from coranto.effects import Clock
from coranto.security.tokens import TOKEN_SECONDS, Capability
from coranto.tracing import Tracer
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.queued_append import AppendOutcome, QueuedAppend
from coranto_broker.append.states import ProposalPath, State
from coranto_broker.fragments.store_watch import StoreWatch
from coranto_broker.metrics import Metrics
from coranto_broker.quotas import Quotas
from coranto_broker.recovery.in_sync_records import InSyncRecords, StoredRecord, Stranded
from coranto_broker.replication.peers import Peers, PeerStream
from coranto_broker.replication.pipeline import LocalStream, Pipeline, ReplicaStream
from coranto_broker.replication.resolver import Resolution, Resolver
from coranto_broker.spool.durable_spool import DurableSpool

RENEW_SECONDS = TOKEN_SECONDS / 3
"""The lifetime of a pipeline with tokens, which are valid for at least TOKEN_SECONDS / 2."""


@dataclass(kw_only=True)
class AppendHost:
    """The effects and components of one broker that its appends use."""

    clock: Clock
    coordinator: Coordinator
    resolver: Resolver
    in_sync: InSyncRecords
    peers: Peers
    stores: StoreWatch
    metrics: Metrics
    quotas: Quotas
    max_append_rate: int
    """The highest rate of each journal's appends in bytes per second; 0: unlimited."""
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    tracer: Tracer | None = None

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> StoredRecord:
        """Return the in-sync record if this broker's spool may take part in a pipeline.

        Otherwise restart the replica and raise Stranded.
        """
        replica = resolution.require_replica
        try:
            reading = await self.in_sync.verify(replica.journal, replica.folder.create_revision, spool.stamp, spool.end)
        except Stranded:
            replica.stranded = True
            self.resolver.restart(replica)
            raise
        if reading.record is not None:
            replica.index.note_head(reading.record.floor)
        replica.journal_id = reading.journal_id
        return reading

    def build_pipeline(self, resolution: Resolution, spool: DurableSpool, reading: StoredRecord) -> Pipeline:
        """Build a pipeline for the resolution's Route with this broker's spool."""
        route = resolution.header.route
        metadata = self.peers.metadata(Capability.REPLICATE, resolution.spec.name)
        streams: list[ReplicaStream] = []
        peers: list[PeerStream] = []
        for index, member in enumerate(route.members):
            if index == route.primary:
                streams.append(LocalStream(spool, resolution.require_replica))
            else:
                peers.append(self.peers.replicate(route.endpoints[index], member, resolution.spec.name, metadata))
                streams.append(peers[-1])
        names = [f"{member.zone}#{member.suffix}" for member in route.members]
        oldest = max((peer.token_age for peer in peers), default=0.0)
        renew_at = self.clock.monotonic() + RENEW_SECONDS - oldest if metadata is not None else math.inf
        pipeline = Pipeline(resolution.header, spool, streams, names, renew_at, reading)
        for peer in peers:
            peer.replace = pipeline.replace
        return pipeline

    def proposed(self, path: ProposalPath, appends: int) -> None:
        """Count appends that are proposed together."""
        if path is not ProposalPath.STREAMED:
            self.metrics.group_appends.observe(appends)

    def ended(self, append: QueuedAppend) -> None:
        """Count an append that was answered, or whose client has left, and end its span."""
        metrics, state, outcome, span = self.metrics, append.state, append.outcome, append.span
        metrics.appends.count(state)
        if not isinstance(outcome, AppendOutcome):
            if span is not None:
                span.end(outcome or asyncio.CancelledError())
        elif state is State.FINISHED:
            size = outcome.end - outcome.begin
            metrics.append_bytes.value += size
            metrics.append_seconds.observe(self.clock.monotonic() - append.begun)
            if span is not None:
                span.end(begin=outcome.begin, end=outcome.end, bytes=size, status="OK")
        elif span is not None:
            span.end(status="forwarded" if state is State.PROXY else pb.Status.Name(outcome.status))
