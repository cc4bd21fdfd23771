"""The resolver of shard ids to the processes that serve them. It also keeps local replicas in line with assignments:

==============================================  ====================================================================
a shard is assigned to this process             start a replica
its assignment moves to a lower slot            the replica stays; at slot 0 it is promoted
it was unassigned and assigned again            start a new replica in its place
its spec changes                                inform the replica
it is no longer assigned                        stop the replica
==============================================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from coranto import labels
from coranto.coordination.headers import check_header, process_id
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import KeySpaceState
from coranto.coordination.layout import MemberId
from coranto.security.tokens import Claims
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.runtime.replica import ShardReplica
from coranto_consumers.runtime.specs import with_meta

ShardKeySpace = KeySpace[pc.ShardSpec, pc.ConsumerSpec, pc.ReplicaStatus]
ShardState = KeySpaceState[pc.ShardSpec, pc.ConsumerSpec, pc.ReplicaStatus]


@dataclass(frozen=True, slots=True)
class ShardResolution:
    """The server of a shard: `replica` if it is this process, else the process that `header` names."""

    status: pc.Status.ValueType
    header: pb.Header
    spec: pc.ShardSpec | None
    replica: ShardReplica | None


@dataclass(slots=True)
class _LocalShard:
    replica: ShardReplica
    slot: int
    create_revision: int


def covers(claims: Claims, spec: pc.ShardSpec) -> bool:
    """Return True if a shard is in the scope of claims. Their selector is matched with its labels, and `id`."""
    return claims.covers_all or labels.matches(claims.selector, with_meta(spec))


class ShardResolver:
    """Resolves shards, and keeps local replicas in line with assignments."""

    def __init__(
        self,
        keyspace: ShardKeySpace,
        member: MemberId,
        start: Callable[[pc.ShardSpec], ShardReplica],
        stop: Callable[[ShardReplica], None],
    ) -> None:
        """`start` returns a started replica; `stop` stops one in the background. The key space must be loaded."""
        self._keyspace = keyspace
        self._member = member
        self._start = start
        self._stop = stop
        self._locals: dict[str, _LocalShard] = {}
        self._due: set[str] = set()  # Shards whose replicas may not follow the key space yet.
        self._stopped = False
        self._stop_observing = keyspace.observe(self._update)
        self._follow(keyspace.state, self._all(keyspace.state))

    @property
    def replicas(self) -> list[ShardReplica]:
        return [local.replica for local in self._locals.values()]

    def has(self, shard: str) -> bool:
        """Return True if this process has a replica of a shard that is assigned to it."""
        return shard in self._locals

    async def resolve(
        self, shard: str, claims: Claims, *, may_proxy: bool = True, proxy_header: pb.Header | None = None
    ) -> ShardResolution:
        """Resolve a shard, as of the etcd revision of `proxy_header` or later.

        `proxy_header` is the header of the peer that passed the call on. A shard that `claims` do not cover counts as
        absent. Raises InvalidInput for a header that is not meant for this process.
        """
        if proxy_header is not None:
            check_header(proxy_header, self._keyspace.header.cluster_id, self._member, "process")
            await self._keyspace.wait_for_revision(proxy_header.etcd.revision)
        state = self._keyspace.state
        item = state.item(shard)
        if item is not None and not covers(claims, item.spec):
            item = None
        route = state.route_of(shard) if item is not None else pb.Route(primary=-1)
        ours = process_id(self._member)
        header = pb.Header(process_id=ours, route=route, etcd=state.header.to_wire())
        status = pc.OK
        if item is None:
            status = pc.SHARD_NOT_FOUND
        elif route.primary == -1:
            status = pc.NO_SHARD_PRIMARY
        elif route.members[route.primary] != ours:
            if may_proxy:
                header.process_id.CopyFrom(route.members[route.primary])
            else:
                status = pc.NOT_SHARD_PRIMARY
        replica = None
        if status == pc.OK and header.process_id == ours:
            local = self._locals.get(shard)
            if local is None:
                status = pc.SHARD_STOPPED  # This process is ending.
            else:
                replica = local.replica
        return ShardResolution(status, header, item.spec if item is not None else None, replica)

    def stop(self) -> None:
        """Stop all local replicas, and start no more."""
        self._stop_observing()
        self._stopped = True
        stopped, self._locals = self._locals, {}
        for local in stopped.values():
            self._stop(local.replica)

    def _update(self, state: ShardState) -> None:
        """Bring local replicas in line with the key space. It is an observer, so it must not block."""
        self._follow(state, state.changed if state.changed is not None else self._all(state))

    def _all(self, state: ShardState) -> set[str]:
        """Return the shards that are assigned to this process, and those that it has replicas of."""
        return {*self._locals, *(each.item for each in state.by_member.get(self._member, ()))}

    def _follow(self, state: ShardState, shards: Iterable[str]) -> None:
        """Bring the replicas of these shards in line. After an error, the rest is retried at the next change."""
        if self._stopped:
            return
        self._due.update(shards)
        for shard in sorted(self._due):
            self._follow_one(state, shard)
            self._due.discard(shard)

    def _follow_one(self, state: ShardState, shard: str) -> None:
        assignments = state.assignments_in_key_order(shard)
        mine = next((each for each in reversed(assignments) if each.member == self._member), None)
        local = self._locals.get(shard)
        if local is not None and (
            mine is None or (mine.slot >= local.slot and mine.kv.create_revision != local.create_revision)
        ):
            self._stop(self._locals.pop(shard).replica)
            local = None
        item = state.item(shard) if mine is not None else None
        if mine is None or item is None:
            return  # The shard is deleted and the assignment will follow, or its spec cannot be read.
        if local is None:
            local = self._locals[shard] = _LocalShard(self._start(item.spec), mine.slot, mine.kv.create_revision)
        elif local.replica.spec != item.spec:
            local.replica.update(item.spec)
        local.slot, local.create_revision = mine.slot, mine.kv.create_revision
        if mine.slot == 0:
            local.replica.promote()
