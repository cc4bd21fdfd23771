"""The value types of the allocator's planner: its input and its output."""

from __future__ import annotations

from dataclasses import dataclass

from coranto.coordination.layout import MemberId


@dataclass(frozen=True, slots=True)
class PlanItem:
    """An item to place. `replication` is the number of members that should hold it."""

    id: str
    replication: int


@dataclass(frozen=True, slots=True)
class PlanMember:
    """A member that may hold up to `limit` items. The older of two exiting members is drained first."""

    id: MemberId
    limit: int
    exiting: bool = False
    create_revision: int = 0


@dataclass(frozen=True, slots=True)
class PlanAssignment:
    item: str
    member: MemberId
    slot: int
    consistent: bool


@dataclass(frozen=True, slots=True)
class AddAssignment:
    """Create an assignment, empty, under the member's lease."""

    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class RemoveAssignment:
    """Delete an assignment."""

    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class MoveAssignment:
    """Give an assignment another slot, with the same value and lease. A move to slot 0 promotes it to primary."""

    item: str
    member: MemberId
    slot: int
    to_slot: int


Change = AddAssignment | RemoveAssignment | MoveAssignment


@dataclass(frozen=True, slots=True)
class ItemChanges:
    """The changes of one item, to be applied together. `orphaned` is true if there is no such item (any more)."""

    item: str
    changes: tuple[Change, ...]
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class AllocationPlan:
    """The changes to make, by item, and the number of replicas without a place, for lack of members or capacity."""

    items: tuple[ItemChanges, ...]
    unplaced: int = 0
