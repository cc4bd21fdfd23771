"""A broker, put together: what its parts share, and how it starts and ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from coranto.coordination.allocator import AllocatorLoop, may_drain
from coranto.coordination.etcd import Coordinator
from coranto.coordination.keyspace import Item
from coranto.coordination.layout import MemberId
from coranto.coordination.lease import MemberSession
from coranto.effects import Clock, Disk
from coranto.errors import CoordinationError, CorantoError, InvalidInput, StatusError, status_error
from coranto.fragments.stores import StoreRegistry
from coranto.security.call_tokens import CallTokens
from coranto.security.server import keys_of, peer_tls
from coranto.security.tokens import TOKEN_SECONDS, Capability
from coranto.wire import protocol_pb2 as pb
from coranto_broker.append.fsm import AppendFsm
from coranto_broker.append.receiving import Ahead
from coranto_broker.append.states import State
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
from coranto_broker.recovery.in_sync_records import InSyncRecords, Reading, Stranded
from coranto_broker.recovery.orphaned_spools import Leftovers
from coranto_broker.recovery.residence import Residence, spools_of
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.replication.peer_copies import PeerCopies
from coranto_broker.replication.peers import Peers, PeerStream
from coranto_broker.replication.pipeline import LocalStream, Pipeline, ReplicaStream
from coranto_broker.replication.replica import PULSE_SECONDS, PulseFailed, Replica
from coranto_broker.replication.resolver import JournalKeySpace, JournalState, Resolution, Resolver
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder, folder_of
from coranto_broker.spool.in_sync import Judgement

_log = structlog.get_logger(__name__)

RENEW_SECONDS = TOKEN_SECONDS / 3
"""How long a pipeline is used whose streams end with their token, which is good for at least half of TOKEN_SECONDS."""

LEAVING_SECONDS = 5.0
LEAVING_PARALLEL = 32

_QUIET = frozenset(
    {
        pb.JOURNAL_NOT_FOUND,
        pb.NOT_JOURNAL_PRIMARY_BROKER,
        pb.NO_JOURNAL_PRIMARY_BROKER,
        pb.INSUFFICIENT_JOURNAL_BROKERS,
        pb.SUSPENDED,
    }
)
"""Statuses of a pulse that are nothing to worry about, because a change of the Route will follow."""


class Unpersisted(NamedTuple):
    """Content that is in no fragment store: its `size` in bytes, and the `age` of the oldest of it in seconds."""

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
        """The key space has been loaded, and shows this broker's member key. `residence` says that the data directory
        goes with this etcd; without one nobody has asked."""
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
        self.ahead = Ahead(settings.group_append_bytes)
        self.proxied: set[Any] = set()
        self._disk = disk
        self._background: set[asyncio.Task[None]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._base = residence.base if residence is not None else 0
        self._saved = SavedRecords(settings.data_dir, disk, synced=settings.fsync is Fsync.COMMIT)
        self.in_sync = InSyncRecords(
            coordinator,
            keyspace.layout,
            self.member,
            saved=self._saved,
            base=self._base,
            guard=[residence.guard] if residence is not None else [],
            known_revision=lambda: self.keyspace.known_revision,
        )
        self._former: set[tuple[str, int]] = set()
        self._folders = JournalFolders(stores, self._names_below)
        copies = PeerCopies(keyspace, self.member, self.peers)
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
            copies=copies,
            backlog=self.backlog,
        )
        self.resolver = Resolver(keyspace, self.member, self)
        self._used_folders: set[Path] = set()
        self._failed: set[str] = set()  # Journals whose next replica must not trust what it finds.
        self._spools = spools_of(settings.data_dir)
        self._deleted = DeletedSpools(settings.data_dir, disk, clock, settings.deleted_spool_seconds)
        self._leftovers = Leftovers(
            self._spools, disk, clock, self, self.in_sync, self.persister, self._deleted, self._base
        )
        self._health = StoreHealth(stores, clock, self.spawn, self._store_probed, self._store_forgotten)
        self._probed: dict[str, bool] = {}
        self._retention = Retention(
            stores,
            clock,
            self.metrics,
            is_primary=self._is_primary,
            spawn=self.spawn,
            per_second=settings.retention_rate,
        )
        self._allocator = AllocatorLoop(keyspace, coordinator, self.member, clock=clock)
        self._allocation: asyncio.Task[None] | None = None
        self._looking_after: asyncio.Task[None] | None = None

    def start(self, session: MemberSession) -> None:
        """Serve the journals that are assigned to us, and take part in assigning, for as long as `session` lives."""
        self.session = session
        self.resolver.start()
        self._allocation = self.spawn(self._allocate())
        self._looking_after = self.spawn(self._leftovers.run())
        self.spawn(self._keep_saved_records())
        if self.settings.fsync is Fsync.INTERVAL:
            self.spawn(self._keep_flushed())

    async def exit_gracefully(self, session: MemberSession) -> None:
        """Hand over what others can take, then store what is only here, so that others can go on where it ends.

        The first two take `exit_seconds` each at most, the last LEAVING_SECONDS.
        """
        spec = pb.BrokerSpec()
        state = self.keyspace.state
        member = state.member(self.member)
        if member is not None and may_drain(state, self.member):
            spec.CopyFrom(member.spec)
            spec.exiting = True
            try:
                await session.update(spec.SerializeToString(deterministic=True))
                # Ends also when the others exit too, as when a whole cluster is stopped: nobody is left to take over.
                await self.keyspace.wait_until(
                    lambda now: not now.by_member.get(self.member) or not may_drain(now, self.member),
                    timeout=self.settings.exit_seconds,
                )
            except TimeoutError:
                _log.warning("journals were not taken over in time", journals=len(self.resolver.local_replicas))
            except CorantoError as error:
                _log.warning("journals could not be handed over", error=str(error))
        kept = self.resolver.local_replicas
        await self.stop()
        await self._leave_records(kept)

    async def _leave_records(self, replicas: Sequence[Replica]) -> None:
        """Let others go on with journals that nobody has taken over, and of which everything is stored."""

        async def leave(replica: Replica) -> None:
            stored = replica.stored
            if stored is None:
                return
            async with parallel:
                journal, revision = replica.journal, replica.folder.create_revision
                try:
                    record = await self.in_sync.leave(journal, revision, stored.stamp, stored.end, stored.registers)
                except CorantoError as error:
                    _log.warning("in-sync record could not be left", journal=journal, error=str(error))
                    return
                if record is not None and record.closed:
                    _log.info("closed a journal's in-sync record", journal=journal, end=stored.end)
                elif record is not None:
                    others = list(record.members)
                    _log.info("left a journal's in-sync record", journal=journal, end=stored.end, others=others)

        parallel = asyncio.Semaphore(LEAVING_PARALLEL)
        try:
            async with asyncio.timeout(LEAVING_SECONDS):
                await asyncio.gather(*(leave(replica) for replica in replicas))
        except TimeoutError:
            _log.warning("in-sync records could not be left in time; journals may wait for this broker's return")

    async def stop(self) -> None:
        """Stop serving local replicas, and store what is only here, in bounded time."""
        if self._looking_after is not None:
            self._looking_after.cancel()  # What replicas leave now is not to be taken up before the next start.
        self.resolver.stop()
        for call in list(self.proxied):
            call.cancel()
        if self._stopping:
            await asyncio.wait(set(self._stopping), timeout=self.settings.exit_seconds)
        left = await self.persister.close(self.settings.exit_seconds)
        if left:
            _log.warning("fragments remain in local files; the next start stores them", fragments=left)
        for task in [*self._background, *self._stopping]:
            task.cancel()
        await asyncio.gather(*self._background, *self._stopping, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections to peers."""
        await self.fragments.close()
        await self.peers.close()

    def unrouted_header(self, state: JournalState) -> pb.Header:
        """A header of a response that is not about one journal."""
        return pb.Header(
            process_id=pb.ProcessSpec.ID(zone=self.member.zone, suffix=self.member.suffix),
            route=pb.Route(primary=-1),
            etcd=state.header.to_wire(),
        )

    # -- For the append state machine ----------------------------------------------------------------------------------

    async def verify(self, resolution: Resolution, spool: DurableSpool) -> Reading:
        """The in-sync record, if our spool may take part in a pipeline; else raises Stranded, and takes it up anew."""
        replica = resolution.require_replica
        try:
            reading = await self.in_sync.verify(replica.journal, replica.folder.create_revision, spool.stamp, spool.end)
        except Stranded:
            replica.stranded = True
            self.resolver.restart(replica)
            raise
        if reading.record is not None:
            replica.index.note_head(reading.record.floor)
        return reading

    def build_pipeline(self, resolution: Resolution, spool: DurableSpool, reading: Reading | None = None) -> Pipeline:
        route = resolution.header.route
        metadata = self.peers.metadata(Capability.REPLICATE, resolution.spec.name)
        streams: list[ReplicaStream] = []
        for index, member in enumerate(route.members):
            if index == route.primary:
                streams.append(LocalStream(spool))
            else:
                streams.append(PeerStream(self.peers.stub_at(route.endpoints[index]), member, metadata))
        names = [f"{member.zone}#{member.suffix}" for member in route.members]
        renew_at = self.clock.monotonic() + RENEW_SECONDS if metadata is not None else math.inf
        return Pipeline(resolution.header, spool, streams, names, renew_at, reading)

    def grouped(self, appends: int) -> None:
        self.metrics.group_appends.observe(appends)

    @property
    def limits_rates(self) -> bool:
        return self.settings.max_append_rate > 0

    def is_healthy(self, journal: str, url: str) -> bool:
        return self._health.is_healthy(url) and not self.backlog.problem(journal, url)

    async def store_problem(self, journal: str, url: str, until: Signal | None) -> str:
        return await self._health.problem(url, until) or await self.backlog.room(journal, url, until)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work until the broker stops."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work failed", work=task.get_name(), exc_info=error)

    # -- For the resolver ----------------------------------------------------------------------------------------------

    def start_replica(self, item: Item[pb.JournalSpec], *, primary: bool) -> Replica:
        _log.info("starting replica", journal=item.id, primary=primary, create_revision=item.create_revision)
        replica = Replica(
            SpoolFolder(
                folder_of(self._spools, item.id, item.create_revision),
                item.id,
                item.create_revision,
                self._disk,
                self.clock,
                self._base,
            ),
            fsync=self.settings.fsync,
            spec=self._spec_reader(item.id, item.create_revision),
            folders=self._folders,
            persister=self.persister,
            records=self.in_sync,
            pulse=self._pulse,
            distrusted=item.id in self._failed,
            on_failure=self._spool_failed,
            on_listed=self._retention.listed if self.settings.retention else lambda *_: None,
            set_aside=lambda folder: self._deleted.take(folder.path, folder.journal, folder.create_revision),
        )
        self._failed.discard(item.id)
        self._used_folders.add(replica.folder.path)
        self._leftovers.release(replica.folder.path)
        replica.start(after=self._stopping_of(item.id))
        return replica

    def _spool_failed(self, replica: Replica) -> None:
        """The disk failed to keep what a replica has. Its successor looks at what is there."""
        self.metrics.disk_failures.inc()
        self._failed.add(replica.journal)
        self.resolver.restart(replica)

    def stop_replica(self, replica: Replica, *, drop: bool) -> None:
        _log.info("stopping replica", journal=replica.journal, drop=drop)
        self.exclusively(replica.journal, lambda: self._stop(replica, drop))

    async def _stop(self, replica: Replica, drop: bool) -> None:
        await replica.stop(drop=drop)
        if drop:
            try:
                await self.in_sync.remove(replica.journal, replica.folder.create_revision, former=True)
            except CorantoError as error:
                _log.info("in-sync record of a deleted journal stays", journal=replica.journal, error=str(error))
        folder = replica.folder.path
        if all(other.folder.path != folder for other in self.resolver.local_replicas):
            self._used_folders.discard(folder)
            self._leftovers.add(folder)

    def _stopping_of(self, journal: str) -> list[asyncio.Task[None]]:
        """Work on a journal's files, such as replicas that are still stopping: the next one must not touch them yet."""
        return [task for task in self._stopping if task.get_name() == f"stop {journal}"]

    def _stopped(self, task: asyncio.Task[None]) -> None:
        self._stopping.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("replica did not stop cleanly", task=task.get_name(), exc_info=error)

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
        self._stopping.add(task)
        task.add_done_callback(self._stopped)
        return task

    @property
    def values(self) -> dict[str, Callable[[], float]]:
        """What `metrics.WATCHED` names."""
        return {
            "journals": lambda: len(self.resolver.local_replicas),
            "journals_held_back": lambda: self.backlog.held,
            "fragments_pending": lambda: self.persister.pending,
            "spools_unreadable": lambda: self.unreadable_spools,
            "fragments_without_copy": lambda: self.persister.damaged,
            "unpersisted_bytes": lambda: self.unpersisted.size,
            "unpersisted_age_seconds": lambda: self.unpersisted.age,
        }

    # -- Fragment stores -----------------------------------------------------------------------------------------------

    @property
    def unpersisted(self) -> Unpersisted:
        """What of the journals that have a store is in none yet, and this broker's to store."""
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
        """A store that takes probes and refuses fragments does not work."""
        if url in self._probed:
            self.metrics.store_probed(url, self._probed[url] and not self.backlog.refused_by(url))

    # -- In the background ---------------------------------------------------------------------------------------------

    async def _allocate(self) -> None:
        try:
            await self._allocator.run()
        except CoordinationError as error:
            _log.warning("this broker takes no part in assigning any more", error=str(error))

    async def allocation_ended(self) -> None:
        """Return when this broker, started, no longer takes part in assigning. It should not go on then: as the leader
        it would keep everybody else from it."""
        if self._allocation is not None:
            await asyncio.wait([self._allocation])

    @property
    def seen(self) -> tuple[int, tuple[str, ...]]:
        """The latest revision of etcd that is known here, and the brokers that there are."""
        members = tuple(str(member.id) for member in self.keyspace.state.members)
        return self.keyspace.known_revision, members

    @property
    def unreadable_spools(self) -> int:
        """Spools that the disk refuses to read. They are tried again."""
        return len(self._leftovers.unreadable) + sum(each.unreadable for each in self.resolver.local_replicas)

    async def _keep_saved_records(self) -> None:
        """Forget, after a while, in-sync records of journals that do not exist any more."""
        while True:
            await self.clock.sleep(SWEEP_SECONDS)
            exists = {item.id for item in self.keyspace.state.items}
            try:
                self._saved.sweep(exists, self.clock.now(), self.settings.deleted_spool_seconds)
            except (CorantoError, OSError) as error:
                _log.warning("saved in-sync records could not be looked through", error=str(error))

    async def _keep_flushed(self) -> None:
        while True:
            await self.clock.sleep(self.settings.fsync_interval)
            for replica in self.resolver.local_replicas:
                try:
                    await replica.flush()
                except OSError:
                    continue  # It has told of it, and is taken up anew.

    async def _pulse(self, replica: Replica) -> Signal | None:
        """Append nothing to a journal, as its primary. Returns what tells that its Route has changed since.

        Raises PulseFailed when it should be repeated before long.
        """
        no_resume = pb.AppendRequest.SUSPEND_NO_RESUME
        fsm = AppendFsm(self, pb.AppendRequest(journal=replica.journal, do_not_proxy=True, suspend=no_resume))
        try:
            async with asyncio.timeout(PULSE_SECONDS):
                if await fsm.run():
                    await fsm.prepare_stream()
                    if fsm.client_sent(pb.AppendRequest()):
                        fsm.client_ended()
                    await fsm.finish()
            if fsm.error is not None:
                raise fsm.error
            if fsm.state is State.ERROR and fsm.status not in _QUIET:
                failure: StatusError = status_error(fsm.status, f"pulse of {replica.journal}")
                raise failure
        except (CorantoError, OSError, TimeoutError) as error:
            changed = fsm.resolution.invalidated if fsm.resolution is not None else None
            raise PulseFailed(str(error) or "timeout", changed) from error
        finally:
            fsm.release()
        return fsm.resolution.invalidated if fsm.resolution is not None else None

    async def _judge(self, sealed: Sealed) -> Judgement:
        if sealed.settled:
            return Judgement.FINAL
        fragment = sealed.fragment
        return await self.in_sync.judge(fragment.journal, sealed.create_revision, sealed.stamp, fragment.end)

    def _is_primary(self, journal: str) -> bool:
        """Whether this broker is the journal's primary, as far as it knows."""
        route = self.keyspace.state.route_of(journal, endpoints=False)
        primary = route.members[route.primary] if route.primary >= 0 else None
        return primary == pb.ProcessSpec.ID(zone=self.member.zone, suffix=self.member.suffix)

    def _spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """The spec of a journal with that create revision; None when it was deleted.

        Raises InvalidInput when the journal exists and its spec cannot be read.
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
        """The names of the journals that exist and nest below this one's, whether or not their specs can be read."""
        state = self.keyspace.state
        items = state.layout.items
        below = state.entries.prefixed(f"{state.layout.item_key(journal)}/")
        return [entry.kv.key.removeprefix(items) for entry in below]

    def _spec_to_store(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """As `_spec_of`, but also of the journal that has taken the place of one whose fragments are its own."""
        spec = self._spec_of(journal, create_revision)
        if spec is None and (journal, create_revision) in self._former:
            successor = self.successor_of(journal)
            return successor[0] if successor is not None else None
        return spec

    def _spec_reader(self, journal: str, create_revision: int) -> Callable[[], pb.JournalSpec | None]:
        return lambda: self._spec_of(journal, create_revision)
