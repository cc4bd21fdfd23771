"""Resolution: from a journal's name to the brokers that are responsible for it now.

The resolver uses the mirrored key space. It answers with the journal's spec, its Route and the etcd revision of both.
If this broker is part of the Route, the answer also has the local replica, and a signal that fires when the answer is
no longer current. The resolver also starts and stops the local replicas as assignments change:

=========================================  =============================================================================
a journal is assigned to this broker       start a replica
the primary is demoted to a plain replica  start a new replica in its place
the journal was deleted and created again  start a new replica in its place; the old one's content is dropped
the journal was unassigned or deleted      stop the replica
assignments or stores change               the replica stays; resolutions are invalidated
others continued without local content     start a new replica in its place
=========================================  =============================================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import structlog

from coranto.coordination.headers import check_header, process_id
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import Assignment, Item, KeySpaceState
from coranto.coordination.layout import MemberId
from coranto.errors import Unavailable
from coranto.names import strip_metadata
from coranto.security.tokens import Claims
from coranto.wire import protocol_pb2 as pb
from coranto_broker.authorization import UNRESTRICTED
from coranto_broker.ownership import Signal
from coranto_broker.replication.replica import Replica

REVISION_TIMEOUT_SECONDS = 20.0
"""The maximum wait of a call for an etcd revision. Normally a revision arrives in milliseconds."""
MAX_WAITING_FOR_REVISIONS = 512

JournalKeySpace = KeySpace[pb.JournalSpec, pb.BrokerSpec, pb.Route]
JournalState = KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Resolution:
    """An answer of the resolver, valid as of `state` and until `invalidated` fires (None without a local replica).

    `header` has the Route, the etcd revision, and the broker that must serve: this broker if it answers with an error
    status or serves locally, the primary if one is required, and otherwise any.
    """

    status: pb.Status.ValueType
    state: JournalState = field(repr=False)
    local_id: pb.ProcessSpec.ID
    header: pb.Header
    item: Item[pb.JournalSpec] | None
    assignments: Sequence[Assignment[pb.Route]]
    replica: Replica | None
    invalidated: Signal | None

    @property
    def spec(self) -> pb.JournalSpec:
        assert self.item is not None  # Only JOURNAL_NOT_FOUND has no item.
        return self.item.spec

    @cached_property
    def encoded_header(self) -> bytes:
        """An encoded response to an append, with only the header."""
        return pb.AppendResponse(header=self.header).SerializeToString()

    @property
    def replication(self) -> int:
        """The journal's desired number of replicas."""
        return self.state.entities.replication(self.spec)

    @property
    def is_local(self) -> bool:
        """True if this broker must serve."""
        return self.header.process_id == self.local_id

    @property
    def require_replica(self) -> Replica:
        """The local replica of a resolution that has one."""
        assert self.replica is not None
        return self.replica


class ReplicaFactory(Protocol):
    """Starts and stops replicas."""

    def start_replica(self, item: Item[pb.JournalSpec], *, primary: bool) -> Replica: ...

    def spec_changed(self, replica: Replica, spec: pb.JournalSpec) -> None:
        """Note that the journal's spec, or one of its assignments, has changed."""
        ...

    def stop_replica(self, replica: Replica, *, drop: bool) -> None:
        """Stop a replica in the background. With `drop`, the journal was deleted, and its local content is removed."""
        ...

    def wanted(self, journal: str) -> None:
        """Note that a call needs the replica of a journal, which may not have started."""
        ...


@dataclass(slots=True)
class _LocalReplica:
    """A local replica and the basis of its current resolutions."""

    replica: Replica
    create_revision: int
    primary: bool
    basis: tuple[object, ...]
    signal: Signal = field(default_factory=Signal)


class Resolver:
    """Resolves journals, and starts and stops local replicas as assignments change."""

    def __init__(self, keyspace: JournalKeySpace, member: MemberId, factory: ReplicaFactory) -> None:
        self._keyspace = keyspace
        self._member = member
        self._factory = factory
        self._locals: dict[str, _LocalReplica] = {}
        self._stopped = False
        self._waiting_for_revisions = 0
        self._cache: dict[tuple[str, bool, bool], Resolution] = {}
        self._due: set[str] = set()  # Journals that the key space was not applied to yet.
        self._stop_observing = keyspace.observe(self._update)

    def start(self) -> None:
        """Start replicas for the journals that are already assigned. The key space must be loaded."""
        state = self._keyspace.state
        self._follow(state, self._all(state))

    @property
    def local_replicas(self) -> list[Replica]:
        return [local.replica for local in self._locals.values()]

    def replica_of(self, journal: str) -> Replica | None:
        """Return the local replica of a journal, if this broker serves it now."""
        local = self._locals.get(journal)
        return local.replica if local is not None else None

    async def resolve(
        self,
        journal: str,
        *,
        may_proxy: bool,
        require_primary: bool,
        min_revision: int = 0,
        proxy_header: pb.Header | None = None,
        claims: Claims = UNRESTRICTED,
    ) -> Resolution:
        """Resolve a journal as of `min_revision` or later.

        `proxy_header` is the resolution of a peer that forwarded the call; its revision is a minimum too. A journal
        that `claims` do not cover is resolved as a missing one. Raises InvalidInput if the header is not for this
        broker, and Unavailable if the revision does not arrive in time.
        """
        if proxy_header is not None:
            check_header(proxy_header, self._keyspace.header.cluster_id, self._member, "broker")
            min_revision = max(min_revision, proxy_header.etcd.revision)
        if min_revision > self._keyspace.known_revision:
            await self.wait_for_revision(min_revision)
        key = strip_metadata(journal), may_proxy, require_primary
        if not claims.covers_all:
            item = self._keyspace.state.item(key[0])
            if item is not None and not claims.covers(item.id, item.spec.labels):
                return self._resolve(*key, hidden=True)
        cached = self._cache.get(key)
        # After `stop` the cache is no longer cleared, so its entries may be outdated.
        if cached is None or cached.state is not self._keyspace.state:
            cached = self._resolve(*key)
            if cached.item is None:
                return cached  # The cache must not grow with names of missing journals.
            self._cache[key] = cached
            if cached.status == pb.OK and cached.is_local:  # The answer is then the same with and without proxying.
                self._cache[key[0], not may_proxy, require_primary] = cached
        return cached

    async def wait_for_revision(self, revision: int) -> None:
        """Wait for an etcd revision. Raises Unavailable if it does not arrive in time.

        Each wait polls etcd, so both the number and the duration of waits are limited.
        """
        if self._waiting_for_revisions >= MAX_WAITING_FOR_REVISIONS:
            raise Unavailable(f"{self._waiting_for_revisions} calls already wait for etcd revisions; try again later")
        self._waiting_for_revisions += 1
        try:
            async with asyncio.timeout(REVISION_TIMEOUT_SECONDS):
                await self._keyspace.wait_for_revision(revision)
        except TimeoutError:
            raise Unavailable(
                f"etcd revision {revision} did not arrive within {REVISION_TIMEOUT_SECONDS:g} seconds; this broker "
                f"has {self._keyspace.known_revision}. Use a revision from an answer of etcd, or try again later"
            ) from None
        finally:
            self._waiting_for_revisions -= 1

    def known(self, journal: str, min_revision: int = 0) -> Resolution | None:
        """Return the cached answer of `resolve` for callers that require the primary and may access every journal.

        Returns None if nothing is cached, or if `resolve` would have to wait for `min_revision`. The name must not have
        metadata. If this broker is not the primary, the answer is for calls that may be proxied.
        """
        if min_revision > self._keyspace.known_revision:
            return None
        found = self._cache.get((journal, True, True))
        return found if found is not None and found.state is self._keyspace.state else None

    def is_current(self, resolution: Resolution) -> bool:
        """Return True if the key space has not changed since `resolution`."""
        return resolution.state is self._keyspace.state

    async def wait_for_change(self, resolution: Resolution) -> None:
        """Wait until the key space has changed since `resolution`."""
        await self._keyspace.wait_for_change(resolution.state)

    def permits_hold(self, resolution: Resolution) -> bool:
        """Return True if the journal's flags and suspension are unchanged since `resolution`, or it was deleted."""
        state = self._keyspace.state
        if state is resolution.state:
            return True
        item = state.item(resolution.spec.name)
        if item is None:
            return True
        return item.spec.flags == resolution.spec.flags and item.spec.suspend == resolution.spec.suspend

    def stop(self) -> None:
        """Stop all local replicas. Later resolutions do not have them."""
        self._stop_observing()
        self._stopped = True
        self._cache.clear()
        stopped, self._locals = self._locals, {}
        for local in stopped.values():
            self._stop_local(local, drop=False)

    def restart(self, replica: Replica) -> None:
        """Replace a replica that must no longer serve."""
        local = self._locals.get(replica.journal)
        if local is None or local.replica is not replica:
            return
        del self._locals[replica.journal]
        self._stop_local(local, drop=False)
        self._follow(self._keyspace.state, (replica.journal,))

    def _resolve(self, journal: str, may_proxy: bool, require_primary: bool, *, hidden: bool = False) -> Resolution:
        state = self._keyspace.state
        # A broker without a member key may still proxy. Its id must only differ from the empty id.
        present = state.member(self._member) is not None
        local_id = process_id(self._member if present else MemberId("this-broker", "missing-from-etcd"))
        item = state.item(journal) if not hidden else None
        route = state.route_of(journal) if not hidden else pb.Route(primary=-1)
        header = pb.Header(route=route, etcd=state.header.to_wire())
        if require_primary and route.primary != -1:
            header.process_id.CopyFrom(route.members[route.primary])
        elif not require_primary and local_id in route.members:
            header.process_id.CopyFrom(local_id)
        local = self._locals.get(journal) if not hidden else None
        status = self._status(item, route, header.process_id == local_id, may_proxy, require_primary)
        if status == pb.OK and self._stopped and header.process_id == local_id:
            # This broker is shutting down or has lost its lease, so it counts as gone.
            status = pb.NO_JOURNAL_PRIMARY_BROKER if require_primary else pb.NOT_JOURNAL_BROKER
        if status == pb.OK and header.process_id == local_id and local is None:
            # The journal's entry could not be decoded when it was assigned, so there is no replica.
            raise Unavailable(f"this broker has no replica of {journal}; see its log")
        if status != pb.OK:
            header.process_id.CopyFrom(local_id)
        elif local is not None:
            self._factory.wanted(journal)
        return Resolution(
            status,
            state,
            local_id,
            header,
            item,
            state.assignments_in_key_order(journal) if not hidden else (),
            local.replica if local else None,
            local.signal if local else None,
        )

    @staticmethod
    def _status(
        item: Item[pb.JournalSpec] | None, route: pb.Route, is_local: bool, may_proxy: bool, require_primary: bool
    ) -> pb.Status.ValueType:
        if item is None:
            return pb.JOURNAL_NOT_FOUND
        if item.spec.suspend.level == pb.JournalSpec.Suspend.FULL:
            return pb.SUSPENDED
        if require_primary and route.primary == -1:
            return pb.NO_JOURNAL_PRIMARY_BROKER
        if not route.members:
            return pb.INSUFFICIENT_JOURNAL_BROKERS
        if not may_proxy and not is_local:
            return pb.NOT_JOURNAL_PRIMARY_BROKER if require_primary else pb.NOT_JOURNAL_BROKER
        return pb.OK

    def _update(self, state: JournalState) -> None:
        """Apply a new state of the key space to the local replicas. Observers must not block."""
        self._follow(state, state.changed if state.changed is not None else self._all(state))

    def _all(self, state: JournalState) -> set[str]:
        """Return the journals with an assignment to, or a replica on, this broker."""
        return {*self._locals, *(each.item for each in state.by_member.get(self._member, ()))}

    def _follow(self, state: JournalState, journals: Iterable[str]) -> None:
        """Apply the key space to the replicas of these journals. After an error, the next call does the rest."""
        self._cache.clear()
        if self._stopped:
            return
        self._due.update(journals)
        for journal in sorted(self._due):
            self._follow_one(state, journal)
            self._due.discard(journal)

    def _follow_one(self, state: JournalState, journal: str) -> None:
        local = self._locals.get(journal)
        assignments = state.assignments_in_key_order(journal)
        mine = next((each for each in reversed(assignments) if each.member == self._member), None)
        if local is not None:
            # Check the entry, not the item: a journal with an invalid spec must keep its content.
            entry = state.entries.get(state.layout.item_key(journal))
            deleted = entry is None or entry.kv.create_revision != local.create_revision
            if mine is None or deleted or (local.primary and mine.slot != 0):
                del self._locals[journal]
                self._stop_local(local, drop=deleted)
                local = None
        item = state.item(journal) if mine is not None else None
        if mine is None or item is None:
            return  # The journal was deleted and its assignment will follow, or its spec is invalid.
        basis = self._basis(assignments, item)
        if local is None:
            replica = self._factory.start_replica(item, primary=mine.slot == 0)
            self._locals[journal] = _LocalReplica(replica, item.create_revision, mine.slot == 0, basis)
            return
        self._factory.spec_changed(local.replica, item.spec)
        if mine.slot == 0 and not local.primary:
            local.primary = True
            local.replica.promoted()
        if local.basis != basis:
            local.basis = basis
            route = state.route_of(journal, endpoints=False)
            members = [f"{member.zone}#{member.suffix}" for member in route.members]
            primary = members[route.primary] if route.primary >= 0 else None
            _log.info("route.changed", journal=journal, route=members, primary=primary)
            stale, local.signal = local.signal, Signal()
            stale.fire()

    @staticmethod
    def _basis(assignments: Iterable[Assignment[pb.Route]], item: Item[pb.JournalSpec]) -> tuple[object, ...]:
        """Return the basis of a resolution: the assignments, by key and revision, and the stores."""
        return tuple((each.key, each.kv.mod_revision) for each in assignments), tuple(item.spec.fragment.stores)

    def _stop_local(self, local: _LocalReplica, *, drop: bool) -> None:
        local.signal.fire()
        self._factory.stop_replica(local.replica, drop=drop)


async def closing(replicas: Sequence[Replica]) -> None:
    """Wait until all of these replicas have stopped."""
    await asyncio.gather(*(replica.stopped.wait() for replica in replicas))
