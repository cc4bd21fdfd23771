"""Adopt an etcd that was restored from a backup, or emptied, with the brokers' existing data directories.

Such an etcd no longer knows which brokers hold the acknowledged content. So every broker reports its knowledge
(`gather`, once per data directory, while no broker runs): the in-sync records that it wrote last, and the latest
revision that it has seen. Of the records of a journal, the latest one wins. After all brokers have reported, etcd is
complete again. `finish` ends the adoption.

After that, revisions are rebased on the latest revision that any broker has seen. So stamps from before the restore
compare correctly with epochs from after it. A journal that has to be recreated keeps its record. Its content is
rescued from the spools of the former journal (`coranto_broker.recovery.orphaned_spools`), and no broker continues the
journal before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coranto.coordination.etcd import Compare, Coordinator, KeyValue, Op, Put, TxnResult, absent, unmodified
from coranto.coordination.layout import ItemKey, Layout, MemberId
from coranto.effects import Clock, Disk, Entropy, LocalDisk
from coranto.errors import InvalidInput, TxnOutcomeUnknown, WrongCluster
from coranto.process.dirlock import directory_id
from coranto_broker.recovery.deleted_spools import DeletedSpools
from coranto_broker.recovery.identity import IDENTITY_FILE, ClusterIdentity, DirectoryIdentity, DirectoryUse, encode
from coranto_broker.recovery.residence import load_identity, new_word, read_cluster, spools_of
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.spool import commit_log, in_sync
from coranto_broker.spool.durable_spool import folder_of
from coranto_broker.spool.in_sync import InSyncRecord


@dataclass(frozen=True, slots=True)
class GatheredDirectory:
    """The result of gathering one data directory."""

    cluster: ClusterIdentity
    records: int
    """The number of in-sync records that etcd lacked, or had only in an older version."""
    brought_back: int
    """The number of restored spools: they had been set aside, and their journals exist again."""
    late: bool = False
    """True if the other brokers had already finished the adoption."""


class Adoption:
    """The adoption of the etcd at `coordinator`, for the keys of `layout`."""

    def __init__(self, coordinator: Coordinator, layout: Layout, entropy: Entropy) -> None:
        self._coordinator = coordinator
        self._layout = layout
        self._entropy = entropy

    async def gather(self, member: MemberId, data_dir: Path, disk: Disk, clock: Clock) -> GatheredDirectory:
        """Report the knowledge of a data directory to etcd. May be repeated.

        The directory does not have to match this etcd. It must be locked (`coranto.process.dirlock`). Raises
        WrongCluster if the directory cannot be gathered, without any change, or if etcd's answer was lost.
        """
        layout, broker = self._layout, str(member)
        identity = load_identity(data_dir, disk)
        if identity is not None and identity.broker != broker:
            raise WrongCluster(f"{data_dir} is of broker {identity.broker}, not of {broker}; in-sync records name it")
        _, _, cluster = await read_cluster(self._coordinator, layout)
        saved = SavedRecords(data_dir, disk)
        seen = _seen(data_dir, disk, identity, saved)
        former = identity.cluster if identity is not None else ""
        late = cluster is not None and not cluster.gathering and former in cluster.before
        if late:
            assert cluster is not None
            _, alive = await self._coordinator.get(layout.member_key(member))
            if alive is not None:
                raise WrongCluster(
                    f"a broker {broker} runs, with another data directory than {data_dir}; give that one, "
                    "or stop that broker"
                )
            if seen > cluster.since:
                raise WrongCluster(
                    f"{data_dir} has seen etcd revision {seen}, later than the brokers that adopted this etcd without "
                    f"it ({cluster.since}): it cannot join them. Keep it until you know what of it is missing"
                )
        else:
            cluster = await self._join(seen, former, lambda found: found)
        brought_back = await self._bring_back(data_dir, disk, clock)
        merged = 0
        for each in saved:
            merged += await self._merge(each.journal, each.record, cluster, late=late)
        known = identity.brokers if identity is not None else ()
        cluster = cluster if late else await self._join(seen, former, lambda it: it.joined(broker, seen, known, former))
        await self._use(member, data_dir, disk, cluster, seen)
        return GatheredDirectory(cluster, merged, brought_back, late)

    async def finish(self, without: Sequence[str] = ()) -> ClusterIdentity:
        """Let brokers serve again. Raises WrongCluster while a broker that `without` does not name has not reported."""
        layout = self._layout
        uses = await self._coordinator.range(layout.uses, keys_only=True)
        used = tuple(kv.key.removeprefix(layout.uses) for kv in uses.kvs)
        _, kv, cluster = await read_cluster(self._coordinator, layout)
        if kv is None or cluster is None or not cluster.gathering:
            raise WrongCluster(
                f"the brokers of prefix {layout.prefix} are not adopting a restored etcd; "
                "run `coranto broker adopt` for each of them first"
            )
        missing = cluster.missing(used, tuple(without))
        if missing:
            raise WrongCluster(
                f"{', '.join(missing)} have not reported yet: run `coranto broker adopt` with their data "
                "directories. Name those that are gone for good with --without: content that only they had "
                "is lost then, and its journals wait for `coranto journals reset-head`"
            )
        records = await self._coordinator.range(layout.in_sync_records)
        for each in records.kvs:
            await self._mark_carried(each, cluster)
        # The second read is linearizable after these writes: later revisions are greater.
        header, kv, again = await read_cluster(self._coordinator, layout)
        if kv is None or again != cluster:
            raise WrongCluster("another broker has just reported; run finish-adoption again")
        done = replace(cluster, gathering=False, since=cluster.base + header.revision)
        result = await self._txn([unmodified(kv)], [Put(layout.cluster_key, encode(done))])
        if not result.succeeded:
            raise WrongCluster("another broker has just reported; run finish-adoption again")
        return done

    # -- The steps -----------------------------------------------------------------------------------------------------

    async def _join(
        self, seen: int, former: str, change: Callable[[ClusterIdentity], ClusterIdentity]
    ) -> ClusterIdentity:
        """Apply `change` to the cluster's entry in etcd, and return it. Starts gathering if necessary."""
        layout = self._layout
        while True:
            _, kv, cluster = await read_cluster(self._coordinator, layout)
            if cluster is None or not cluster.gathering:
                await self._require_no_members()
                cluster = (cluster or ClusterIdentity("")).gather(new_word(self._entropy), seen, former)
            changed = change(replace(cluster, base=max(cluster.base, seen)))
            guard = unmodified(kv) if kv is not None else absent(layout.cluster_key)
            result = await self._txn([guard], [Put(layout.cluster_key, encode(changed))])
            if result.succeeded:
                return changed

    async def _require_no_members(self) -> None:
        members = await self._coordinator.range(self._layout.members, keys_only=True)
        names = [kv.key.removeprefix(self._layout.members) for kv in members.kvs]
        if names:
            raise WrongCluster(
                f"{', '.join(names)} are members at {self._layout.prefix}: stop all brokers first. If none runs, wait: "
                "leases that were restored with etcd run out. If they are another cluster's, this etcd or prefix is "
                "not the one to adopt"
            )

    async def _merge(self, journal: str, record: InSyncRecord, cluster: ClusterIdentity, *, late: bool) -> bool:
        """Write a record to etcd, unless etcd has a later one. Return True if it was written."""
        key = self._layout.in_sync_key(journal)
        while True:
            _, kv = await self._coordinator.get(key)
            if kv is not None:
                there = in_sync.decode(kv.value)
                written = there.carried or cluster.base_before + kv.mod_revision
                if late and (not there.carried or there.carried > cluster.base):
                    return False  # Other brokers have continued the journal since.
                if replace(there, written=written).order >= record.order:
                    return False
            guard = unmodified(kv) if kv is not None else absent(key)
            put = Put(key, in_sync.encode(replace(record, carried=max(1, record.written))))
            if (await self._txn([guard], [put])).succeeded:
                return True

    async def _mark_carried(self, kv: KeyValue, cluster: ClusterIdentity) -> None:
        """Add to a restored record the revision of its write, since the base of revisions changes."""
        record = in_sync.decode(kv.value)
        if not record.carried:
            carried = replace(record, carried=max(1, cluster.base_before + kv.mod_revision))
            await self._txn([unmodified(kv)], [Put(kv.key, in_sync.encode(carried))])

    async def _bring_back(self, data_dir: Path, disk: Disk, clock: Clock) -> int:
        """Restore spools that were set aside, if their journals exist again. Return their number."""
        items = await self._coordinator.range(self._layout.items, keys_only=True)
        there = set()
        for kv in items.kvs:
            try:
                key = self._layout.decode(kv.key)
            except InvalidInput:
                continue
            if isinstance(key, ItemKey):
                there.add((key.item, kv.create_revision))
        count = 0
        deleted = DeletedSpools(data_dir, disk, clock, 0.0)
        for spool in list(deleted):
            folder = folder_of(spools_of(data_dir), spool.journal, spool.create_revision)
            if (spool.journal, spool.create_revision) in there and not disk.list(folder):
                deleted.bring_back(spool, folder)
                count += 1
        return count

    async def _use(self, member: MemberId, data_dir: Path, disk: Disk, cluster: ClusterIdentity, seen: int) -> None:
        """Record in the directory that it belongs to this cluster, and in etcd that the broker uses the directory."""
        layout, word = self._layout, new_word(self._entropy)
        header, _ = await self._coordinator.get(layout.cluster_key)
        revision = max(seen, cluster.base + header.revision) if cluster.since else seen
        identity = DirectoryIdentity(cluster.id, header.cluster_id, layout.prefix, str(member), word, revision=revision)
        place = directory_id(data_dir) if isinstance(disk, LocalDisk) else ""
        await self._txn([], [Put(layout.use_key(member), encode(DirectoryUse(word, place)))])
        disk.write_atomic(data_dir / IDENTITY_FILE, encode(identity))

    async def _txn(self, compares: Sequence[Compare], ops: Sequence[Op]) -> TxnResult:
        try:
            return await self._coordinator.txn(compares, ops)
        except TxnOutcomeUnknown as error:
            raise WrongCluster(f"etcd's answer was lost ({error}); run the command again") from error


def _seen(data_dir: Path, disk: Disk, identity: DirectoryIdentity | None, saved: SavedRecords) -> int:
    """Return the latest revision in the files of a data directory."""
    seen = identity.revision if identity is not None else 0
    for each in saved:
        seen = max(seen, each.record.written, each.record.revision, each.record.create_revision)
    roots = [spools_of(data_dir), data_dir / "deleted"]
    for folder in (
        root / name / revision for root in roots for name in disk.list(root) for revision in disk.list(root / name)
    ):
        for name in disk.list(folder):
            if name.endswith(".commits"):
                log = commit_log.decode(disk.read(folder / name))
                seen = max(seen, log.create_revision, log.stamp.synced, log.stamp.written)
    return seen
