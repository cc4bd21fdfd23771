"""The broker: assembles its parts, starts them and stops them."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from coranto.coordination.etcd import Coordinator
from coranto.coordination.headers import process_id, unrouted_header
from coranto.coordination.keyspace_state import Item
from coranto.coordination.layout import MemberId
from coranto.coordination.lease import MemberSession
from coranto.effects import Clock, Disk
from coranto.errors import CorantoError, InvalidInput, StatusError, status_error
from coranto.fragments.stores import StoreRegistry
from coranto.member.etcd_budget import EtcdBudget
from coranto.security.call_tokens import CallTokens
from coranto.security.server import keys_of, peer_tls
from coranto.security.tokens import TOKEN_SECONDS, Capability
from coranto.specs.durability import fsync_of
from coranto.specs.validation import validate_broker_spec
from coranto.wire import protocol_pb2 as pb
from coranto.wire.frames_pb2 import FramePort
from coranto_broker.append.queue import JournalQueue, run_buffered
from coranto_broker.append.queued_append import AppendOutcome, BufferedContent, QueuedAppend
from coranto_broker.append.receiving import ReceiveBudget
from coranto_broker.append.states import ProposalPath, State
from coranto_broker.append.stream_bounds import REASONS, AnswerWatch
from coranto_broker.authorization import RULES, Authorizer
from coranto_broker.fragments.backlog import Backlog
from coranto_broker.fragments.cache import FragmentCache
from coranto_broker.fragments.journal_folders import JournalFolders
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.fragments.retention import Retention
from coranto_broker.fragments.store_probe import StoreHealth
from coranto_broker.metrics import Metrics
from coranto_broker.ownership import Signal
from coranto_broker.recovery.deleted_spools import SWEEP_SECONDS, DeletedSpools
from coranto_broker.recovery.in_sync_records import InSyncRecords, StoredRecord, Stranded
from coranto_broker.recovery.orphaned_spools import OrphanedSpools
from coranto_broker.recovery.residence import Residence, spools_of
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.replication.journal_facts import JournalsInEtcd
from coranto_broker.replication.peer_copies import PeerCopies
from coranto_broker.replication.peers import Peers, PeerStream
from coranto_broker.replication.pipeline import LocalStream, Pipeline, ReplicaStream
from coranto_broker.replication.replica import PULSE_SECONDS, PulseFailed, Replica
from coranto_broker.replication.resolver import JournalKeySpace, JournalState, Resolution, Resolver
from coranto_broker.rpc.blocking_reads import BlockingReads
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.disk_room import DiskRoom
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.in_sync import Judgement
from coranto_broker.turns import Turns

_log = structlog.get_logger(__name__)

RENEW_SECONDS = TOKEN_SECONDS / 3
"""The lifetime of a pipeline whose streams end with their token. Tokens are valid for at least TOKEN_SECONDS / 2."""

REPORT_SECONDS = 5.0
"""The time between two reports of how many replicas wait to be started."""

LEAVING_PARALLEL = 32
"""Records that a broker that exits leaves at the same time."""

_QUIET = frozenset(
    {
        pb.JOURNAL_NOT_FOUND,
        pb.NOT_JOURNAL_PRIMARY_BROKER,
        pb.NO_JOURNAL_PRIMARY_BROKER,
        pb.INSUFFICIENT_JOURNAL_BROKERS,
        pb.SUSPENDED,
    }
)
"""Statuses of a pulse that are harmless, because a change of the Route will follow."""


class EndingStream(Protocol):
    """A client's stream that must be told before this broker exits."""

    def announce_end(self) -> None: ...


class Unpersisted(NamedTuple):
    """Content that is in no fragment store: its `size` in bytes, and the `age` of its oldest part in seconds."""

    size: int
    age: float


class Broker:
    """The effects and long-lived parts of one broker process."""

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
        """The key space must be loaded, with this broker's member key.

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
        keys = keys_of(settings)
        self.authorizer = Authorizer(keys, clock, RULES)
        self.peers = peers if peers is not None else Peers(settings.zone, CallTokens(keys, clock), peer_tls(settings))
        self.fragments = fragments or FragmentCache(stores, settings.data_dir / "cache", settings.cache_bytes)
        self.etcd_budget = EtcdBudget(
            coordinator,
            clock,
            self.metrics.etcd_budget,
            caller_bytes=settings.etcd_caller_bytes,
            total_bytes=settings.max_etcd_bytes,
        )
        self.blocking_reads = BlockingReads(settings.max_blocking_reads, self.metrics.reads_refused.inc)
        self.receive_budget = ReceiveBudget(settings.group_append_bytes)
        self.answer_watch = AnswerWatch(self.receive_budget)
        for reason in REASONS:  # A series of each is there from the start, with 0.
            self.metrics.append_streams_ended.labels(reason)
        # In order, so that a simulation can be replayed.
        self.proxied: dict[Any, None] = {}
        self.append_streams: dict[EndingStream, None] = {}
        self.frames: FramePort | None = None
        """The port at which this broker serves frames; None while it does not."""
        self.is_stopping = False
        self.disk = disk
        self.room = DiskRoom(lambda: disk.free_bytes(settings.data_dir), settings.disk_reserve_bytes, clock)
        self._background: set[asyncio.Task[None]] = set()
        self._stopping: dict[str, list[asyncio.Task[None]]] = {}  # What uses the files of journals, by journal.
        self._base = residence.base if residence is not None else 0
        self._saved = SavedRecords(settings.data_dir, disk, synced=self._syncs_commits)
        self.in_sync = InSyncRecords(
            coordinator,
            keyspace.layout,
            self.member,
            saved=self._saved,
            base=self._base,
            guard=[residence.guard] if residence is not None else [],
            known_revision=lambda: self.keyspace.known_revision,
            etcd_id=residence.etcd_id if residence is not None else 0,
            cluster=residence.cluster if residence is not None else "",
        )
        self._former: set[tuple[str, int]] = set()
        self._folders = JournalFolders(stores, self._names_below)
        self.copies = PeerCopies(keyspace, self.member, self.peers)
        self.backlog = Backlog(
            clock,
            journal_bytes=settings.max_unpersisted_journal_bytes,
            broker_bytes=settings.max_unpersisted_bytes,
            on_store=self._store_seen,
        )
        self.persister = FragmentPersister(
            self._spec_to_store,
            stores,
            clock,
            self.metrics,
            judge=self._judge,
            folders=self._folders,
            copies=self.copies,
            backlog=self.backlog,
        )
        self._starts, self._stops, self._pulses = Turns(), Turns(), Turns()
        self._start_reported_at = 0.0
        self.resolver = Resolver(keyspace, self.member, self)
        self.facts = JournalsInEtcd(keyspace, self.member)
        self._used_folders: set[Path] = set()
        self._flushes = False  # `_keep_flushed` runs.
        self._failed: set[str] = set()  # Journals whose next replica must not trust its folder.
        self._spools = spools_of(settings.data_dir)
        self._deleted = DeletedSpools(settings.data_dir, disk, clock, settings.deleted_spool_seconds)
        self._orphaned_spools = OrphanedSpools(
            self._spools, disk, clock, self, self.in_sync, self.persister, self._deleted, self._base
        )
        self._health = StoreHealth(stores, clock, self.spawn, self._store_probed, self._store_forgotten)
        self._probed: dict[str, bool] = {}
        self._retention = Retention(
            stores,
            clock,
            self.metrics,
            is_primary=self._is_primary,
            spec_of=self._present_spec,
            spawn=self.spawn,
            per_second=settings.retention_rate,
        )
        self._looking_after: asyncio.Task[None] | None = None

    def start(self, session: MemberSession) -> None:
        """Serve the journals that are assigned to this broker while `session` lives."""
        self.session = session
        self.resolver.start()
        self._looking_after = self.spawn(self._orphaned_spools.run())
        self.spawn(self._keep_saved_records())

    def member_spec(self, endpoint: str) -> pb.BrokerSpec:
        """Return the spec of this broker for etcd. Raises InvalidInput."""
        process = pb.ProcessSpec(id=process_id(self.member), endpoint=endpoint)
        spec = pb.BrokerSpec(process_spec=process, journal_limit=self.settings.journal_limit)
        validate_broker_spec(spec)
        return spec

    async def exit(self) -> None:
        """Store content that is only here, then leave the in-sync records, so that others go on where journals end.

        Stopping, storing and leaving take at most `exit_seconds` each.
        """
        kept = self.resolver.local_replicas
        await self.stop()
        await self._leave_records(kept)

    async def _leave_records(self, replicas: Sequence[Replica]) -> None:
        """Let others go on with journals that nobody has taken over, if all their content is stored."""

        async def leave(replica: Replica) -> None:
            stored = replica.stored
            if stored is None:
                return
            async with parallel:
                journal, revision = replica.journal, replica.folder.create_revision
                try:
                    record = await self.in_sync.leave(journal, revision, stored.stamp, stored.end, stored.registers)
                except CorantoError as error:
                    _log.warning("in_sync.leave_failed", journal=journal, error=str(error))
                    return
                if record is not None and record.closed:
                    _log.info("in_sync.closed", journal=journal, end=stored.end)
                elif record is not None:
                    others = list(record.members)
                    _log.info("in_sync.left", journal=journal, end=stored.end, others=others)

        parallel = asyncio.Semaphore(LEAVING_PARALLEL)
        try:
            async with asyncio.timeout(self.settings.exit_seconds):
                await asyncio.gather(*(leave(replica) for replica in replicas))
        except TimeoutError:
            _log.warning("in_sync.leave_timed_out", seconds=self.settings.exit_seconds)

    async def stop(self) -> None:
        """Stop serving local replicas, and store content that is only here, in bounded time."""
        self.is_stopping = True
        for stream in self.append_streams:
            stream.announce_end()
        if self._looking_after is not None:
            self._looking_after.cancel()  # Folders that replicas leave from now on wait for the next start.
        self.resolver.stop()
        for call in list(self.proxied):
            call.cancel()
        if self._stopping:
            await asyncio.wait(self._all_stopping, timeout=self.settings.exit_seconds)
        left = await self.persister.close(self.settings.exit_seconds)
        if left:
            _log.warning("fragment.left_in_local_files", fragments=left)
        left_over = [*self._background, *self._all_stopping]
        for task in left_over:
            task.cancel()
        await asyncio.gather(*left_over, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections to peers."""
        await self.fragments.close()
        await self.peers.close()

    def unrouted_header(self, state: JournalState) -> pb.Header:
        """Return the header for a response that is not about one journal."""
        return unrouted_header(self.member, state.header)

    def journal_not_found(self) -> bytes:
        """Return the encoded response to an append to a journal that does not exist, or that its sender may not see."""
        header = self.unrouted_header(self.keyspace.state)
        return pb.AppendResponse(status=pb.JOURNAL_NOT_FOUND, header=header).SerializeToString()

    # -- For appends ------------------------------------------------------------------------------------------

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> StoredRecord:
        """Return the in-sync record if our spool may take part in a pipeline.

        Otherwise, restarts the replica and raises Stranded.
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

    def build_pipeline(
        self, resolution: Resolution, spool: DurableSpool, reading: StoredRecord | None = None
    ) -> Pipeline:
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
        if path is not ProposalPath.STREAMED:
            self.metrics.group_appends.observe(appends)

    def append_ended(self, append: QueuedAppend) -> None:
        """Count an append that is answered, or whose client has left."""
        self.metrics.appends.count(append.state)
        outcome = append.outcome
        if isinstance(outcome, AppendOutcome) and outcome.state is State.FINISHED:
            self.metrics.append_bytes.value += outcome.end - outcome.begin
            self.metrics.append_seconds.observe(self.clock.monotonic() - append.begun)

    def acknowledged_below_demand(self, appends: int) -> None:
        self.metrics.acknowledged_below_demand.inc(appends)

    @property
    def max_append_rate(self) -> int:
        return self.settings.max_append_rate

    def held_back(self, journal: str, url: str) -> str:
        """Return the reason why appends to a journal with this first store are held back; empty if they are not."""
        return self._health.last_problem(url) or self.backlog.problem(journal, url)

    def is_healthy(self, journal: str, url: str) -> bool:
        return self._health.is_healthy(url) and not self.backlog.problem(journal, url)

    async def store_problem(self, journal: str, url: str, until: Signal | None) -> str:
        return await self._health.problem(url, until) or await self.backlog.wait_for_room(journal, url, until)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work until the broker stops."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("broker.background_work_failed", work=task.get_name(), exc_info=error)

    # -- For the resolver ----------------------------------------------------------------------------------------------

    def start_replica(self, item: Item[pb.JournalSpec], *, primary: bool) -> Replica:
        _log.info("replica.starting", journal=item.id, primary=primary, create_revision=item.create_revision)
        replica = Replica(
            SpoolFolder(
                folder_of(self._spools, item.id, item.create_revision),
                item.id,
                item.create_revision,
                self.disk,
                self.clock,
                self._base,
                self.room,
            ),
            fsync=self._fsync_of(item.spec),
            spec=self._spec_reader(item.id, item.create_revision),
            folders=self._folders,
            persister=self.persister,
            records=self.in_sync,
            pulse=self._pulse,
            queue=lambda replica: JournalQueue(self, replica),
            distrusted=item.id in self._failed,
            on_failure=self._spool_failed,
            on_listed=self._retention.listed if self.settings.retention else lambda *_: None,
            set_aside=lambda folder: self._deleted.take(folder.path, folder.journal, folder.create_revision),
        )
        self._failed.discard(item.id)
        self._used_folders.add(replica.folder.path)
        self._orphaned_spools.release(replica.folder.path)
        self.spawn(self._start(replica, self._stopping_of(item.id)))
        return replica

    async def _start(self, replica: Replica, after: Sequence[asyncio.Task[None]]) -> None:
        """Start a replica when its turn has come, unless it is to stop by then."""
        async with self._starts.turn(replica.journal):
            if not replica.is_stopping:
                replica.start(after)
                await replica.attempted()  # It keeps no turn for as long as the disk fails.
        now = self.clock.monotonic()
        if self._starts.waiting and now >= self._start_reported_at + REPORT_SECONDS:
            self._start_reported_at = now
            _log.info("replicas.starting", waiting=self._starts.waiting)

    def spec_changed(self, replica: Replica, spec: pb.JournalSpec) -> None:
        replica.follow(self._fsync_of(spec))

    def _fsync_of(self, spec: pb.JournalSpec) -> Fsync:
        """Return the policy of a journal's spool. Keeps spools flushed from the first one on that is to be."""
        try:
            fsync = Fsync(fsync_of(spec.labels) or self.settings.fsync)
        except InvalidInput:
            fsync = Fsync.COMMIT  # Nobody can say what the label means. Appends are refused with the reason.
        if fsync is Fsync.INTERVAL and not self._flushes:
            self._flushes = True
            self.spawn(self._keep_flushed())
        return fsync

    def _syncs_commits(self, journal: str) -> bool:
        item = self.keyspace.state.item(journal)
        fsync = self._fsync_of(item.spec) if item is not None else self.settings.fsync
        return fsync is Fsync.COMMIT

    def wanted(self, journal: str) -> None:
        self._stops.prefer(journal)  # Of its predecessor, whose files it needs.
        self._starts.prefer(journal)

    def _spool_failed(self, replica: Replica) -> None:
        """Replace a replica whose content the disk failed to keep. The new replica examines the files again."""
        self.metrics.disk_failures.inc()
        self._failed.add(replica.journal)
        self.resolver.restart(replica)

    def stop_replica(self, replica: Replica, *, drop: bool) -> None:
        replica.retire()
        self.exclusively(replica.journal, lambda: self._stop(replica, drop))

    async def _stop(self, replica: Replica, drop: bool) -> None:
        """Stop a replica in its turns: thousands at once would keep the lease from being renewed."""
        entered = False

        @asynccontextmanager
        async def turn() -> AsyncIterator[None]:
            nonlocal entered
            # What has begun goes on before others begin, so that stopped replicas have their content stored meanwhile.
            async with self._stops.turn(replica.journal, preferred=entered):
                if not entered:
                    _log.info("replica.stopping", journal=replica.journal, drop=drop)
                entered = True
                yield

        try:
            await replica.stop(drop=drop, turn=turn)
            if drop:
                try:
                    await self.in_sync.remove(replica.journal, replica.folder.create_revision, former=True)
                except CorantoError as error:
                    _log.info("in_sync.removal_failed", journal=replica.journal, error=str(error))
        finally:  # Also if the disk refuses something: the files may hold what no other broker has.
            folder = replica.folder.path
            successor = self.resolver.replica_of(replica.journal)
            if successor is None or successor.folder.path != folder:
                self._used_folders.discard(folder)
                self._orphaned_spools.add(folder)

    def _stopping_of(self, journal: str) -> list[asyncio.Task[None]]:
        """Return tasks that use a journal's files, such as stopping replicas. The next replica must wait for them."""
        return list(self._stopping.get(journal, ()))

    @property
    def _all_stopping(self) -> list[asyncio.Task[None]]:
        return [task for tasks in self._stopping.values() for task in tasks]

    def _stopped(self, journal: str, task: asyncio.Task[None]) -> None:
        tasks = self._stopping[journal]
        tasks.remove(task)
        if not tasks:
            del self._stopping[journal]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("replica.stop_failed", task=task.get_name(), exc_info=error)

    # -- For the leftovers ---------------------------------------------------------------------------------------------

    def spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        return self._spec_of(journal, create_revision)

    def successor_of(self, journal: str) -> tuple[pb.JournalSpec, int] | None:
        state = self.keyspace.state
        entry = state.entries.get(state.layout.item_key(journal))
        if entry is None:
            return None
        spec = self._spec_of(journal, entry.kv.create_revision)
        return (spec, entry.kv.create_revision) if spec is not None else None

    def adopt(self, journal: str, create_revision: int) -> None:
        self._former.add((journal, create_revision))

    def route_of(self, journal: str) -> list[str]:
        return [f"{member.zone}#{member.suffix}" for member in self.keyspace.state.route_of(journal).members]

    def is_used(self, folder: Path) -> bool:
        return folder in self._used_folders

    def exclusively(self, journal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        async def in_turn() -> None:
            if before:
                await asyncio.wait(before)
            await work()

        before = self._stopping_of(journal)
        task = asyncio.create_task(in_turn(), name=f"stop {journal}")
        self._stopping.setdefault(journal, []).append(task)
        task.add_done_callback(functools.partial(self._stopped, journal))
        return task

    @property
    def values(self) -> dict[str, Callable[[], float]]:
        """The functions that read the values of `metrics.WATCHED`, by name."""
        return {
            "journals": lambda: len(self.resolver.local_replicas),
            "journals_held_back": lambda: self.backlog.held,
            "fragments_pending": lambda: self.persister.pending,
            "spools_unreadable": lambda: self.unreadable_spools,
            "fragments_without_copy": lambda: self.persister.damaged,
            "disk_short_of_room": lambda: self.room.is_short,
            "append_bytes_held": lambda: self.receive_budget.held,
            "unpersisted_bytes": lambda: self.unpersisted.size,
            "unpersisted_age_seconds": lambda: self.unpersisted.age,
        }

    # -- Fragment stores -----------------------------------------------------------------------------------------------

    @property
    def unpersisted(self) -> Unpersisted:
        """Content that this broker must store and has not stored yet, of journals that have a fragment store."""
        size, oldest = self.backlog.total, self.persister.oldest
        for replica in self.resolver.local_replicas:
            growing = replica.growing
            if growing is not None and growing.fragment.length and self._is_primary(replica.journal):
                size += growing.fragment.length
                oldest = min(oldest, growing.first_append_time)
        return Unpersisted(size, max(0.0, self.clock.now() - oldest))

    def _store_probed(self, url: str, healthy: bool) -> None:
        self._probed[url] = healthy
        self._store_seen(url)

    def _store_forgotten(self, url: str) -> None:
        del self._probed[url]
        self.metrics.store_forgotten(url)

    def _store_seen(self, url: str) -> None:
        """Report a store's health. A store that accepts probes but refuses fragments counts as unhealthy."""
        if url in self._probed:
            self.metrics.store_probed(url, self._probed[url] and not self.backlog.refused_by(url))

    # -- In the background ---------------------------------------------------------------------------------------------

    @property
    def unreadable_spools(self) -> int:
        """The number of spools that the disk refuses to read. They are tried again."""
        return len(self._orphaned_spools.unreadable) + sum(each.unreadable for each in self.resolver.local_replicas)

    async def _keep_saved_records(self) -> None:
        """Remove saved in-sync records a while after their journals have gone."""
        while True:
            await self.clock.sleep(SWEEP_SECONDS)
            exists = {item.id for item in self.keyspace.state.items}
            try:
                self._saved.sweep(exists, self.clock.now(), self.settings.deleted_spool_seconds)
            except (CorantoError, OSError) as error:
                _log.warning("in_sync.sweep_failed", error=str(error))

    async def _keep_flushed(self) -> None:
        while True:
            await self.clock.sleep(self.settings.fsync_interval)
            for replica in self.resolver.local_replicas:
                if replica.fsync is not Fsync.INTERVAL:
                    continue
                try:
                    await replica.flush()
                except OSError:
                    continue  # The replica has reported the failure and is restarted.

    async def _pulse(self, replica: Replica) -> Signal | None:
        """Make an empty append to a journal as its primary. Return a signal that fires once its Route changes.

        Raises PulseFailed if the pulse should be repeated soon.
        """
        no_resume = pb.AppendRequest.SUSPEND_NO_RESUME
        request = pb.AppendRequest(journal=replica.journal, do_not_proxy=True, suspend=no_resume)
        append = QueuedAppend(request, content=BufferedContent(b"", 0))
        append.is_pulse = True
        try:
            async with self._pulses.turn(replica.journal), asyncio.timeout(PULSE_SECONDS):
                outcome = await run_buffered(self, append)
            replica.answer = outcome.status, self.clock.now()
            if outcome.status not in (pb.OK, *_QUIET):
                failure: StatusError = status_error(outcome.status, f"pulse of {replica.journal}")
                raise failure
        except (CorantoError, OSError, TimeoutError) as error:
            changed = append.resolution.invalidated if append.resolution is not None else None
            raise PulseFailed(str(error) or "timeout", changed) from error
        return outcome.resolution.invalidated

    async def _judge(self, sealed: Sealed) -> Judgement:
        if sealed.settled:
            return Judgement.FINAL
        fragment = sealed.fragment
        return await self.in_sync.judge(fragment.journal, sealed.create_revision, sealed.stamp, fragment.end)

    def _present_spec(self, journal: str) -> pb.JournalSpec | None:
        item = self.keyspace.state.item(journal)
        return item.spec if item is not None else None

    def _is_primary(self, journal: str) -> bool:
        """Return True if this broker is the journal's primary, as far as it knows."""
        route = self.keyspace.state.route_of(journal, endpoints=False)
        primary = route.members[route.primary] if route.primary >= 0 else None
        return primary == process_id(self.member)

    def _spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """Return the spec of a journal with that create revision; None if it was deleted.

        Raises InvalidInput if the journal exists but its spec cannot be read.
        """
        state = self.keyspace.state
        entry = state.entries.get(state.layout.item_key(journal))
        if entry is None or entry.kv.create_revision != create_revision:
            return None
        item = state.item(journal)
        if item is None:
            raise InvalidInput(f"the spec of {journal} in etcd cannot be read; apply a valid one", field=journal)
        return item.spec

    def _names_below(self, journal: str) -> list[str]:
        """Return the names of existing journals that nest below this one's, even if their specs cannot be read."""
        state = self.keyspace.state
        items = state.layout.items
        below = state.entries.prefixed(f"{state.layout.item_key(journal)}/")
        return [entry.kv.key.removeprefix(items) for entry in below]

    def _spec_to_store(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """Return the spec of a journal, or of its successor if the successor owns the fragments of this journal."""
        spec = self._spec_of(journal, create_revision)
        if spec is None and (journal, create_revision) in self._former:
            successor = self.successor_of(journal)
            return successor[0] if successor is not None else None
        return spec

    def _spec_reader(self, journal: str, create_revision: int) -> Callable[[], pb.JournalSpec | None]:
        return lambda: self._spec_of(journal, create_revision)
