"""Orphaned spools: spool folders of journals that are not assigned to this broker.

They remain if an assignment is removed, or the process ends, before everything was stored. Content that is final by the
journal's in-sync record is stored. Content that other brokers continued without is set aside. Folders of deleted
journals are set aside for some time (`coranto_broker.recovery.deleted_spools`). Folders that are no longer needed are
removed.

If this broker is a member of the in-sync record, and no member is in the journal's Route any more, the journal cannot
continue without the folder's content. Then the broker *rescues* the journal. It claims the record, stores all its
content, and closes the record with the journal's end and registers. The brokers of the Route continue there. A rescue
needs a fragment store. Without a store, the journal waits until a member is assigned to it again. A record that a
member has left needs no rescue.

Journals that were recreated after etcd was restored are rescued in the same way: the record names the former journal of
that name, and a member has all acknowledged content in the former journal's folder.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from coranto.effects import Clock, Disk
from coranto.errors import CorantoError
from coranto.fragments.fragment import Fragment
from coranto.wire import protocol_pb2 as pb
from coranto_broker.fragments.persister import FragmentPersister
from coranto_broker.recovery.deleted_spools import SWEEP_SECONDS, DeletedSpools
from coranto_broker.recovery.in_sync_records import InSyncRecords
from coranto_broker.recovery.spool_recovery import recover_spool
from coranto_broker.spool import commit_log, in_sync
from coranto_broker.spool.durable_spool import Fsync, Sealed, SettledOffset, SpoolFolder
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import empty_at

PAUSE_SECONDS = 5.0
"""The pause between checks of orphaned spools. A journal counts as deserted if two consecutive checks find no member of
its record in the Route, or if one check does and this broker is the only member."""
SOON_SECONDS = 0.5
"""The pause until the next check while other brokers wait only for this one."""
_log = structlog.get_logger(__name__)


class JournalFacts(Protocol):
    """The facts about the key space and this broker's replicas that the handling of orphaned spools depends on."""

    def spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """Return the current spec; None if the journal was deleted. Raises InvalidInput if it cannot be read."""
        ...

    def successor_of(self, journal: str) -> tuple[pb.JournalSpec, int] | None:
        """Return spec and create revision of the current journal of that name, if any. Raises like `spec_of`."""
        ...

    def adopt(self, journal: str, create_revision: int) -> None:
        """Allow fragments of the former journal with that create revision to be stored as the current journal's."""
        ...

    def route_of(self, journal: str) -> list[str]:
        """Return the names of the brokers that the journal is assigned to."""
        ...

    def is_used(self, folder: Path) -> bool:
        """Return True if a replica uses the folder, or will use it."""
        ...

    def exclusively(self, journal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run async work that the journal's next replica must wait for."""
        ...


@dataclass(slots=True, eq=False)
class _OrphanedSpool:
    """A recovered folder, and the observer of its spool."""

    folder: SpoolFolder
    end: int = 0
    registers: pb.LabelSet = field(default_factory=pb.LabelSet)
    stamp: in_sync.Stamp = in_sync.UNSTAMPED
    watermark: SettledOffset = field(default_factory=SettledOffset)
    pending: list[Sealed] = field(default_factory=list)
    deserted: bool = False
    """True if the last check found no member of the record in the Route."""
    alone: bool = False
    """True if the last check found that this broker is the record's only member."""
    former: bool = False
    """True if the journal was recreated and waits for this folder's content."""

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        """Do nothing, since there are no readers here."""

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.pending.append(sealed)

    def spool_ahead(self, end: int) -> None:
        """Do nothing, since there are no readers here."""

    def spool_readable(self, end: int) -> None:
        """Do nothing, since there are no readers here."""

    def spool_skip(self, offset: int) -> None:
        """Do nothing, since there are no readers here."""

    def stored(self, sealed: Sealed, fragment: Fragment) -> None:
        self.pending.remove(sealed)
        sealed.drop()

    def diverged(self, sealed: Sealed) -> None:
        self.pending.remove(sealed)


class OrphanedSpools:
    """Stores, sets aside or removes orphaned spools below `root`. Run `run` as a task."""

    def __init__(
        self,
        root: Path,
        disk: Disk,
        clock: Clock,
        journals: JournalFacts,
        records: InSyncRecords,
        persister: FragmentPersister,
        deleted: DeletedSpools,
        base: int = 0,
    ) -> None:
        self._root = root
        self._deleted = deleted
        self._base = base
        self._swept_at = -math.inf
        self.unreadable: dict[Path, None] = {}
        """Folders that could not be read at the last attempt."""
        self._disk = disk
        self._clock = clock
        self._journals = journals
        self._records = records
        self._persister = persister
        self._found: dict[Path, None] = {}
        self._taken: dict[Path, _OrphanedSpool] = {}

    def add(self, folder: Path) -> None:
        """Handle this folder from now on, because its replica has stopped."""
        self._found[folder] = None

    def release(self, folder: Path) -> None:
        """Stop handling this folder, because a replica uses it."""
        self.unreadable.pop(folder, None)
        self._found.pop(folder, None)
        self._taken.pop(folder, None)

    async def run(self) -> None:
        """Handle all orphaned spools until cancelled."""
        for name in self._disk.list(self._root):
            for revision in self._disk.list(self._root / name):
                self._found[self._root / name / revision] = None
        while True:
            for path in list(self._found):
                if path in self._found and not self._journals.is_used(path):
                    await self._try(self._look(path), path)
            for path, orphan in list(self._taken.items()):
                if path in self._taken:
                    await self._try(self._decide(orphan), path)
            await self._try(self._sweep(), self._root)
            await self._pause()

    async def _sweep(self) -> None:
        if self._clock.monotonic() >= self._swept_at + SWEEP_SECONDS:
            self._swept_at = self._clock.monotonic()
            self._deleted.sweep()

    async def _pause(self) -> None:
        """Wait until the next check is due."""
        until = self._clock.monotonic() + PAUSE_SECONDS
        while (left := until - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, SOON_SECONDS))
            if any(map(self._is_waited_for, self._taken.values())):
                return

    def _is_waited_for(self, orphan: _OrphanedSpool) -> bool:
        """Return True if other brokers wait for a rescue by this broker, and its next step can be done now."""
        if orphan.former:
            return not orphan.pending
        if not orphan.alone or (orphan.deserted and orphan.pending):
            return False
        route = self._journals.route_of(orphan.folder.journal)
        return bool(route) and self._records.me not in route

    @staticmethod
    async def _try(work: Coroutine[Any, Any, None], path: Path) -> None:
        try:
            await work
        except (CorantoError, OSError) as error:
            _log.warning("orphaned_spool.waiting", folder=str(path), error=str(error))

    async def _look(self, path: Path) -> None:
        """Recover a folder if there is work to do for it, or set it aside if its journal was deleted."""
        journal = self._journal_of(path)
        if journal is None or not path.name.isdigit():
            del self._found[path]
            return
        folder = SpoolFolder(path, journal, int(path.name), self._disk, self._clock, self._base)
        spec = self._journals.spec_of(journal, folder.create_revision)
        if spec is None and await self._is_continued(folder):
            successor = self._journals.successor_of(journal)
            if successor is None:
                return  # The journal's spec must be applied again. It may then be deleted.
            spec = successor[0]
            self._journals.adopt(journal, folder.create_revision)
        if spec is None:
            self._set_aside(folder)
            await self._records.remove(journal, folder.create_revision)
            return
        if not spec.fragment.stores:
            return  # Keep it until the journal is assigned to this broker again, or gets a store.
        del self._found[path]
        await asyncio.wait((self._journals.exclusively(journal, lambda: self._take(folder)),))

    async def _take(self, folder: SpoolFolder) -> None:
        await self._persister.release(folder.journal, folder.create_revision)
        try:
            recovered = await recover_spool(folder, self._records, self._clock)
        except (OSError, CorantoError) as error:
            self._retry_later(folder, error)
            return
        if folder.path in self.unreadable:
            _log.warning("spool.readable_again", journal=folder.journal, folder=str(folder.path))
            del self.unreadable[folder.path]
        orphan = _OrphanedSpool(folder, watermark=recovered.watermark)
        orphan.pending += recovered.sealed
        spool = recovered.durable(folder, orphan, Fsync.NEVER)
        try:
            if spool.fragment.length:
                rolled = empty_at(spool.fragment, spool.end, spool.fragment.codec)
                spool.propose(rolled, spool.registers, primary=True)
        except OSError as error:  # The disk may be full. Try again, as this may be the only copy of the content.
            self._retry_later(folder, error)
            return
        finally:
            spool.close()
        orphan.end, orphan.registers, orphan.stamp = spool.end, spool.registers, spool.stamp
        if orphan.pending:
            _log.info("orphaned_spool.taken_up", journal=folder.journal, end=spool.end, fragments=len(orphan.pending))
        for sealed in list(orphan.pending):
            self._persister.add(sealed, orphan.stored, primary=True, on_diverged=orphan.diverged)
        if not self._journals.is_used(folder.path):
            self._taken[folder.path] = orphan

    def _retry_later(self, folder: SpoolFolder, error: Exception) -> None:
        """Schedule another check of the folder, unless a replica uses it then."""
        _log.error(
            "spool.unreadable",
            journal=folder.journal,
            folder=str(folder.path),
            error=str(error) or type(error).__name__,
            seconds=PAUSE_SECONDS,
        )
        if not self._journals.is_used(folder.path):
            self._found[folder.path] = self.unreadable[folder.path] = None

    async def _decide(self, orphan: _OrphanedSpool) -> None:
        """Remove a folder that is no longer needed, or do the next step to rescue its journal."""
        folder, me = orphan.folder, self._records.me
        spec = self._journals.spec_of(folder.journal, folder.create_revision)
        reading = await self._records.read(folder.journal, folder.create_revision)
        record = reading.record
        create_revision = folder.create_revision
        former = spec is None and self._names_this_member(folder, record)
        if former:
            successor = self._journals.successor_of(folder.journal)
            if successor is None:
                return
            create_revision, orphan.former = successor[1], True
        elif spec is None and not in_sync.is_continued(record, folder.create_revision):
            await self._persister.release(folder.journal, folder.create_revision)
            self._set_aside(folder)
            return
        orphan.alone = record is not None and record.members == (me,) and not record.left and not record.foreign
        if record is None or me not in record.members or not in_sync.is_complete(record, orphan.stamp, me):
            if not orphan.pending and folder.path in self._taken:
                self._records.keep(reading)
                self._remove(folder.path)  # Other brokers have everything that is not stored.
            return
        if record.left and not former:
            return  # The Route continues without a rescue, which then decides whether content that is only here counts.
        route = self._journals.route_of(folder.journal)
        deserted = former or (bool(route) and set(route).isdisjoint(record.members))
        deserted, orphan.deserted = deserted and (orphan.alone or orphan.deserted), deserted
        if not deserted:
            return
        if record.members != (me,) or not record.claimed:
            _log.warning(
                "orphaned_spool.rescue_started", journal=folder.journal, end=orphan.end, members=list(record.members)
            )
            record = in_sync.claimed(record, me, orphan.end, orphan.registers)
            result, reading = await self._records.write(reading, record)
            if not result.succeeded:
                return
        orphan.watermark.raise_to(orphan.end)
        self._persister.wake(folder.journal)
        if orphan.pending:
            return
        record = in_sync.closed(record, create_revision, orphan.end, orphan.registers)
        result, reading = await self._records.write(reading, record)
        if result.succeeded and folder.path in self._taken:
            _log.warning("orphaned_spool.rescued", journal=folder.journal, end=orphan.end)
            self._records.keep(reading)
            self._remove(folder.path)

    async def _is_continued(self, folder: SpoolFolder) -> bool:
        reading = await self._records.read(folder.journal, folder.create_revision)
        return in_sync.is_continued(reading.record, folder.create_revision)

    def _names_this_member(self, folder: SpoolFolder, record: in_sync.InSyncRecord | None) -> bool:
        """Return True if a journal of this name, created after etcd was restored, needs this folder's content."""
        if record is None or record.create_revision != folder.create_revision:
            return False
        return bool(record.carried) and self._records.me in record.members

    def _set_aside(self, folder: SpoolFolder) -> None:
        self._found.pop(folder.path, None)
        self._taken.pop(folder.path, None)
        self._deleted.take(folder.path, folder.journal, folder.create_revision)

    def _remove(self, path: Path) -> None:
        self._found.pop(path, None)
        self._taken.pop(path, None)
        kept = [name for name in self._disk.list(path) if name == "set-aside"]
        if not kept:
            self._disk.remove_tree(path)
            return
        for name in self._disk.list(path):
            if name not in kept:
                self._disk.remove(path / name)

    def _journal_of(self, path: Path) -> str | None:
        """Return the name of a folder's journal; None if the folder holds no commit."""
        for name in self._disk.list(path):
            if name.endswith(".commits"):
                last = commit_log.decode(self._disk.read(path / name)).last
                if last is not None:
                    return last.fragment.journal
        return None
