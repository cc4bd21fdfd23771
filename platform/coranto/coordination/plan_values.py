"""What the allocator's planner takes and gives: values, and no more."""

from __future__ import annotations

from dataclasses import dataclass

from coranto.coordination.layout import MemberId


@dataclass(frozen=True, slots=True)
class PlanItem:
    """`replication` is the number of members that shall hold the item."""

    id: str
    replication: int


@dataclass(frozen=True, slots=True)
class PlanMember:
    """`limit` is the number of items that it may hold. The older of two exiting members is drained first."""

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
class Add:
    """Create an assignment, empty, under the member's lease."""

    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete an assignment."""

    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """Give an assignment another slot, with the same value and lease. To slot 0: promote it."""

    item: str
    member: MemberId
    slot: int
    to_slot: int


Change = Add | Remove | Move


@dataclass(frozen=True, slots=True)
class ItemChanges:
    """The changes of one item, to be applied together. `orphaned` when there is no such item (any more)."""

    item: str
    changes: tuple[Change, ...]
    orphaned: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What to change, by item, and how many replicas cannot be placed for lack of members or capacity."""

    items: tuple[ItemChanges, ...]
    unplaced: int = 0
