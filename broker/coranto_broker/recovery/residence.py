"""A broker's right to use its data directory with its etcd, checked at the start and watched while the broker runs.

`coranto_broker.recovery.identity` has the rules. `Residence.check` refuses a directory and an etcd that do not belong
together, before anything is changed. `claim` marks both as used by this process, once its member key exists. `watch`
changes the mark from time to time, and returns if another process, or a restored etcd, has changed it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from coranto.coordination.etcd import Compare, Coordinator, EtcdHeader, KeyValue, Put, absent, unmodified
from coranto.coordination.layout import ItemKey, Layout, MemberId
from coranto.coordination.lease import LeaseRecord
from coranto.effects import Clock, Disk, Entropy, LocalDisk
from coranto.errors import CoordinationError, InvalidInput, Unavailable, WrongCluster
from coranto.process.dirlock import directory_id
from coranto_broker.recovery.identity import (
    IDENTITY_FILE,
    ClusterIdentity,
    DirectoryIdentity,
    DirectoryUse,
    decode,
    differences,
    encode,
)
from coranto_broker.recovery.saved_records import SavedRecords
from coranto_broker.spool import in_sync
from coranto_broker.spool.durable_spool import folder_of

MARK_SECONDS = 30.0
"""The time after which the mark changes. A copy of the directory that is older than this is recognized."""
CHECK_SECONDS = 5.0
"""The pause between checks that the mark is still this broker's."""
ADVICE = "see 'An etcd that was restored' in docs/operations.md"
_log = structlog.get_logger(__name__)


def spools_of(data_dir: Path) -> Path:
    """Return the folder of a data directory that holds the spools."""
    return data_dir / "spools"


def load_identity(data_dir: Path, disk: Disk) -> DirectoryIdentity | None:
    """Return the identity of a data directory; None if it has none yet. Raises InvalidInput if it is unreadable."""
    try:
        return decode(DirectoryIdentity, disk.read(data_dir / IDENTITY_FILE), str(data_dir / IDENTITY_FILE))
    except FileNotFoundError:
        return None


async def read_cluster(
    coordinator: Coordinator, layout: Layout
) -> tuple[EtcdHeader, KeyValue | None, ClusterIdentity | None]:
    """Read the cluster's entry in etcd; None if there is none. Raises InvalidInput if it is unreadable."""
    header, kv = await coordinator.get(layout.cluster_key)
    return header, kv, decode(ClusterIdentity, kv.value, f"etcd key {layout.cluster_key}") if kv is not None else None


def new_word(entropy: Entropy) -> str:
    """Return a new unique word."""
    return entropy(8).hex()


class Residence:
    """The result of `check`.

    `base` is added to etcd's revisions, `etcd_id` is etcd's cluster id, `cluster` is the brokers' cluster id. `guard`
    holds while the cluster is unchanged.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        layout: Layout,
        member: MemberId,
        data_dir: Path,
        disk: Disk,
        entropy: Entropy,
        cluster: ClusterIdentity,
        cluster_kv: KeyValue,
        identity: DirectoryIdentity,
        use: KeyValue | None,
    ) -> None:
        self.base = cluster.base
        self.cluster = cluster.id
        self.etcd_id = identity.etcd
        self.guard: Compare = unmodified(cluster_kv)
        self._coordinator = coordinator
        self._use_key = layout.use_key(member)
        self._file = data_dir / IDENTITY_FILE
        self._disk = disk
        self._entropy = entropy
        self._identity = identity
        self._use = use
        self._place = directory_id(data_dir) if isinstance(disk, LocalDisk) else ""

    @classmethod
    async def check(
        cls,
        coordinator: Coordinator,
        layout: Layout,
        member: MemberId,
        data_dir: Path,
        disk: Disk,
        entropy: Entropy,
    ) -> Residence:
        """Check that directory and etcd belong together. Raises WrongCluster if they do not.

        Changes nothing, except that an etcd without a cluster at the prefix gets one if the directory has none either.
        """
        identity = load_identity(data_dir, disk)
        use_key = layout.use_key(member)
        header, kv, cluster = await read_cluster(coordinator, layout)
        _, use_kv = await coordinator.get(use_key)
        use = decode(DirectoryUse, use_kv.value, f"etcd key {use_key}") if use_kv is not None else None
        base = cluster.base if cluster is not None else 0
        found = DirectoryIdentity(
            "", header.cluster_id, layout.prefix, str(member), "", revision=base + header.revision
        )
        if cluster is not None and cluster.gathering:
            gathered = ", ".join(cluster.gathered) or "no broker"
            raise WrongCluster(
                f"the brokers of prefix {layout.prefix} are adopting a restored etcd ({gathered} so far): "
                f"`coranto broker adopt` on every one, then `coranto broker finish-adoption`; {ADVICE}"
            )
        if identity is not None:
            problems = "; ".join(differences(identity, found, cluster, use))
            if not problems:
                problems = await cls._forgotten(coordinator, layout, base, data_dir, disk)
        else:
            problems = await cls._objections(coordinator, layout, header, base, data_dir, disk)
        if problems:
            raise WrongCluster(
                f"{data_dir} does not belong to this etcd: {problems}. Give the broker the etcd, prefix, zone and id "
                "that the directory is of. If etcd was restored from a backup or emptied, stop all brokers and let "
                "each adopt it: `coranto broker adopt`. If the directory is a copy of another broker's, or was "
                f"restored from a backup, start with an empty one instead; {ADVICE}"
            )
        while kv is None or cluster is None:
            cluster = ClusterIdentity(new_word(entropy))
            await coordinator.txn([absent(layout.cluster_key)], [Put(layout.cluster_key, encode(cluster))])
            header, kv, cluster = await read_cluster(coordinator, layout)
        if identity is None or identity.cluster != cluster.id:
            identity = replace(found, cluster=cluster.id)
        return cls(coordinator, layout, member, data_dir, disk, entropy, cluster, kv, identity, use_kv)

    @staticmethod
    async def _forgotten(coordinator: Coordinator, layout: Layout, base: int, data_dir: Path, disk: Disk) -> str:
        """Describe the first in-sync record that this broker wrote and that etcd has lost; empty if there is none.

        The mark alone cannot reveal a backup that was made after the mark was written.
        """
        saved = list(SavedRecords(data_dir, disk))
        if not saved:
            return ""
        there = {kv.key: kv for kv in (await coordinator.range(layout.in_sync_records)).kvs}
        items = {kv.key: kv for kv in (await coordinator.range(layout.items, keys_only=True)).kvs}
        for each in saved:
            item = items.get(layout.item_key(each.journal))
            if item is None or item.create_revision != each.record.create_revision:
                continue  # The journal was deleted since, and its record with it.
            kv = there.get(layout.in_sync_key(each.journal))
            record = in_sync.decode(kv.value) if kv is not None else None
            written = record.carried or base + kv.mod_revision if record is not None and kv is not None else 0
            if record is None or replace(record, written=written).order < each.record.order:
                known = f"the mark of revision {written}" if record is not None else "none"
                return (
                    f"the directory's broker wrote the in-sync record of {each.journal} at etcd revision "
                    f"{each.record.written}, and etcd knows {known}"
                )
        return ""

    @staticmethod
    async def _objections(
        coordinator: Coordinator, layout: Layout, header: EtcdHeader, base: int, data_dir: Path, disk: Disk
    ) -> str:
        """Describe the mismatch of a data directory without an identity with this etcd; empty if none is found."""
        root = spools_of(data_dir)
        held = {
            root / name / revision: int(revision)
            for name in disk.list(root)
            for revision in disk.list(root / name)
            if revision.isdigit() and any(each.endswith(".commits") for each in disk.list(root / name / revision))
        }
        if not held:
            return ""
        lease = LeaseRecord.within(data_dir, disk).load()
        if lease is not None and lease[0] != header.cluster_id:
            return f"its lease is of etcd cluster id {lease[0]:#x}, and this etcd has {header.cluster_id:#x}"
        latest = max(held.values())
        if latest > header.revision:
            return f"it holds a journal created at etcd revision {latest}, and this etcd is at {header.revision}"
        if base:
            return "it is from before etcd was restored"
        items = await coordinator.range(layout.items, keys_only=True)
        for kv in items.kvs:
            try:
                key = layout.decode(kv.key)
            except InvalidInput:
                continue
            if isinstance(key, ItemKey) and folder_of(root, key.item, kv.create_revision) in held:
                return ""
        return f"none of the {len(held)} journals that it holds is among the {len(items.kvs)} at {layout.prefix}"

    async def claim(self) -> None:
        """Mark etcd and directory as used by this process. Raises WrongCluster if its broker has another process."""
        try:
            marked = await self._mark()
        except (CoordinationError, Unavailable) as error:
            _log.warning("residence.marking_failed", error=str(error))
            marked = await self._mark()
        if not marked:
            raise WrongCluster(
                "while this broker started, another process used its name, or etcd was restored: see whether "
                f"{self._file.parent} is a copy of another broker's data directory; {ADVICE}"
            )

    async def watch(self, clock: Clock, seen: Callable[[], tuple[int, tuple[str, ...]]]) -> str:
        """Watch the mark, and return the reason once another process or etcd has changed the mark or the cluster.

        `seen` returns the latest etcd revision that the broker has seen, and the brokers that exist.
        """
        marked_at = clock.monotonic()
        while True:
            await clock.sleep(CHECK_SECONDS)
            try:
                if clock.monotonic() - marked_at >= MARK_SECONDS:
                    ours = await self.refresh(*seen())
                    marked_at = clock.monotonic()
                else:
                    compares = [self.guard, unmodified(self._use)] if self._use is not None else [self.guard]
                    ours = (await self._coordinator.txn(compares, [])).succeeded or await self._is_ours()
            except (CoordinationError, Unavailable, OSError) as error:
                _log.warning("residence.check_failed", error=str(error))
                continue
            if not ours:
                return (
                    "another process uses this broker's name, or etcd was restored: is the data directory copied? "
                    f"{ADVICE}"
                )

    async def refresh(self, revision: int, brokers: tuple[str, ...]) -> bool:
        """Change the mark, and record the observed state in the directory. Returns False if the mark is not ours."""
        latest = max(self._identity.revision, self.base + revision)
        self._identity = replace(self._identity, revision=latest, brokers=brokers)
        return await self._mark()

    async def _mark(self) -> bool:
        following = new_word(self._entropy)
        if self._identity.next_word and not await self._is_ours():
            return False  # The outcome of the last attempt was unknown. Now it is clear that the mark is not ours.
        self._save(replace(self._identity, next_word=following))
        put = Put(self._use_key, encode(DirectoryUse(following, self._place)))
        unchanged = unmodified(self._use) if self._use is not None else absent(self._use_key)
        result = await self._coordinator.txn([self.guard, unchanged], [put])
        if not result.succeeded:
            return await self._is_ours()
        self._use = KeyValue(put.key, put.value, mod_revision=result.header.revision)
        latest = max(self._identity.revision, self.base + result.header.revision)
        self._save(replace(self._identity, word=following, next_word="", revision=latest))
        return True

    async def _is_ours(self) -> bool:
        """Return True if etcd still has one of this broker's words, as it has after a mark whose answer was lost."""
        check = await self._coordinator.txn([self.guard], [])
        _, kv = await self._coordinator.get(self._use_key)
        if kv is None or not check.succeeded:
            return False
        word = decode(DirectoryUse, kv.value, f"etcd key {self._use_key}").word
        if word not in (self._identity.word, self._identity.next_word):
            return False
        self._use = kv
        self._save(replace(self._identity, word=word, next_word=""))
        return True

    def _save(self, identity: DirectoryIdentity) -> None:
        self._disk.write_atomic(self._file, encode(identity))
        self._identity = identity
