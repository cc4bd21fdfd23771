"""The allocator: keeps every item assigned to as many members as its replication.

Every member runs an `AllocatorLoop`. The member with the oldest member key is the leader and plans for all
(`coranto.coordination.planning`). It applies a plan in transactions. Each transaction asserts that the leader's own
member key is unmodified, so a leader that was deposed without noticing changes nothing. It also asserts that the keys
that the plan was made from are unmodified. A conflict means that the mirror is behind: the loop catches up and plans
again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, is_not
from typing import Generic

import structlog

from coranto.coordination.entities import AssignT, ItemT, MemberT
from coranto.coordination.etcd import MAX_TXN_OPS, Compare, Coordinator, Delete, Op, Put, absent, unmodified
from coranto.coordination.keyspace import KeySpace
from coranto.coordination.keyspace_state import Assignment, KeySpaceState, Member
from coranto.coordination.layout import Layout, MemberId, MemberKey
from coranto.coordination.planning import (
    AddAssignment,
    AllocationPlan,
    ItemChanges,
    MoveAssignment,
    PlanAssignment,
    PlanItem,
    PlanMember,
    Planner,
    RemoveAssignment,
    can_drain,
)
from coranto.effects import Clock, SystemClock
from coranto.errors import InvalidInput, TxnOutcomeUnknown, Unavailable

_log = structlog.get_logger(__name__)

_PAUSE_SECONDS = 0.5
_REST = 4.0
"""The pause after a plan, as a multiple of the planning time. It limits the leader's processor use when many changes
arrive in a large key space."""


@dataclass(frozen=True, slots=True)
class EtcdTransaction:
    compares: tuple[Compare, ...]
    ops: tuple[Op, ...]


class StatePlanner(Generic[ItemT, MemberT, AssignT]):
    """Plans for successive states of the key space, reusing results for unchanged assignments."""

    def __init__(self) -> None:
        self._planner = Planner()
        self._known: dict[str, tuple[list[Assignment[AssignT]], list[PlanAssignment]]] = {}

    def plan(self, state: KeySpaceState[ItemT, MemberT, AssignT]) -> AllocationPlan:
        return self._planner.plan(_items(state), _members(state), self._assignments(state))

    def _assignments(self, state: KeySpaceState[ItemT, MemberT, AssignT]) -> Iterator[PlanAssignment]:
        """Yield all assignments. Check an item's consistency again only when one of its assignments was written."""
        before, self._known = self._known, {}
        items = {item.id for item in state.items}
        for item, group in groupby(state.all_assignments, key=attrgetter("item")):
            if item not in items and state.entries.get(state.layout.item_key(item)) is not None:
                continue  # Its spec does not decode. Leave it as it is until the spec is repaired.
            found = list(group)
            known = before.get(item)
            if known is None or len(known[0]) != len(found) or any(map(is_not, known[0], found)):
                consistent = state.entities.consistent([(a.key, a.value) for a in found])
                planned = [
                    PlanAssignment(item, a.member, a.slot, is_consistent)
                    for a, is_consistent in zip(found, consistent, strict=True)
                ]
                known = (found, planned)
            self._known[item] = known
            yield from known[1]


def may_drain(state: KeySpaceState[ItemT, MemberT, AssignT], member: MemberId) -> bool:
    """Return True if the other members have capacity for all items of `member`, so that waiting makes sense."""
    return can_drain(_items(state), _members(state), member)


def _items(state: KeySpaceState[ItemT, MemberT, AssignT]) -> Iterator[PlanItem]:
    for item in state.items:
        yield PlanItem(item.id, state.entities.replication(item.spec))


def _members(state: KeySpaceState[ItemT, MemberT, AssignT]) -> Iterator[PlanMember]:
    for entry in state.entries.prefixed(state.layout.members):
        if isinstance(entry.decoded, Member):
            member: Member[MemberT] = entry.decoded
            limit, exiting = state.entities.item_limit(member.spec), state.entities.exiting(member.spec)
            yield PlanMember(member.id, limit, exiting, member.kv.create_revision)
        elif (stray := _member_of(state.layout, entry.kv.key)) is not None:
            # It is alive, but its spec does not decode: assign nothing new to it, and let others take over its items.
            yield PlanMember(stray, 0)


def _member_of(layout: Layout, key: str) -> MemberId | None:
    try:
        found = layout.decode(key)
    except InvalidInput:
        return None
    return found.member if isinstance(found, MemberKey) else None


def transactions(
    state: KeySpaceState[ItemT, MemberT, AssignT], changes: AllocationPlan, leader: Compare
) -> Iterator[EtcdTransaction]:
    """Yield a plan for `state` as transactions within etcd's limits. All changes of one item share a transaction."""
    compares: dict[Compare, None] = {leader: None}
    ops: list[Op] = []
    for item in changes.items:
        item_compares, item_ops = _item_transaction(state, item)
        wanted = compares | item_compares
        if ops and (len(wanted) > MAX_TXN_OPS or len(ops) + len(item_ops) > MAX_TXN_OPS):
            yield EtcdTransaction(tuple(compares), tuple(ops))
            wanted, ops = {leader: None} | item_compares, []
        compares = wanted
        ops.extend(item_ops)
    if ops:
        yield EtcdTransaction(tuple(compares), tuple(ops))


def _item_transaction(
    state: KeySpaceState[ItemT, MemberT, AssignT], item: ItemChanges
) -> tuple[dict[Compare, None], list[Op]]:
    layout = state.layout
    compares: dict[Compare, None] = {}
    ops: list[Op] = []
    spec = state.item(item.item)
    # The item's spec has not changed since the plan was made, or the item is still absent.
    compares[absent(layout.item_key(item.item)) if spec is None else unmodified(spec.kv)] = None
    # None of its assignments has changed since: none became inconsistent or vanished.
    current = {(a.member, a.slot): a for a in state.assignments_in_key_order(item.item)}
    for assignment in current.values():
        compares[unmodified(assignment.kv)] = None
    for change in item.changes:
        member = state.member(change.member)
        match change:
            case AddAssignment():
                assert member is not None  # The plan adds to members of this state only.
                compares[unmodified(member.kv)] = None  # Its limit and its lease.
                key = layout.assignment_key(change.item, change.member, change.slot)
                ops.append(Put(key, b"", lease=member.kv.lease))
            case RemoveAssignment():
                if state.entries.get(layout.member_key(change.member)) is None:
                    compares[absent(layout.member_key(change.member))] = None
                ops.append(Delete(current[change.member, change.slot].kv.key))
            case MoveAssignment():
                kv = current[change.member, change.slot].kv
                key = layout.assignment_key(change.item, change.member, change.to_slot)
                ops += [Delete(kv.key), Put(key, kv.value, lease=kv.lease)]
    return compares, ops


class AllocatorLoop(Generic[ItemT, MemberT, AssignT]):
    """Plans and applies changes while `member` is the leader, and watches otherwise. Start `run` as a task."""

    def __init__(
        self,
        keyspace: KeySpace[ItemT, MemberT, AssignT],
        coordinator: Coordinator,
        member: MemberId,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._keyspace = keyspace
        self._coordinator = coordinator
        self._member = member
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._planner = StatePlanner[ItemT, MemberT, AssignT]()
        self._unplaced = 0

    async def run(self) -> None:
        """Plan and apply until cancelled. Raises CoordinationError when the key space fails or etcd refuses a call."""
        while True:
            state = self._keyspace.state
            leader = state.leader
            if leader is None or leader.id != self._member:
                await self._keyspace.wait_for_change(state)
                continue
            began = self._clock.monotonic()
            changes = self._planner.plan(state)
            rest = _REST * (self._clock.monotonic() - began)
            self._report(changes)
            if not changes.items:
                await self._keyspace.wait_for_change(state)
            else:
                try:
                    await self._apply(state, changes, unmodified(leader.kv))
                except (TxnOutcomeUnknown, Unavailable) as error:
                    _log.warning("allocator.retry", error=str(error))
                    rest += _PAUSE_SECONDS
            await self._clock.sleep(rest)

    async def _apply(
        self, state: KeySpaceState[ItemT, MemberT, AssignT], changes: AllocationPlan, leader: Compare
    ) -> None:
        """Apply the plan up to the first conflict, and wait for the mirror to show it."""
        for transaction in transactions(state, changes, leader):
            result = await self._coordinator.txn(transaction.compares, transaction.ops)
            revision = result.header.revision
            if not result.succeeded:
                _log.info("allocator.conflict", planned_at=state.revision, revision=revision)
                if await self._keyspace.wait_for_revision(revision) is state:
                    # Nothing in the mirror explains the conflict. Pause before trying again.
                    await self._clock.sleep(_PAUSE_SECONDS)
                return
        kinds = [type(change).__name__.lower() for item in changes.items for change in item.changes]
        _log.info(
            "allocator.applied",
            items=len(changes.items),
            added=kinds.count("add"),
            removed=kinds.count("remove"),
            moved=kinds.count("move"),
            revision=revision,
        )
        await self._keyspace.wait_for_revision(revision)

    def _report(self, changes: AllocationPlan) -> None:
        if changes.unplaced != self._unplaced:
            self._unplaced = changes.unplaced
            level = logging.WARNING if changes.unplaced else logging.INFO
            _log.log(level, "allocator.unplaced_replicas", count=changes.unplaced)
