"""A simulated etcd: revisions, transactions, leases that expire, watches, compaction.

`SimEtcd` is the server. It is always up and always correct; only the network to it fails. `SimCoordinator` is a
client's `Coordinator`: its calls travel over the network and may be delayed or lost in either direction. A transaction
whose answer was lost raises TxnOutcomeUnknown, whether it was applied or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from coranto.coordination.etcd import (
    Compare,
    CompareTarget,
    Delete,
    EtcdHeader,
    GrantedLease,
    KeyValue,
    LeaseStatus,
    Op,
    Put,
    Relation,
    Snapshot,
    TxnResult,
    WatchBatch,
    WatchEvent,
)
from coranto.errors import CoordinationError, TxnOutcomeUnknown, Unavailable, WatchReset
from coranto.testing.sim.clocks import SimClock
from coranto.testing.sim.network import Lane, Network, TimedOut
from coranto.testing.sim.timeline import Process, Timeline

NODE = "etcd"
TIMEOUT_SECONDS = 10.0
_LATE_SECONDS = 0.05
"""The delay, in seconds, beyond which a check of a lease is late because the event loop was blocked. In virtual time
no check is ever late."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Lease:
    id: int
    ttl: int
    expires: float
    due: float = 0.0  # The time of its next check.
    keys: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Watcher:
    prefix: str
    lane: Lane


@dataclass(frozen=True, slots=True)
class Backup:
    """A server's content at one time; by default empty.

    `leases` has the time to live, in seconds, and the keys of each lease, by id.
    """

    revision: int = 1
    kvs: Mapping[str, KeyValue] = field(default_factory=dict)
    leases: Mapping[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)


class SimEtcd:
    """The server."""

    def __init__(self, loop: Timeline, network: Network) -> None:
        self.revision = 1
        self.cluster_id = 0xC0
        self.kvs: dict[str, KeyValue] = {}
        self.before_txn: list[Callable[[Sequence[Op]], None]] = []
        """Called with the operations of each transaction before it is applied."""
        self.on_expiry: list[Callable[[int], None]] = []
        """Called with the id of each expired lease."""
        self.on_commit: list[Callable[[], None]] = []
        """Called after each change."""
        self._loop = loop
        self._network = network
        self._history: list[tuple[int, tuple[WatchEvent, ...]]] = []
        self._compacted = 0
        self._at_compaction: dict[str, KeyValue] = {}
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0x7000
        self._watchers: dict[_Watcher, None] = {}

    @property
    def header(self) -> EtcdHeader:
        return EtcdHeader(self.cluster_id, 0x01, self.revision, 2)

    def backup(self) -> Backup:
        """Return the current content."""
        leases = {lease.id: (lease.ttl, tuple(lease.keys)) for lease in self._leases.values()}
        return Backup(self.revision, dict(self.kvs), leases)

    def restore(self, backup: Backup, *, new_id: bool) -> None:
        """Replace the content by a backup. Leases start again; with `new_id` the cluster id changes."""
        self.revision, self.kvs = backup.revision, dict(backup.kvs)
        self.cluster_id += new_id
        self.compact()
        self._leases = {}
        for lease_id, (ttl, keys) in backup.leases.items():
            lease = _Lease(lease_id, ttl, self._loop.time() + ttl, keys=dict.fromkeys(keys))
            self._leases[lease_id] = lease
            self._expire_later(ttl, lease)
        self.break_watches()

    def compact(self) -> None:
        """Forget all history."""
        self._compacted, self._at_compaction = self.revision, dict(self.kvs)
        self._history.clear()

    def break_watches(self) -> None:
        """Break the stream of every watcher. Watchers resume."""
        for watcher in list(self._watchers):
            watcher.lane.send(None)
            del self._watchers[watcher]

    def prefixed(self, prefix: str) -> list[KeyValue]:
        return [self.kvs[key] for key in sorted(self.kvs) if key.startswith(prefix)]

    # -- Calls ---------------------------------------------------------------------------------------------------------

    def range(self, prefix: str, revision: int, min_mod_revision: int, limit: int, keys_only: bool = False) -> Snapshot:
        """Return the keys of a prefix at a revision. Raises CoordinationError for a future or compacted revision."""
        if revision > self.revision:
            raise CoordinationError(f"required revision {revision} is a future one")
        header = self.header
        if revision and revision != self.revision:
            header = replace(header, revision=revision)
            found = [kv for key, kv in sorted(self._as_of(revision).items()) if key.startswith(prefix)]
        else:
            found = self.prefixed(prefix)
        kvs = [replace(kv, value=b"") if keys_only else kv for kv in found if kv.mod_revision >= min_mod_revision]
        return Snapshot(header, tuple(kvs[:limit] if limit else kvs), len(found))

    def _as_of(self, revision: int) -> dict[str, KeyValue]:
        if revision < self._compacted:
            raise CoordinationError(f"required revision {revision} has been compacted")
        kvs = dict(self._at_compaction)
        for _, event in ((at, event) for at, events in self._history if at <= revision for event in events):
            if event.deleted:
                kvs.pop(event.kv.key, None)
            else:
                kvs[event.kv.key] = event.kv
        return kvs

    def txn(self, compares: Sequence[Compare], ops: Sequence[Op], otherwise: Sequence[str]) -> TxnResult:
        if not all(self._holds(compare) for compare in compares):
            return TxnResult(False, self.header, tuple(self.kvs.get(key) for key in otherwise))
        written = [op.key for op in ops if isinstance(op, Put)]
        if len(set(written)) < len(written):
            raise CoordinationError("etcdserver: duplicate key given in txn request")
        for op in ops:
            if isinstance(op, Put) and op.lease and op.lease not in self._leases:
                raise CoordinationError("etcdserver: requested lease not found")
            if isinstance(op, Put) and op.keep_lease and op.key not in self.kvs:
                raise CoordinationError("etcdserver: key not found")
        for hook in self.before_txn:
            hook(ops)
        events: list[WatchEvent] = []
        revision = self.revision + 1
        for op in ops:
            if isinstance(op, Delete):
                keys = sorted(k for k in self.kvs if k.startswith(op.key)) if op.prefix else [op.key]
                events.extend(self._delete(key, revision) for key in keys if key in self.kvs)
            else:
                events.append(self._put(op, revision))
        self._commit(revision, events)
        return TxnResult(True, self.header)

    def grant(self, ttl: int) -> GrantedLease:
        self._next_lease += 1
        lease = _Lease(self._next_lease, max(2, ttl), self._loop.time() + max(2, ttl))
        self._leases[lease.id] = lease
        self._expire_later(lease.ttl, lease)
        return GrantedLease(lease.id, lease.ttl)

    def keep_alive(self, lease_id: int) -> int:
        lease = self._leases.get(lease_id)
        if lease is None:
            return 0
        lease.expires = self._loop.time() + lease.ttl
        return lease.ttl

    def status(self, lease_id: int) -> LeaseStatus:
        lease = self._leases.get(lease_id)
        if lease is None:
            return LeaseStatus(0, 0)
        remaining = max(0, math.ceil(lease.expires - self._loop.time()))
        return LeaseStatus(remaining, lease.ttl, tuple(lease.keys))

    def revoke(self, lease_id: int) -> None:
        """Delete a lease with its keys. No effect if it is gone."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None and lease.keys:
            revision = self.revision + 1
            self._commit(revision, [self._delete(key, revision) for key in list(lease.keys)])

    def watch(self, prefix: str, from_revision: int, lane: Lane) -> _Watcher:
        """Watch a prefix over `lane`. Raises WatchReset if `from_revision` is compacted or beyond the next revision."""
        if from_revision > self.revision + 1:
            raise WatchReset(f"the store is at revision {self.revision}, before {from_revision}")
        if from_revision <= self._compacted:
            raise WatchReset(f"revision {from_revision} is compacted (through {self._compacted})")
        watcher = _Watcher(prefix, lane)
        self._watchers[watcher] = None
        for revision, events in self._history:
            if revision >= from_revision:
                self._notify(watcher, revision, events)
        return watcher

    def unwatch(self, watcher: _Watcher) -> None:
        self._watchers.pop(watcher, None)

    # -- Internals -----------------------------------------------------------------------------------------------------

    def _holds(self, compare: Compare) -> bool:
        if compare.prefix:
            return all(self._holds_of(kv, compare) for kv in self.prefixed(compare.key) or (None,))
        return self._holds_of(self.kvs.get(compare.key), compare)

    def _holds_of(self, kv: KeyValue | None, compare: Compare) -> bool:
        found: int | bytes
        match compare.target:
            case CompareTarget.VERSION:
                found = kv.version if kv else 0
            case CompareTarget.CREATE_REVISION:
                found = kv.create_revision if kv else 0
            case CompareTarget.MOD_REVISION:
                found = kv.mod_revision if kv else 0
            case CompareTarget.LEASE:
                found = kv.lease if kv else 0
            case CompareTarget.VALUE:
                found = kv.value if kv else b""
        match compare.relation:
            case Relation.EQUAL:
                return found == compare.operand
            case Relation.NOT_EQUAL:
                return found != compare.operand
            case Relation.LESS:
                return found < compare.operand  # type: ignore[operator]
            case Relation.GREATER:
                return found > compare.operand  # type: ignore[operator]

    def _put(self, put: Put, revision: int) -> WatchEvent:
        old = self.kvs.get(put.key)
        lease = old.lease if put.keep_lease and old is not None else put.lease
        if old is not None and old.lease and old.lease in self._leases:
            self._leases[old.lease].keys.pop(put.key, None)
        if lease and lease in self._leases:
            self._leases[lease].keys[put.key] = None
        kv = KeyValue(
            put.key,
            put.value,
            old.create_revision if old else revision,
            revision,
            old.version + 1 if old else 1,
            lease,
        )
        self.kvs[put.key] = kv
        return WatchEvent(kv)

    def _delete(self, key: str, revision: int) -> WatchEvent:
        old = self.kvs.pop(key)
        if old.lease in self._leases:
            self._leases[old.lease].keys.pop(key, None)
        return WatchEvent(KeyValue(key, mod_revision=revision), deleted=True)

    def _commit(self, revision: int, events: list[WatchEvent]) -> None:
        if not events:
            return
        self.revision = revision
        self._history.append((revision, tuple(events)))
        self._loop.note(f"etcd {revision}: {[(event.kv.key, event.deleted) for event in events]}")
        for watcher in self._watchers:
            self._notify(watcher, revision, tuple(events))
        for hook in self.on_commit:
            hook()

    def _notify(self, watcher: _Watcher, revision: int, events: tuple[WatchEvent, ...]) -> None:
        mine = tuple(event for event in events if event.kv.key.startswith(watcher.prefix))
        if mine:
            watcher.lane.send(WatchBatch(EtcdHeader(self.cluster_id, 0x01, revision, 2), mine))

    def _expire(self, lease: _Lease) -> None:
        if self._leases.get(lease.id) is not lease:
            return
        now = self._loop.time()
        late = now - lease.due
        if late > _LATE_SECONDS:
            # The whole process was blocked, including its clients. Give them a chance to refresh their leases.
            lease.expires = max(lease.expires, now + min(max(late, lease.ttl / 10), lease.ttl / 2))
        left = lease.expires - now
        if left <= 0:
            self.revoke(lease.id)
            self._loop.note(f"lease {lease.id:#x} ran out")
            for hook in self.on_expiry:
                hook(lease.id)
            return
        self._expire_later(left, lease)

    def _expire_later(self, seconds: float, lease: _Lease) -> None:
        lease.due = self._loop.time() + seconds
        self._loop.later(seconds, self._expire, lease)


class SimCoordinator:
    """A client of `SimEtcd`: a `coranto.coordination.etcd.Coordinator`."""

    def __init__(self, etcd: SimEtcd, network: Network, node: str, process: Process, clock: SimClock) -> None:
        self._etcd = etcd
        self._network = network
        self._node = node
        self._process = process
        self._clock = clock

    async def range(
        self, prefix: str, *, revision: int = 0, min_mod_revision: int = 0, limit: int = 0, keys_only: bool = False
    ) -> Snapshot:
        return await self._call(lambda: self._etcd.range(prefix, revision, min_mod_revision, limit, keys_only))

    async def get(self, key: str) -> tuple[EtcdHeader, KeyValue | None]:
        return await self._call(lambda: (self._etcd.header, self._etcd.kvs.get(key)))

    async def txn(self, compares: Sequence[Compare], ops: Sequence[Op], *, otherwise: Sequence[str] = ()) -> TxnResult:
        return await self._call(lambda: self._etcd.txn(compares, ops, otherwise), changes=bool(ops))

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        following, connected = from_revision, False
        while True:
            arrived: asyncio.Queue[WatchBatch | None] = asyncio.Queue()
            lane = Lane(self._network, NODE, self._node, arrived.put_nowait)
            watcher: _Watcher | None = None
            try:
                with contextlib.suppress(Unavailable):  # Watches retry until they succeed.
                    watcher = await self._call(functools.partial(self._etcd.watch, prefix, following, lane))
                    if connected:
                        yield WatchBatch(replace(self._etcd.header, revision=following - 1), (), reconnected=True)
                    connected = True
                    while (batch := await arrived.get()) is not None:
                        self._process.check_alive()
                        following = batch.header.revision + 1
                        yield batch
            finally:
                lane.close()
                if watcher is not None:
                    self._etcd.unwatch(watcher)
            await self._clock.sleep(0.05)

    async def lease_grant(self, ttl_seconds: int) -> GrantedLease:
        return await self._call(lambda: self._etcd.grant(ttl_seconds))

    async def lease_keepalive(self, lease: int) -> int:
        return await self._call(lambda: self._etcd.keep_alive(lease))

    async def lease_status(self, lease: int) -> LeaseStatus:
        return await self._call(lambda: self._etcd.status(lease))

    async def lease_revoke(self, lease: int) -> None:
        await self._call(functools.partial(self._etcd.revoke, lease))

    async def bytes_in_use(self) -> int:
        return await self._call(lambda: sum(len(kv.key) + len(kv.value) for kv in self._etcd.kvs.values()))

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def _call(self, serve: Callable[[], T], *, changes: bool = False) -> T:
        self._process.check_alive()
        try:
            return await self._network.request(self._node, NODE, serve, TIMEOUT_SECONDS)
        except TimedOut as error:
            raise (TxnOutcomeUnknown if changes else Unavailable)(str(error)) from error
