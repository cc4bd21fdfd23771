"""The host of a broker's replicas, which starts and stops them and maintains their spools.

The number of concurrent starts and stops is limited: thousands would delay the renewal of the lease.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from coranto.coordination.keyspace_state import Item
from coranto.coordination.layout import MemberId
from coranto.effects import Clock, Disk
from coranto.errors import CorantoError, InvalidInput
from coranto.specs.durability import fsync_of
from coranto.wire import protocol_pb2 as pb
from coranto_broker.background import Background
from coranto_broker.fragments.backlog import Backlog
from coranto_broker.fragments.journal_folders import JournalFolders
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.fragments.retention import Retention
from coranto_broker.metrics import Metrics
from coranto_broker.priority_limiter import PriorityLimiter
from coranto_broker.recovery.deleted_spools import SWEEP_SECONDS, DeletedSpools
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.recovery.orphaned_spools import OrphanedSpools
from coranto_broker.recovery.residence import spools_of
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.replication.replica import Pulse, Replica
from coranto_broker.replication.resolver import JournalKeySpace, Resolver
from coranto_broker.replication.spec_lookup import SpecLookup
from coranto_broker.settings import BrokerSettings
from coranto_broker.spool.durable_spool import Fsync, SpoolFolder, folder_of
from coranto_broker.spool.free_space import FreeSpace

REPORT_SECONDS = 5.0
"""The interval of log lines about replicas that wait to be started."""

LEAVING_PARALLEL = 32
"""The maximum number of concurrent updates of in-sync records by an exiting broker."""

_log = structlog.get_logger(__name__)


class Unpersisted(NamedTuple):
    """Unstored content: its `size` in bytes, and the `age` of its oldest part in seconds."""

    size: int
    age: float


class ReplicaHost:
    """The replicas of one broker. Set `pulse` and `make_queue` before `start`."""

    pulse: Pulse
    """Makes an empty append to a replica's journal."""
    make_queue: Callable[[Replica], object]
    """Creates the queue of a replica's appends."""

    def __init__(
        self,
        settings: BrokerSettings,
        clock: Clock,
        disk: Disk,
        keyspace: JournalKeySpace,
        member: MemberId,
        *,
        specs: SpecLookup,
        folders: JournalFolders,
        persister: FragmentPersister,
        backlog: Backlog,
        records: InSyncRecords,
        saved: SavedRecords,
        retention: Retention,
        metrics: Metrics,
        background: Background,
        base: int,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._disk = disk
        self._keyspace = keyspace
        self._specs = specs
        self._folders = folders
        self._persister = persister
        self._backlog = backlog
        self._records = records
        self._saved = saved
        self._retention = retention
        self._metrics = metrics
        self._background = background
        self._base = base
        self.spec_of, self.successor_of = specs.spec_of, specs.successor_of
        self.adopt, self.route_of = specs.adopt, specs.route_of
        self.free_space = FreeSpace(lambda: disk.free_bytes(settings.data_dir), settings.disk_reserve_bytes, clock)
        self.resolver = Resolver(keyspace, member, self)
        self._stopping: dict[str, list[asyncio.Task[None]]] = {}  # Tasks that use the files of journals, by journal.
        self._starts, self._stops = PriorityLimiter(), PriorityLimiter()
        self._start_reported_at = 0.0
        self._used_folders: set[Path] = set()
        self._flushes = False  # `_keep_flushed` runs.
        self._failed: set[str] = set()  # Journals with failed syncs: the next replica must not trust its folder.
        self._spools = spools_of(settings.data_dir)
        self._deleted = DeletedSpools(settings.data_dir, disk, clock, settings.deleted_spool_seconds)
        self._orphaned_spools = OrphanedSpools(self._spools, disk, clock, self, records, persister, self._deleted, base)
        self._handling_orphans: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the replicas of the journals that are assigned to this broker."""
        self.resolver.start()
        self._handling_orphans = self._background.spawn(self._orphaned_spools.run())
        self._background.spawn(self._keep_saved_records())

    def stop(self) -> None:
        """Begin to stop all replicas."""
        if self._handling_orphans is not None:
            self._handling_orphans.cancel()  # The next start handles folders of replicas that stop now.
        self.resolver.stop()

    async def stopped(self) -> None:
        """Return once all replicas have stopped, or after `exit_seconds`."""
        if self._stopping:
            await asyncio.wait(self.stopping, timeout=self._settings.exit_seconds)

    async def leave_records(self, replicas: Sequence[Replica]) -> None:
        """Allow other brokers to continue journals whose content is completely stored."""

        async def leave(replica: Replica) -> None:
            stored = replica.stored
            if stored is None:
                return
            async with parallel:
                journal, revision = replica.journal, replica.folder.create_revision
                try:
                    record = await self._records.leave(journal, revision, stored.stamp, stored.end, stored.registers)
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
            async with asyncio.timeout(self._settings.exit_seconds):
                await asyncio.gather(*(leave(replica) for replica in replicas))
        except TimeoutError:
            _log.warning("in_sync.leave_timed_out", seconds=self._settings.exit_seconds)

    def start_replica(self, item: Item[pb.JournalSpec], *, primary: bool) -> Replica:
        _log.info("replica.starting", journal=item.id, primary=primary, create_revision=item.create_revision)
        replica = Replica(
            SpoolFolder(
                folder_of(self._spools, item.id, item.create_revision),
                item.id,
                item.create_revision,
                self._disk,
                self._clock,
                self._base,
                self.free_space,
            ),
            fsync=self._fsync_of(item.spec),
            spec=self._specs.reader(item.id, item.create_revision),
            folders=self._folders,
            persister=self._persister,
            records=self._records,
            pulse=self.pulse,
            queue=self.make_queue,
            distrusted=item.id in self._failed,
            on_failure=self._spool_failed,
            on_listed=self._retention.listed if self._settings.retention else lambda *_: None,
            set_aside=lambda folder: self._deleted.take(folder.path, folder.journal, folder.create_revision),
        )
        self._failed.discard(item.id)
        self._used_folders.add(replica.folder.path)
        self._orphaned_spools.release(replica.folder.path)
        self._background.spawn(self._start(replica, self._stopping_of(item.id)))
        return replica

    async def _start(self, replica: Replica, after: Sequence[asyncio.Task[None]]) -> None:
        """Start a replica when a slot is free, unless it must stop before."""
        async with self._starts.slot(replica.journal):
            if not replica.is_stopping:
                replica.start(after)
                await replica.wait_recovery_attempted()  # Retries after a disk failure hold no slot.
        now = self._clock.monotonic()
        if self._starts.waiting and now >= self._start_reported_at + REPORT_SECONDS:
            self._start_reported_at = now
            _log.info("replicas.starting", waiting=self._starts.waiting)

    def spec_changed(self, replica: Replica, spec: pb.JournalSpec) -> None:
        replica.set_fsync(self._fsync_of(spec))

    def _fsync_of(self, spec: pb.JournalSpec) -> Fsync:
        """Return the sync policy of a journal's spool. Starts the periodic flush when a spool first needs it."""
        try:
            fsync = Fsync(fsync_of(spec.labels) or self._settings.fsync)
        except InvalidInput:
            fsync = Fsync.COMMIT  # The label is invalid. Appends are refused with the reason.
        if fsync is Fsync.INTERVAL and not self._flushes:
            self._flushes = True
            self._background.spawn(self._keep_flushed())
        return fsync

    def syncs_commits(self, journal: str) -> bool:
        item = self._keyspace.state.item(journal)
        fsync = self._fsync_of(item.spec) if item is not None else self._settings.fsync
        return fsync is Fsync.COMMIT

    def wanted(self, journal: str) -> None:
        self._stops.prefer(journal)  # A predecessor must stop first.
        self._starts.prefer(journal)

    def _spool_failed(self, replica: Replica) -> None:
        """Replace a replica after a failed sync. The new replica examines the files again."""
        self._metrics.disk_failures.inc()
        self._failed.add(replica.journal)
        self.resolver.restart(replica)

    def stop_replica(self, replica: Replica, *, drop: bool) -> None:
        replica.retire()
        self.exclusively(replica.journal, lambda: self._stop(replica, drop))

    async def _stop(self, replica: Replica, drop: bool) -> None:
        """Stop a replica, within slots of the limiter."""
        entered = False

        @asynccontextmanager
        async def slot() -> AsyncIterator[None]:
            nonlocal entered
            # Stops that have begun have priority, so that content of stopped replicas is stored early.
            async with self._stops.slot(replica.journal, preferred=entered):
                if not entered:
                    _log.info("replica.stopping", journal=replica.journal, drop=drop)
                entered = True
                yield

        try:
            await replica.stop(drop=drop, slot=slot)
            if drop:
                try:
                    await self._records.remove(replica.journal, replica.folder.create_revision, former=True)
                except CorantoError as error:
                    _log.info("in_sync.removal_failed", journal=replica.journal, error=str(error))
        finally:  # Also after a disk error, because the files may have content that no other broker has.
            folder = replica.folder.path
            successor = self.resolver.replica_of(replica.journal)
            if successor is None or successor.folder.path != folder:
                self._used_folders.discard(folder)
                self._orphaned_spools.add(folder)

    def _stopping_of(self, journal: str) -> list[asyncio.Task[None]]:
        """Return the tasks that use a journal's files. The next replica waits for them."""
        return list(self._stopping.get(journal, ()))

    @property
    def stopping(self) -> list[asyncio.Task[None]]:
        return [task for tasks in self._stopping.values() for task in tasks]

    def _stopped(self, journal: str, task: asyncio.Task[None]) -> None:
        tasks = self._stopping[journal]
        tasks.remove(task)
        if not tasks:
            del self._stopping[journal]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("replica.stop_failed", task=task.get_name(), exc_info=error)

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
    def unpersisted(self) -> Unpersisted:
        """The unstored content of this broker's journals with a fragment store."""
        size, oldest = self._backlog.total, self._persister.oldest
        for replica in self.resolver.local_replicas:
            growing = replica.growing
            if growing is not None and growing.fragment.length and self._specs.is_primary(replica.journal):
                size += growing.fragment.length
                oldest = min(oldest, growing.first_append_time)
        return Unpersisted(size, max(0.0, self._clock.now() - oldest))

    @property
    def unreadable_spools(self) -> int:
        """The number of spools that the disk fails to read. They are retried."""
        return len(self._orphaned_spools.unreadable) + sum(each.unreadable for each in self.resolver.local_replicas)

    async def _keep_saved_records(self) -> None:
        """Remove saved in-sync records some time after the deletion of their journals."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            exists = {item.id for item in self._keyspace.state.items}
            try:
                self._saved.sweep(exists, self._clock.now(), self._settings.deleted_spool_seconds)
            except (CorantoError, OSError) as error:
                _log.warning("in_sync.sweep_failed", error=str(error))

    async def _keep_flushed(self) -> None:
        while True:
            await self._clock.sleep(self._settings.fsync_interval)
            for replica in self.resolver.local_replicas:
                if replica.fsync is not Fsync.INTERVAL:
                    continue
                try:
                    await replica.flush()
                except OSError:
                    continue  # The replica reports the failure and is restarted.
