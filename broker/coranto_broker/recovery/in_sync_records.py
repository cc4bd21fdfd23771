"""Read and write in-sync records in etcd. `in_sync` defines their meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from coranto.coordination.etcd import Compare, Coordinator, Delete, KeyValue, Op, Put, TxnResult, absent, unmodified
from coranto.coordination.layout import Layout, MemberId
from coranto.errors import InvalidInput, Unavailable
from coranto.journal_ids import first_id
from coranto.wire import protocol_pb2 as pb
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.spool import in_sync
from coranto_broker.spool.in_sync import InSyncRecord, Judgement, Stamp

_log = structlog.get_logger(__name__)


class Stranded(Unavailable):
    """Other brokers have continued without content of a spool, which must not be used as it is."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it was read. `record` is None if there is none for this journal, or only for an earlier one.

    `journal_id` is the journal's id; empty if the cluster is unknown.
    """

    key: str
    kv: KeyValue | None
    create_revision: int
    record: InSyncRecord | None
    journal_id: str = ""

    @property
    def unchanged(self) -> Compare:
        return absent(self.key) if self.kv is None else unmodified(self.kv)


class InSyncRecords:
    """Reads and writes the records of a cluster's journals, for the broker `member`.

    Written records are also kept in `saved`, in case etcd is restored from a backup. `base` is added to etcd's
    revisions. Nothing is written once `guard` no longer holds. `known_revision` returns a revision that etcd has
    reached, `etcd_id` is etcd's cluster id (0: from its first answer), and `cluster` is the id of the brokers' cluster
    (`coranto_broker.recovery.identity`), the prefix of its journals' ids. All methods raise Unavailable if etcd does
    not respond, or if it was restored: its records may be older than this broker's spools, and would misjudge them.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        layout: Layout,
        member: MemberId,
        *,
        saved: SavedRecords | None = None,
        base: int = 0,
        guard: Sequence[Compare] = (),
        known_revision: Callable[[], int] = lambda: 0,
        etcd_id: int = 0,
        cluster: str = "",
    ) -> None:
        self._coordinator = coordinator
        self._layout = layout
        self._saved = saved
        self._base = base
        self._guard = tuple(guard)
        self._known_revision = known_revision
        self._etcd_id = etcd_id
        self._cluster = cluster
        self._seen = 0
        self.me = str(member)

    async def read(self, journal: str, create_revision: int) -> StoredRecord:
        """Read the current record."""
        key = self._layout.in_sync_key(journal)
        seen = max(self._seen, self._known_revision())
        header, kv = await self._coordinator.get(key)
        self._etcd_id = self._etcd_id or header.cluster_id
        if header.cluster_id != self._etcd_id:
            raise Unavailable(
                f"etcd's cluster id changed from {self._etcd_id:#x} to {header.cluster_id:#x}: it was restored or "
                "replaced; see 'An etcd that was restored' in docs/operations.md"
            )
        if header.revision < seen:
            raise Unavailable(
                f"etcd went back from revision {seen} to {header.revision}: it was restored; "
                "see 'An etcd that was restored' in docs/operations.md"
            )
        self._seen = max(self._seen, header.revision)
        if kv is None:
            return self._stored(key, None, create_revision, None)
        try:
            record = in_sync.decode(kv.value)
        except InvalidInput as error:
            raise Unavailable(f"etcd key {key} must be corrected or deleted: {error}") from error
        record = self._as_written(record, kv)
        return self._stored(key, kv, create_revision, in_sync.as_read_for(record, create_revision, self.me))

    def _stored(self, key: str, kv: KeyValue | None, create_revision: int, record: InSyncRecord | None) -> StoredRecord:
        known = record.journal_id if record is not None else ""
        return StoredRecord(key, kv, create_revision, record, known or first_id(self._cluster, create_revision))

    def _as_written(self, record: InSyncRecord, kv: KeyValue) -> InSyncRecord:
        return replace(record, written=record.carried or self._base + kv.mod_revision)

    async def write(
        self, reading: StoredRecord, record: InSyncRecord, compares: Sequence[Compare] = (), ops: Sequence[Op] = ()
    ) -> tuple[TxnResult, StoredRecord]:
        """Write the record and apply `ops`, if etcd's record is unchanged since `reading` and all `compares` hold.

        Returns the record as written. If the transaction did not succeed, returns the record as read again. A cancelled
        call may have written the record to etcd without saving its copy.
        """
        journal = _journal_of(reading.key)
        if record.carried:  # Keep it marked as carried over, for a recreated journal that reads it.
            record = replace(record, carried=self._base + max(1, self._seen))
        record = replace(record, journal_id=record.journal_id or reading.journal_id)
        value = in_sync.encode(record)
        guards = [*compares, *self._guard, reading.unchanged]
        result = await self._coordinator.txn(guards, [*ops, Put(reading.key, value)])
        if not result.succeeded:
            if self._guard and not (await self._coordinator.txn(self._guard, [])).succeeded:
                raise Unavailable(
                    "this cluster's brokers have adopted another etcd: this one may write no records; stop it, "
                    "and run `coranto broker adopt` with its data directory"
                )
            return result, await self.read(journal, reading.create_revision)
        kv = KeyValue(reading.key, value, mod_revision=result.header.revision)
        written = self._as_written(record, kv)
        self._save(journal, written)
        return result, self._stored(reading.key, kv, reading.create_revision, written)

    def _save(self, journal: str, record: InSyncRecord) -> None:
        if self._saved is None:
            return
        try:
            self._saved.save(journal, record)
        except OSError as error:
            if record.end is None and record.members:
                # Content will follow. If etcd were restored after that, the holders of the content would be unknown.
                raise Unavailable(f"the in-sync record of {journal} cannot be written to the disk: {error}") from error
            _log.warning("in_sync.saving_failed", journal=journal, error=str(error))

    def keep(self, reading: StoredRecord) -> None:
        """Save a copy of a record, whichever broker wrote it. Raises Unavailable if the disk fails.

        Call it before removing content that an older record attributes to this broker. Otherwise a copy of that older
        record may be the latest copy anywhere.
        """
        if self._saved is None or reading.kv is None or reading.record is None:
            return
        journal = _journal_of(reading.key)
        try:
            self._saved.save(journal, self._as_written(in_sync.decode(reading.kv.value), reading.kv))
        except OSError as error:
            raise Unavailable(f"the in-sync record of {journal} cannot be written to the disk: {error}") from error

    async def remove(self, journal: str, create_revision: int, *, former: bool = False) -> None:
        """Remove the record of a deleted journal, unless it belongs to a later journal of the same name.

        With `former`, also remove a record that was carried over from before etcd was restored. Otherwise it stays for
        a recreated journal of that name.
        """
        reading = await self.read(journal, create_revision)
        if reading.record is not None and create_revision in reading.record.formers:
            return  # It is the record of the journal that continues the deleted one.
        if reading.record is not None and (former or not reading.record.carried):
            await self._coordinator.txn([*self._guard, reading.unchanged], [Delete(reading.key)])

    async def verify(
        self, journal: str, create_revision: int, stamp: Stamp, end: int, *, lost: bool = False
    ) -> StoredRecord:
        """Check that a spool with that stamp and end may take part in a pipeline and be read.

        If this broker is a member of the record but lacks content that a member must hold, it is removed from the
        record first. `lost`: it has lost such content. Raises Stranded if other brokers have continued without content
        that is here.
        """
        reading = await self.read(journal, create_revision)
        latest = self._base + self._seen
        if stamp.synced > latest:
            raise Unavailable(
                f"the spool of {journal} names etcd revision {stamp.synced}, and etcd is at {latest}: it was restored "
                "from a backup; see 'An etcd that was restored' in docs/operations.md"
            )
        while (
            (record := reading.record) is not None
            and self.me in record.members
            and not record.foreign
            and (lost or not in_sync.is_complete(record, stamp, self.me))
        ):
            result, reading = await self.write(reading, in_sync.without(record, self.me))
            if result.succeeded:
                _log.warning(
                    "in_sync.content_missing",
                    journal=journal,
                    end=end,
                    synced=stamp.synced,
                    recorded=record.revision,
                    lost=lost,
                    others=list(record.members),
                )
        if in_sync.judge(reading.record, stamp, end, self.me) is Judgement.DIVERGED:
            raise Stranded(f"other brokers continued {journal} before offset {end}, without what this one has")
        return reading

    async def leave(
        self, journal: str, create_revision: int, stamp: Stamp, end: int, registers: pb.LabelSet
    ) -> InSyncRecord | None:
        """Leave the record if this broker knows the journal's end. Return the new record, or None.

        The spool with that stamp and end must be stopped, and all its content must be stored.
        """
        reading = await self.read(journal, create_revision)
        while (record := reading.record) is not None and in_sync.may_leave(record, stamp, end, self.me):
            record = in_sync.left(record, self.me, end, registers)
            result, reading = await self.write(reading, record)
            if result.succeeded:
                return record
        return None

    async def judge(self, journal: str, create_revision: int, stamp: Stamp, end: int) -> Judgement:
        """Judge content of a spool with that stamp, which ends at `end`, by the current record."""
        reading = await self.read(journal, create_revision)
        return in_sync.judge(reading.record, stamp, end, self.me)


def _journal_of(key: str) -> str:
    return key.rpartition("#")[2]
