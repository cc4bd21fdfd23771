"""The decoding of the key space's values.

The mirror and the allocator are generic. `Entities` decodes values for them and returns the properties that planning
needs. `JournalEntities` is the implementation for brokers: items are journals, members are brokers, and an assignment's
value is the Route that its primary last synchronized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from coranto.coordination.layout import AssignmentKey, MemberId
from coranto.errors import InvalidInput
from coranto.specs.validation import (
    effective_replication,
    routes_equivalent,
    validate_broker_spec,
    validate_journal_spec,
    validate_route,
)
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb

ItemT = TypeVar("ItemT")
MemberT = TypeVar("MemberT")
AssignT = TypeVar("AssignT")


class Entities(Protocol[ItemT, MemberT, AssignT]):
    """Decodes values and returns their properties. Raises InvalidInput for a value that is not valid for its key."""

    def decode_item(self, item: str, value: bytes) -> ItemT: ...

    def decode_member(self, member: MemberId, value: bytes) -> MemberT: ...

    def decode_assignment(self, key: AssignmentKey, value: bytes) -> AssignT: ...

    def replication(self, item: ItemT) -> int:
        """Return the number of members that the item should be assigned to."""
        ...

    def item_limit(self, member: MemberT) -> int:
        """Return the maximum number of items that the member may be assigned."""
        ...

    def exiting(self, member: MemberT) -> bool:
        """Return True if the member is leaving and wants to give up its assignments."""
        ...

    def endpoint(self, member: MemberT) -> str: ...

    def consistent(self, assignments: Sequence[tuple[AssignmentKey, AssignT]]) -> Sequence[bool]:
        """Return a flag for each assignment: True if it is consistent, so that another one may be removed.

        `assignments` are *all* assignments of one item, in key order.
        """
        ...


class ProcessEntities:
    """The part of `Entities` that is the same for all kinds of processes."""

    def exiting(self, member: pb.BrokerSpec | pc.ConsumerSpec) -> bool:
        return member.exiting

    def endpoint(self, member: pb.BrokerSpec | pc.ConsumerSpec) -> str:
        return member.process_spec.endpoint


class JournalEntities(ProcessEntities):
    """Journals, brokers and their Routes. `max_replication` caps the replication of every journal."""

    def __init__(self, *, max_replication: int = 9) -> None:
        self._max_replication = max_replication

    def decode_item(self, item: str, value: bytes) -> pb.JournalSpec:
        spec = parse(pb.JournalSpec(), value)
        validate_journal_spec(spec)
        if spec.name != item:
            raise InvalidInput(
                f"the spec is of journal {spec.name!r}, but its key is of {item!r}", field="JournalSpec.name"
            )
        return spec

    def decode_member(self, member: MemberId, value: bytes) -> pb.BrokerSpec:
        spec = parse(pb.BrokerSpec(), value)
        validate_broker_spec(spec)
        return require_own(spec, member)

    def decode_assignment(self, key: AssignmentKey, value: bytes) -> pb.Route:
        """Decode a Route. An empty value is a Route without members: nothing was synchronized yet."""
        route = parse(pb.Route(), value) if value else pb.Route(primary=-1)
        validate_route(route)
        return route

    def replication(self, item: pb.JournalSpec) -> int:
        return effective_replication(item, self._max_replication)

    def item_limit(self, member: pb.BrokerSpec) -> int:
        return member.journal_limit

    def consistent(self, assignments: Sequence[tuple[AssignmentKey, pb.Route]]) -> Sequence[bool]:
        """Return all True if every value is the Route that the keys imply (endpoints ignored), else all False."""
        implied = implied_route([key for key, _ in assignments])
        same = all(routes_equivalent(value, implied) for _, value in assignments)
        return [same] * len(assignments)


def implied_route(keys: Sequence[AssignmentKey]) -> pb.Route:
    """Return the Route that an item's assignment keys, in key order, imply; primary -1 if slot 0 is vacant."""
    route = pb.Route(primary=-1)
    for index, key in enumerate(keys):
        if key.slot == 0:
            route.primary = index
        route.members.add(zone=key.member.zone, suffix=key.member.suffix)
    return route


MessageT = TypeVar("MessageT", bound=Message)
ProcessT = TypeVar("ProcessT", pb.BrokerSpec, pc.ConsumerSpec)


def require_own(spec: ProcessT, member: MemberId) -> ProcessT:
    """Return the spec of a process if its id is `member`. Raises InvalidInput otherwise."""
    found = MemberId(spec.process_spec.id.zone, spec.process_spec.id.suffix)
    if found != member:
        name = spec.DESCRIPTOR.name
        raise InvalidInput(f"the spec is of process {found}, but its key is of {member}", field=f"{name}.id")
    return spec


def parse(message: MessageT, value: bytes) -> MessageT:
    """Parse a value in etcd into `message`, and return it. Raises InvalidInput."""
    try:
        message.ParseFromString(value)
    except DecodeError as error:
        raise InvalidInput(f"the value is not a {message.DESCRIPTOR.name}: {error}") from error
    return message
