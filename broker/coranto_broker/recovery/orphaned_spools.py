"""Leftovers: spool folders of journals that are not assigned to this broker.

They remain when an assignment goes, or the process ends, before everything was stored. What is final by the journal's
in-sync record goes to the store; what others went on without is set aside, and so are, for a while, folders of deleted
journals (`coranto_broker.recovery.deleted_spools`); those from which nothing is needed any more are removed.

A folder may also hold what nobody can go on without: this broker is a member of the record, and no member is in the
journal's Route any more. Then the broker *rescues* the journal: it claims the record, stores all that it has, and
closes the record with the journal's end and registers, where the brokers of the Route go on. That needs a fragment
store; without one the journal waits until a member is assigned to it again. A record that a member has left needs no
rescue.

Journals that were created anew after etcd was restored are rescued likewise: the record that was carried over names the
former journal of the name, in whose folder its member has all that was acknowledged.
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
from coranto_broker.recovery.spool_recovery import take_up
from coranto_broker.spool import commit_log, in_sync
from coranto_broker.spool.durable_spool import Fsync, Sealed, SpoolFolder, Watermark
from coranto_broker.spool.shared_file import SharedFile
from coranto_broker.spool.spool import empty_at

PAUSE_SECONDS = 5.0
"""Between looks at what is left. A journal has lost its members when two looks in a row find that, or when we are the
only one."""
SOON_SECONDS = 0.5
"""Until the next look while brokers wait for nobody but us."""
_log = structlog.get_logger(__name__)


class Journals(Protocol):
    """What of the key space, and of this broker's replicas, decides over leftovers."""

    def spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """The present spec; None when the journal was deleted. Raises InvalidInput when it cannot be read."""
        ...

    def successor_of(self, journal: str) -> tuple[pb.JournalSpec, int] | None:
        """Spec and create revision of the present journal of that name, if there is one. Raises as `spec_of` does."""
        ...

    def adopt(self, journal: str, create_revision: int) -> None:
        """Fragments of the former journal, of that create revision, are the present one's: they may be stored."""
        ...

    def route_of(self, journal: str) -> list[str]:
        """Names of the brokers that the journal is assigned to."""
        ...

    def is_used(self, folder: Path) -> bool:
        """Whether a replica uses the folder, or will."""
        ...

    def exclusively(self, journal: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run async work that the journal's next replica has to wait for."""
        ...


@dataclass(slots=True, eq=False)
class _Leftover:
    """A folder that was taken up. Observes its spool."""

    folder: SpoolFolder
    end: int = 0
    registers: pb.LabelSet = field(default_factory=pb.LabelSet)
    stamp: in_sync.Stamp = in_sync.UNSTAMPED
    watermark: Watermark = field(default_factory=Watermark)
    pending: list[Sealed] = field(default_factory=list)
    deserted: bool = False
    """Whether the last look found no member of the record in the Route."""
    alone: bool = False
    """Whether it found that we are the record's only member."""
    former: bool = False
    """Whether the journal that it is for was created anew, and waits for it."""

    def spool_commit(self, fragment: Fragment, content: SharedFile) -> None:
        """Nobody reads here."""

    def spool_complete(self, sealed: Sealed, *, primary: bool) -> None:
        self.pending.append(sealed)

    def spool_ahead(self, end: int) -> None:
        """Nobody reads here."""

    def spool_readable(self, end: int) -> None:
        """Nobody reads here."""

    def spool_skip(self, offset: int) -> None:
        """Nobody reads here."""

    def stored(self, sealed: Sealed, fragment: Fragment) -> None:
        self.pending.remove(sealed)
        sealed.drop()

    def diverged(self, sealed: Sealed) -> None:
        self.pending.remove(sealed)


class Leftovers:
    """Looks after leftover folders below `root`. `run` it as a task."""

    def __init__(
        self,
        root: Path,
        disk: Disk,
        clock: Clock,
        journals: Journals,
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
        """Folders that the disk refused to read when they were tried last."""
        self._disk = disk
        self._clock = clock
        self._journals = journals
        self._records = records
        self._persister = persister
        self._found: dict[Path, None] = {}
        self._taken: dict[Path, _Leftover] = {}

    def add(self, folder: Path) -> None:
        """A replica is done with this folder."""
        self._found[folder] = None

    def release(self, folder: Path) -> None:
        """A replica uses this folder from now on."""
        self.unreadable.pop(folder, None)
        self._found.pop(folder, None)
        self._taken.pop(folder, None)

    async def run(self) -> None:
        """Until cancelled."""
        for name in self._disk.list(self._root):
            for revision in self._disk.list(self._root / name):
                self._found[self._root / name / revision] = None
        while True:
            for path in list(self._found):
                if path in self._found and not self._journals.is_used(path):
                    await self._try(self._look(path), path)
            for path, leftover in list(self._taken.items()):
                if path in self._taken:
                    await self._try(self._decide(leftover), path)
            await self._try(self._sweep(), self._root)
            await self._pause()

    async def _sweep(self) -> None:
        if self._clock.monotonic() >= self._swept_at + SWEEP_SECONDS:
            self._swept_at = self._clock.monotonic()
            self._deleted.sweep()

    async def _pause(self) -> None:
        """Wait for the next look."""
        until = self._clock.monotonic() + PAUSE_SECONDS
        while (left := until - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, SOON_SECONDS))
            if any(map(self._is_waited_for, self._taken.values())):
                return

    def _is_waited_for(self, leftover: _Leftover) -> bool:
        """Whether brokers cannot go on before we have rescued their journal, and we can do the next step of that."""
        if leftover.former:
            return not leftover.pending
        if not leftover.alone or (leftover.deserted and leftover.pending):
            return False
        route = self._journals.route_of(leftover.folder.journal)
        return bool(route) and self._records.me not in route

    @staticmethod
    async def _try(work: Coroutine[Any, Any, None], path: Path) -> None:
        try:
            await work
        except (CorantoError, OSError) as error:
            _log.warning("leftover spool waits", folder=str(path), error=str(error))

    async def _look(self, path: Path) -> None:
        """Take up a folder, if there is something to be done with it."""
        journal = self._journal_of(path)
        if journal is None or not path.name.isdigit():
            del self._found[path]
            return
        folder = SpoolFolder(path, journal, int(path.name), self._disk, self._clock, self._base)
        spec = self._journals.spec_of(journal, folder.create_revision)
        if spec is None and await self._is_former(folder):
            successor = self._journals.successor_of(journal)
            if successor is None:
                return  # Its spec is to be applied again, or deleted once it is there.
            spec = successor[0]
            self._journals.adopt(journal, folder.create_revision)
        if spec is None:
            self._set_aside(folder)
            await self._records.remove(journal, folder.create_revision)
            return
        if not spec.fragment.stores:
            return  # It stays for when the journal is assigned to us again, or gets a store.
        del self._found[path]
        await asyncio.wait((self._journals.exclusively(journal, lambda: self._take(folder)),))

    async def _take(self, folder: SpoolFolder) -> None:
        await self._persister.release(folder.journal, folder.create_revision)
        try:
            recovered = await take_up(folder, self._records, self._clock)
        except (OSError, CorantoError) as error:
            _log.error(
                "spool cannot be read; trying again",
                journal=folder.journal,
                folder=str(folder.path),
                error=str(error) or type(error).__name__,
                seconds=PAUSE_SECONDS,
            )
            if not self._journals.is_used(folder.path):
                self._found[folder.path] = self.unreadable[folder.path] = None
            return
        if folder.path in self.unreadable:
            _log.warning("spool can be read again", journal=folder.journal, folder=str(folder.path))
            del self.unreadable[folder.path]
        leftover = _Leftover(folder, watermark=recovered.watermark)
        leftover.pending += recovered.sealed
        spool = recovered.durable(folder, leftover, Fsync.NEVER)
        try:
            if spool.fragment.length:
                rolled = empty_at(spool.fragment, spool.end, spool.fragment.codec)
                spool.propose(rolled, spool.registers, primary=True)
        finally:
            spool.close()
        leftover.end, leftover.registers, leftover.stamp = spool.end, spool.registers, spool.stamp
        if leftover.pending:
            _log.info("took up leftover spool", journal=folder.journal, end=spool.end, fragments=len(leftover.pending))
        for sealed in list(leftover.pending):
            self._persister.add(sealed, leftover.stored, primary=True, on_diverged=leftover.diverged)
        if not self._journals.is_used(folder.path):
            self._taken[folder.path] = leftover

    async def _decide(self, leftover: _Leftover) -> None:
        """See whether a folder is of use still, and whether its journal has to be rescued."""
        folder, me = leftover.folder, self._records.me
        spec = self._journals.spec_of(folder.journal, folder.create_revision)
        reading = await self._records.read(folder.journal, folder.create_revision)
        record = reading.record
        create_revision = folder.create_revision
        former = spec is None and self._names_us(folder, record)
        if former:
            successor = self._journals.successor_of(folder.journal)
            if successor is None:
                return
            create_revision, leftover.former = successor[1], True
        elif spec is None:
            await self._persister.release(folder.journal, folder.create_revision)
            self._set_aside(folder)
            return
        leftover.alone = record is not None and record.members == (me,) and not record.left and not record.foreign
        if record is None or me not in record.members or not in_sync.is_complete(record, leftover.stamp, me):
            if not leftover.pending and folder.path in self._taken:
                self._remove(folder.path)  # Others have all that is not stored.
            return
        if record.left and not former:
            return  # Whoever has the journal goes on. Then it is known whether what only we have is part of it.
        route = self._journals.route_of(folder.journal)
        deserted = former or (bool(route) and set(route).isdisjoint(record.members))
        deserted, leftover.deserted = deserted and (leftover.alone or leftover.deserted), deserted
        if not deserted:
            return
        if record.members != (me,) or not record.claimed:
            _log.warning("rescuing a journal", journal=folder.journal, end=leftover.end, members=list(record.members))
            record = in_sync.claimed(record, me, leftover.end, leftover.registers)
            result, reading = await self._records.write(reading, record)
            if not result.succeeded:
                return
        leftover.watermark.raise_to(leftover.end)
        self._persister.hurry(folder.journal)
        if leftover.pending:
            return
        record = in_sync.closed(record, create_revision, leftover.end, leftover.registers)
        result, _ = await self._records.write(reading, record)
        if result.succeeded and folder.path in self._taken:
            _log.warning("rescued a journal", journal=folder.journal, end=leftover.end)
            self._remove(folder.path)

    async def _is_former(self, folder: SpoolFolder) -> bool:
        reading = await self._records.read(folder.journal, folder.create_revision)
        return self._names_us(folder, reading.record)

    def _names_us(self, folder: SpoolFolder, record: in_sync.Record | None) -> bool:
        """Whether this folder has what a journal of the name needs that was created after etcd was restored."""
        if record is None or not record.carried or record.foreign:
            return False
        return self._records.me in record.members and record.create_revision == folder.create_revision

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
        """The name of a folder's journal; None when it holds no commit."""
        for name in self._disk.list(path):
            if name.endswith(".commits"):
                last = commit_log.decode(self._disk.read(path / name)).last
                if last is not None:
                    return last.fragment.journal
        return None
