"""A replica: this broker's part of one journal.

A replica has the journal's spool and pipeline, each in a slot that serves one owner at a time, the fragment index, and
the balances of flow control. It lists the journal's stores periodically. As primary it also *pulses* the journal: it
makes an empty append at each change of the Route and once a minute. A pulse synchronizes the replicas and records in
etcd that they are consistent, even without appends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from coranto.effects import Clock
from coranto.errors import CorantoError, StoreError
from coranto.fragments.forks import fork_of
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.index import FragmentIndex
from coranto_broker.fragments.journal_folders import JournalFolders
from coranto_broker.ownership import Invalidated, Signal, Slot
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.recovery.spool_recovery import recover_spool
from coranto_broker.replication.flow_control import FlowControl
from coranto_broker.replication.pipeline import Pipeline
from coranto_broker.spool.durable_spool import DurableSpool, Fsync, Sealed, SpoolFolder
from coranto_broker.spool.in_sync import Stamp
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import CommittedState, empty_at

PULSE_SECONDS = 60.0
FAILURE_SECONDS = 0.25
"""The pause after the first failure. It doubles with each further failure."""
DISK_SECONDS = 30.0
"""The maximum pause between attempts to recover a spool from a failing disk."""
DEFAULT_REFRESH_SECONDS = 300.0
REFRESH_AFTER_STORING_SECONDS = 2.0
REFRESH_FOR_GAP_SECONDS = 0.5
"""The minimum time between listings while a reader waits at a gap.

It doubles with each further listing for such a reader, up to `LONGEST_REFRESH_FOR_GAP_SECONDS`.
"""
LONGEST_REFRESH_FOR_GAP_SECONDS = 10.0
LISTING_ATTEMPTS = 5
"""The number of failed attempts at the first listing after which waiting callers get an error."""
_log = structlog.get_logger(__name__)


class Persister(Protocol):
    """Stores completed fragments."""

    def add(
        self,
        sealed: Sealed,
        on_stored: Callable[[Sealed, Fragment], None],
        *,
        primary: bool,
        on_diverged: Callable[[Sealed], None],
    ) -> None: ...

    async def release(self, journal: str, create_revision: int) -> None: ...

    def wake(self, journal: str) -> None: ...


@dataclass(frozen=True, slots=True)
class FinalSpoolState:
    """The final state of a stopped replica's spool."""

    end: int
    registers: pb.LabelSet
    stamp: Stamp


class PulseFailed(Exception):
    """A pulse failed. `changed` fires when its Route is outdated."""

    def __init__(self, reason: str, changed: Signal | None) -> None:
        super().__init__(reason)
        self.changed = changed


Pulse = Callable[["Replica"], Awaitable[Signal | None]]


class Replica:
    """One journal's replica. Call `start` once and `stop` once."""

    def __init__(
        self,
        folder: SpoolFolder,
        *,
        fsync: Fsync,
        spec: Callable[[], pb.JournalSpec | None],
        folders: JournalFolders,
        persister: Persister,
        records: InSyncRecords,
        pulse: Pulse,
        queue: Callable[[Replica], object] = lambda _: None,
        distrusted: bool = False,
        on_failure: Callable[[Replica], None] = lambda _: None,
        on_listed: Callable[[pb.JournalSpec, Sequence[Fragment], FragmentIndex], None] = lambda *_: None,
        set_aside: Callable[[SpoolFolder], None] = lambda folder: folder.disk.remove_tree(folder.path),
    ) -> None:
        """`spec` returns the journal's current spec.

        `pulse` makes an empty append and returns a signal that fires when the Route has changed. It raises PulseFailed
        if it should be repeated soon. `queue` creates the queue of appends. `distrusted` means that an earlier sync of
        the folder failed. `on_failure` is called when a sync fails: another replica must replace this one. `on_listed`
        is called with each listing of the stores, after the index has it. `set_aside` disposes of the folder of a
        deleted journal.
        """
        self.folder = folder
        self.journal = folder.journal
        self.index = FragmentIndex(folder.clock, on_gap=self._gap)
        self.spool: Slot[DurableSpool] = Slot()
        self.pipeline: Slot[Pipeline | None] = Slot()
        self.queue = queue(self)
        """The journal's appends (`coranto_broker.append.queue`)."""
        self.flow_control = FlowControl()
        self.stopped = asyncio.Event()
        self.stranded = False
        """True if other replicas continued without content of this spool, which must not be used."""
        self.journal_id = ""
        """The journal's id; empty until the in-sync record was read, or if the cluster is unknown."""
        self.failed = False
        """True if the disk failed to keep content of the spool, which must not be used."""
        self._distrusted = distrusted
        self._on_failure = on_failure
        self._clock: Clock = folder.clock
        self._fsync = fsync
        self._spec = spec
        self._folders = folders
        self._persister = persister
        self._records = records
        self._pulse = pulse
        self._on_listed = on_listed
        self._set_aside = set_aside
        self.demand_unmet = ""
        """The reason why acknowledgements cannot meet the demand of the journal's labels, or an empty string."""
        self.refusal = ""
        """The reason for refusing content because of the demand, or an empty string."""
        self.recorded = False
        """True if the in-sync record named this replica when it last prepared an append as primary: it then holds all
        acknowledged content."""
        self.acknowledged_below_demand = 0
        """The number of appends that were acknowledged below the demand."""
        self._forced_end = 0  # Completed fragments up to this offset were synced to disk.
        self.last_pulse: tuple[pb.Status.ValueType, float] = pb.OK, 0.0
        """The status and time of the last pulse (Unix seconds; 0 without a pulse)."""
        self.unreadable = False
        """True if the last attempt to read the spool from the disk failed."""
        self._attempted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._refresh_at = 0.0  # Monotonic time of the next listing of the stores.
        self._refreshed_at = 0.0
        self._refresh_sooner = asyncio.Event()
        self._gap_met = False  # A reader met a gap since the last listing.
        self._gap_seconds = REFRESH_FOR_GAP_SECONDS
        self._unlistable = asyncio.Event()
        self._listing_problem = ""
        self._recovering: asyncio.Task[None] | None = None
        self._daemons: list[asyncio.Task[None]] = []
        self._spool: DurableSpool | None = None
        self._final_state: FinalSpoolState | None = None

    @property
    def stored(self) -> FinalSpoolState | None:
        """The final state of the spool if it is stopped and all its content is in fragment stores; else None."""
        if not self.stopped.is_set() or self.index.sealed_files():
            return None
        return self._final_state

    @property
    def committed(self) -> CommittedState | None:
        """The committed state of the spool; None until it is recovered."""
        return self._spool.committed if self._spool is not None else None

    @property
    def growing(self) -> CommittedState | None:
        """The fragment under construction; None if the journal has no fragment store or the spool is not recovered."""
        return self._spool.committed if self._spool is not None and self._has_stores() else None

    @property
    def is_stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def start(self, after: Sequence[asyncio.Task[None]] = ()) -> None:
        """Start listing and pulsing, and recover the spool when the tasks `after`, which use its files, are done."""
        self.pipeline.put(None)
        self._recovering = asyncio.create_task(self._recover(after), name=f"recover {self.journal}")
        self._daemons = [
            asyncio.create_task(self._keep_refreshed(), name=f"refresh {self.journal}"),
            asyncio.create_task(self._keep_pulsing(), name=f"pulse {self.journal}"),
        ]

    async def wait_recovery_attempted(self) -> None:
        """Wait until the first attempt to recover the spool has ended. Call `start` first.

        If it failed, further attempts follow.
        """
        await self._attempted.wait()

    def retire(self) -> None:
        """Start no more work in the background, because `stop` follows."""
        self._stopping.set()

    async def stop(self, *, drop: bool, slot: Callable[[], AbstractAsyncContextManager[None]] = nullcontext) -> None:
        """Stop: complete the fragment for the persister or, with `drop`, set all local content aside.

        Waits for the owners of the pipeline and of the spool. Resolutions to this replica must be invalidated before.
        `slot` limits concurrent work. It is entered before and after these waits, but not during them.
        """
        self.retire()
        try:
            async with slot():
                for daemon in self._daemons:
                    daemon.cancel()
                await asyncio.gather(*self._daemons, return_exceptions=True)
            if self._recovering is not None:
                await self._recovering
            if self._spool is not None:
                spool = await self._take_spool()
                async with slot():
                    await self._stop_spool(spool, drop)
        finally:
            self.index.close()
            self.index.drop_stored()
            self.stopped.set()

    @property
    def fsync(self) -> Fsync:
        """The sync policy of its spool."""
        return self._fsync

    def set_fsync(self, fsync: Fsync) -> None:
        """Adopt the journal's current sync policy."""
        self._fsync = fsync
        if self._spool is not None and self._spool.fsync is not fsync:
            self._spool.set_fsync(fsync)

    @property
    def held_from(self) -> int:
        """The begin of the contiguous local content that ends at the spool's end. The spool must be recovered."""
        assert self._spool is not None
        return self.index.held_from(self._spool.fragment.begin)[0]

    async def force(self) -> int:
        """Sync all local content to disk, completed fragments included. Returns `held_from`. Raises OSError."""
        assert self._spool is not None
        spool, begin = self._spool, self._spool.fragment.begin
        held_from, held = self.index.held_from(begin)
        due = [each for each in held if each.fragment.end > self._forced_end]
        await spool.force(*(file for each in due for file in (each.content, each.log)))
        self._forced_end = max(self._forced_end, begin)
        return held_from

    async def flush(self) -> None:
        """Sync all committed content to disk. Raises OSError."""
        if self._spool is not None and not self.failed:
            await self._spool.flush()

    async def wait_refreshed(self, until: Signal | None = None) -> None:
        """Wait for the first listing of the stores.

        Raises Invalidated if `until` fires first, and StoreError with the store's message after several failed
        attempts, because the failure may last until an operator repairs the store. Cancelling the wait changes nothing.
        """
        refreshed = asyncio.ensure_future(self.index.wait_refreshed())
        failed = asyncio.ensure_future(self._unlistable.wait())
        given_up = asyncio.ensure_future((until or Signal()).wait())
        try:
            await asyncio.wait((refreshed, failed, given_up), return_when=asyncio.FIRST_COMPLETED)
            if refreshed.done():
                refreshed.result()
            elif given_up.done():
                raise Invalidated
            else:
                raise StoreError(self._listing_problem)
        finally:
            for task in (refreshed, failed, given_up):
                task.cancel()
            await asyncio.gather(refreshed, failed, given_up, return_exceptions=True)

    # -- Events of the spool -------------------------------------------------------------------------------------------

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        self.index.spool_commit(fragment, content)

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.index.spool_complete(sealed)
        self._persister.add(sealed, self._stored, primary=primary, on_diverged=self.index.forget)

    def spool_skip(self, offset: int) -> None:
        self.index.note_head(offset)

    def spool_ahead(self, end: int) -> None:
        self.index.spool_ahead(end)

    def spool_readable(self, end: int) -> None:
        self.index.spool_readable(end)

    def promoted(self) -> None:
        """Let the persister store local content soon, because this broker has become the journal's primary."""
        self._persister.wake(self.journal)

    def _stored(self, sealed: Sealed, fragment: Fragment) -> None:
        self.index.stored(sealed, fragment)
        if self.stopped.is_set():
            self.index.drop_stored()
        else:
            self._refresh_by(self._clock.monotonic() + REFRESH_AFTER_STORING_SECONDS)  # To free its file.

    def _gap(self) -> None:
        """List the stores sooner, because a reader waits for content that another broker may have stored.

        A broker that is no longer assigned may store its last content after its successor has listed the stores.
        """
        self._gap_met = True
        self._refresh_by(self._refreshed_at + self._gap_seconds)

    def _refresh_by(self, at: float) -> None:
        if at < self._refresh_at:
            self._refresh_at = at
            self._refresh_sooner.set()

    # -- Background tasks ----------------------------------------------------------------------------------------------

    async def _recover(self, after: Sequence[asyncio.Task[None]]) -> None:
        try:
            await self._keep_recovering(after)
        finally:
            self._attempted.set()

    async def _keep_recovering(self, after: Sequence[asyncio.Task[None]]) -> None:
        if after:
            await asyncio.wait(after)
        await self._persister.release(self.journal, self.folder.create_revision)
        failures = 0
        while self._spool is None:
            try:
                await self._recover_spool()
            except (OSError, CorantoError) as error:
                self.unreadable = True
                _log.error(  # Without a traceback.
                    "spool.unreadable",
                    journal=self.journal,
                    folder=str(self.folder.path),
                    error=str(error) or type(error).__name__,
                )
                self._distrusted = self._distrusted or (isinstance(error, OSError) and error.errno == errno.EIO)
                self.spool.refuse(f"this broker's disk fails, so that it cannot serve {self.journal} now: {error}")
                self._attempted.set()
                if await self._stops_within(min(DISK_SECONDS, 0.25 * 2 ** min(failures, 8))):
                    return
                failures += 1
        if self.unreadable:
            _log.warning("spool.readable_again", journal=self.journal, folder=str(self.folder.path))
        self.unreadable = False

    async def _stops_within(self, seconds: float) -> bool:
        """Return True as soon as this replica must stop, or False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    async def _recover_spool(self) -> None:
        """Recover the spool from the folder. Raises OSError if the disk fails."""
        recovered = await recover_spool(self.folder, self._records, self._clock, distrusted=self._distrusted)
        self.journal_id = recovered.journal_id
        spool = recovered.durable(self.folder, self, self._fsync)
        try:
            await spool.flush_commits()  # Before the spool is used.
        except OSError:
            spool.close()
            for sealed in recovered.sealed:
                sealed.log.seal()
            self._distrusted = True
            raise
        self._distrusted = False
        spool.on_failure = self._spool_failed
        self._spool = spool
        if self._spool.end <= recovered.watermark.offset:
            self._spool.publish(self._spool.fragment)  # It is settled: no replica continues without it.
        elif recovered.shown is not None:
            self._spool.publish(recovered.shown)
        for found in recovered.sealed:
            sealed = replace(found, readable=found.settled or found.fragment.end <= recovered.readable)
            self.index.spool_complete(sealed)
            self._persister.add(sealed, self._stored, primary=True, on_diverged=self.index.forget)
        self.index.note_head(max(self._spool.end, recovered.lost_end))
        growing = self._spool.committed
        begun = [growing.first_append_time] if growing.fragment.length else []
        self.index.appended_at = max([*begun, *(each.first_append_time for each in recovered.sealed)], default=0.0)
        if self._spool.end or recovered.sealed:
            _log.info(
                "spool.taken_up",
                journal=self.journal,
                end=self._spool.end,
                fragment_bytes=self._spool.fragment.length,
                unpersisted_fragments=len(recovered.sealed),
            )
        self.spool.put(self._spool)

    def _spool_failed(self) -> None:
        """Mark the replica as failed, because the disk failed to keep content of the spool."""
        self.failed = True
        self._on_failure(self)

    async def _take_spool(self) -> DurableSpool:
        """Wait for the owners of the pipeline and of the spool, and take both."""
        pipeline = await self.pipeline.take()
        if pipeline is not None:
            turn = pipeline.turn()
            self.spool.put(pipeline.close_send())
            await pipeline.shut_down(turn)
        return await self.spool.take()

    async def _stop_spool(self, spool: DurableSpool, drop: bool) -> None:
        if drop:
            spool.close()
            await self._persister.release(self.journal, self.folder.create_revision)
            self.index.close()
            files = [file for sealed in self.index.sealed_files() for file in (sealed.log, sealed.content)]
            for file in (*files, spool.content_file):
                with contextlib.suppress(FileNotFoundError):
                    file.move(file.path)  # Open readers continue. New readers do not find the file.
            self._set_aside(self.folder)
            return
        fragment = spool.fragment
        try:
            if fragment.length and not self.stranded and not self.failed and self._has_stores():
                # A completed fragment is visible immediately, but its last part may be on this broker only. So close
                # the index first.
                self.index.close()
                spool.propose(empty_at(fragment, fragment.end, fragment.codec), spool.registers, primary=True)
            if not self.failed:
                await spool.flush()
        finally:
            spool.close()
        # An empty journal has nothing to store.
        usable = not self.stranded and not self.failed
        if not spool.fragment.length and usable and (not spool.end or self._has_stores()):
            self._final_state = FinalSpoolState(spool.end, spool.registers, spool.stamp)

    def _has_stores(self) -> bool:
        try:
            spec = self._spec()
        except CorantoError:
            return False  # The stores are unknown, so the content stays local.
        return spec is not None and len(spec.fragment.stores) > 0

    async def _keep_refreshed(self) -> None:
        failures, interval = 0, DEFAULT_REFRESH_SECONDS
        while True:
            begun_at = self._refreshed_at = self._clock.monotonic()
            longer = min(2 * self._gap_seconds, LONGEST_REFRESH_FOR_GAP_SECONDS)  # The content may never be stored.
            self._gap_seconds = longer if self._gap_met else REFRESH_FOR_GAP_SECONDS
            try:
                spec = self._spec()
                if spec is None:
                    return  # The journal was deleted, and this replica will stop.
                interval = spec.fragment.refresh_interval.ToNanoseconds() / 1e9 or DEFAULT_REFRESH_SECONDS
                if (fork := fork_of(spec)) is not None:
                    self.index.note_head(fork.shared_end)  # The source has written these offsets.
                listed = await self._folders.listed(spec, self._clock.now())
                if self._recovering is not None:
                    await asyncio.wait((self._recovering,))  # The index must have the spool's head.
                self._gap_met = False  # Waiting readers set it again.
                for sealed in self.index.refresh(listed, begun_at):
                    _log.error(
                        "fragment.wrong_in_store",
                        fragment=sealed.fragment.content_path,
                    )
                    self._persister.add(sealed, self._stored, primary=True, on_diverged=self.index.forget)
                self._on_listed(spec, listed, self.index)
                await self._folders.mark_listed(self.journal, spec.fragment.stores)
                failures = 0
                self._unlistable.clear()
            except CorantoError as error:
                _log.warning("store.listing_failed", journal=self.journal, error=str(error))
                # Appends wait for the first listing.
                interval = interval if self.index.refreshed else min(interval, 0.25 * 2 ** min(failures, 7))
                failures += 1
                self._listing_problem = error.public_text
                if failures >= LISTING_ATTEMPTS:
                    self._unlistable.set()
            self._refresh_at = self._clock.monotonic() + interval
            if self._gap_met:
                self._refresh_by(begun_at + self._gap_seconds)
            await self._pause_refresh()

    async def _pause_refresh(self) -> None:
        """Wait until `_refresh_at`, which may be set to an earlier time."""
        while (seconds := self._refresh_at - self._clock.monotonic()) > 0:
            self._refresh_sooner.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._refresh_sooner.wait()
            except TimeoutError:
                return

    async def _keep_pulsing(self) -> None:
        failures = 0
        while True:
            try:
                changed = await self._pulse(self)
                failures, pause = 0, PULSE_SECONDS
            except PulseFailed as failure:
                # If the Route changes, retry immediately, because other brokers wait for its synchronization.
                changed, pause = failure.changed, min(PULSE_SECONDS, FAILURE_SECONDS * 2 ** min(failures, 8))
                failures += 1
                _log.warning("replica.pulse_failed", journal=self.journal, error=str(failure))
            try:
                async with asyncio.timeout(pause):
                    await (changed or Signal()).wait()
            except TimeoutError:
                continue
            if self.is_stopping:
                return
