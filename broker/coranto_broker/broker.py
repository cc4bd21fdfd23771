"""The broker: assembles its parts, starts them and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from coranto.coordination.etcd import Coordinator
from coranto.coordination.headers import process_id, unrouted_header
from coranto.coordination.layout import MemberId
from coranto.coordination.lease import MemberSession
from coranto.effects import Clock, Disk
from coranto.fragments.stores import StoreRegistry
from coranto.member.etcd_budget import EtcdBudget
from coranto.security.call_tokens import CallTokens
from coranto.security.server import keys_of, peer_tls, provider_of
from coranto.specs.validation import validate_broker_spec
from coranto.tracing import tracer
from coranto.wire import protocol_pb2 as pb
from coranto.wire.frames_pb2 import FramePort
from coranto_broker.append.entry import Pulses
from coranto_broker.append.host import AppendHost
from coranto_broker.append.overload import REASONS, ReceiveBudget
from coranto_broker.append.queue import JournalQueue
from coranto_broker.authorization import RULES, Authorizer
from coranto_broker.background import Background
from coranto_broker.fragments.cache import FragmentCache
from coranto_broker.fragments.journal_folders import JournalFolders
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.fragments.retention import Retention
from coranto_broker.fragments.store_watch import StoreWatch
from coranto_broker.metrics import Metrics
from coranto_broker.quotas import QuotaFile, Quotas
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.recovery.residence import Residence
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.replication.journal_facts import JournalsInEtcd
from coranto_broker.replication.peer_copies import PeerCopies
from coranto_broker.replication.peers import Peers
from coranto_broker.replication.replica_host import ReplicaHost
from coranto_broker.replication.resolver import JournalKeySpace, JournalState
from coranto_broker.replication.spec_lookup import SpecLookup
from coranto_broker.rpc.blocking_reads import BlockingReads
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Sealed
from coranto_broker.spool.in_sync import Judgement

_log = structlog.get_logger(__name__)


class EndingStream(Protocol):
    """A client's stream that is notified before this broker exits."""

    def announce_end(self) -> None: ...


class Broker:
    """The long-lived components of one broker process, and the effects (clock, disk, etcd) that they use."""

    def __init__(
        self,
        settings: BrokerSettings,
        *,
        clock: Clock,
        disk: Disk,
        coordinator: Coordinator,
        keyspace: JournalKeySpace,
        stores: StoreRegistry,
        peers: Peers | None = None,
        fragments: FragmentCache | None = None,
        residence: Residence | None = None,
    ) -> None:
        """Before `start`, `keyspace` must be loaded and have this broker's member key.

        `residence` confirms that the data directory belongs to this etcd. None means that this was not checked.
        """
        self.settings = settings
        self.clock = clock
        self.coordinator = coordinator
        self.keyspace = keyspace
        self.stores = stores
        self.member = MemberId(settings.zone, settings.id)
        self.session: MemberSession | None = None
        self.metrics = Metrics()
        self.tracer = tracer()
        """Creates spans; None if this process is not traced."""
        keys = keys_of(settings)
        self.provider = provider_of(settings, self.metrics.registry)
        self.authorizer = Authorizer(keys, clock, RULES, self.provider)
        self.peers = peers if peers is not None else Peers(settings.zone, CallTokens(keys, clock), peer_tls(settings))
        self.fragments = fragments or FragmentCache(stores, settings.data_dir / "cache", settings.cache_bytes)
        file = QuotaFile.read(settings.quotas) if settings.quotas is not None else None
        self.quotas = Quotas(file, clock, self.metrics.quotas, settings.etcd_caller_bytes)
        self.etcd_budget = EtcdBudget(
            coordinator,
            clock,
            self.metrics.etcd_budget,
            caller_bytes=self.quotas.etcd_bytes,
            total_bytes=settings.max_etcd_bytes,
            note_refusal=self.quotas.report_etcd_bytes,
        )
        self.blocking_reads = BlockingReads(settings.max_blocking_reads, self.metrics.reads_refused.inc)
        self.receive_budget = ReceiveBudget(settings.group_append_bytes)
        for reason in REASONS:  # Create the series of every reason, with value 0.
            self.metrics.append_streams_ended.labels(reason)
        # Ordered, because simulations must be deterministic.
        self.proxied: dict[Any, None] = {}
        self.append_streams: dict[EndingStream, None] = {}
        self.frames: FramePort | None = None
        """The port of the frame transport; None while the transport is not served."""
        self.is_stopping = False
        self.disk = disk
        self.background = Background()
        self.specs = SpecLookup(keyspace, self.member)
        self.store_watch = StoreWatch(settings, clock, stores, self.metrics, self.background.spawn)
        base = residence.base if residence is not None else 0
        saved = SavedRecords(settings.data_dir, disk, synced=lambda journal: self.replicas.syncs_commits(journal))
        self.in_sync = InSyncRecords(
            coordinator,
            keyspace.layout,
            self.member,
            saved=saved,
            base=base,
            guard=[residence.guard] if residence is not None else [],
            known_revision=lambda: self.keyspace.known_revision,
            etcd_id=residence.etcd_id if residence is not None else 0,
            cluster=residence.cluster if residence is not None else "",
        )
        folders = JournalFolders(stores, self.specs.names_below)
        self.copies = PeerCopies(keyspace, self.member, self.peers)
        self.persister = FragmentPersister(
            self.specs.spec_to_store,
            stores,
            clock,
            self.metrics,
            judge=self._judge,
            folders=folders,
            copies=self.copies,
            backlog=self.store_watch.backlog,
            tracer=self.tracer,
        )
        self.retention = Retention(
            stores,
            clock,
            self.metrics,
            is_primary=self.specs.is_primary,
            spec_of=self.specs.present_spec,
            spawn=self.background.spawn,
            per_second=settings.retention_rate,
        )
        self.replicas = ReplicaHost(
            settings,
            clock,
            disk,
            keyspace,
            self.member,
            specs=self.specs,
            folders=folders,
            persister=self.persister,
            backlog=self.store_watch.backlog,
            records=self.in_sync,
            saved=saved,
            retention=self.retention,
            metrics=self.metrics,
            background=self.background,
            base=base,
        )
        self.resolver = self.replicas.resolver
        self.facts = JournalsInEtcd(keyspace, self.member)
        self.appends = AppendHost(
            clock=clock,
            coordinator=coordinator,
            resolver=self.resolver,
            in_sync=self.in_sync,
            peers=self.peers,
            stores=self.store_watch,
            metrics=self.metrics,
            quotas=self.quotas,
            max_append_rate=settings.max_append_rate,
            spawn=self.background.spawn,
            tracer=self.tracer,
        )
        self.replicas.pulse = Pulses(self.appends).pulse
        self.replicas.make_queue = lambda replica: JournalQueue(self.appends, replica)

    def start(self, session: MemberSession) -> None:
        """Serve the journals that are assigned to this broker while `session` lives."""
        self.session = session
        self.replicas.start()

    def member_spec(self, endpoint: str) -> pb.BrokerSpec:
        """Return the spec of this broker for etcd. Raises InvalidInput."""
        process = pb.ProcessSpec(id=process_id(self.member), endpoint=endpoint)
        spec = pb.BrokerSpec(process_spec=process, journal_limit=self.settings.journal_limit)
        validate_broker_spec(spec)
        return spec

    async def exit(self) -> None:
        """Stop, store content that only this broker has, and leave the in-sync records. Then others can continue.

        Stopping, storing and leaving take at most `exit_seconds` each.
        """
        kept = self.resolver.local_replicas
        await self.stop()
        await self.replicas.leave_records(kept)

    async def stop(self) -> None:
        """Stop serving local replicas, and store content that only this broker has. Takes bounded time."""
        self.is_stopping = True
        for stream in self.append_streams:
            stream.announce_end()
        self.replicas.stop()
        for call in list(self.proxied):
            call.cancel()
        await self.replicas.stopped()
        left = await self.persister.close(self.settings.exit_seconds)
        if left:
            _log.warning("fragment.left_in_local_files", fragments=left)
        unfinished = [*self.background.tasks, *self.replicas.stopping]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    async def close(self) -> None:
        """Close the fragment cache and the connections to peers."""
        await self.fragments.close()
        await self.peers.close()

    def unrouted_header(self, state: JournalState) -> pb.Header:
        """Return the header for a response that is not about one journal."""
        return unrouted_header(self.member, state.header)

    def journal_not_found(self) -> bytes:
        """Return the encoded response to an append to a journal that is missing or hidden from the caller."""
        header = self.unrouted_header(self.keyspace.state)
        return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=header).SerializeToString()

    @property
    def values(self) -> dict[str, Callable[[], float]]:
        """The functions that read the gauges of `metrics.WATCHED`, by name."""
        return {
            "journals": lambda: len(self.resolver.local_replicas),
            "journals_held_back": lambda: self.store_watch.backlog.held,
            "fragments_pending": lambda: self.persister.pending,
            "spools_unreadable": lambda: self.replicas.unreadable_spools,
            "fragments_without_copy": lambda: self.persister.damaged,
            "disk_short_of_room": lambda: self.replicas.free_space.is_short,
            "append_bytes_held": lambda: self.receive_budget.held,
            "unpersisted_bytes": lambda: self.replicas.unpersisted.size,
            "unpersisted_age_seconds": lambda: self.replicas.unpersisted.age,
        }

    async def _judge(self, sealed: Sealed) -> Judgement:
        if sealed.settled:
            return Judgement.FINAL
        fragment = sealed.fragment
        return await self.in_sync.judge(fragment.journal, sealed.create_revision, sealed.stamp, fragment.end)
