"""Values of the key space: their validity under a key, and the routes that keys imply."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from coranto.coordination.entities import JournalEntities, implied_route
from coranto.coordination.layout import AssignmentKey, MemberId
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

ENTITIES = JournalEntities(max_replication=2)
A, B = MemberId("a", "member-one"), MemberId("b", "member-two")


def key(member: MemberId, slot: int) -> AssignmentKey:
    return AssignmentKey("a/journal", member, slot)


def broker(member: MemberId) -> pb.BrokerSpec:
    own = pb.ProcessSpec(id=pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix), endpoint="http://host:80")
    return pb.BrokerSpec(process_spec=own, journal_limit=5)


def spec(name: str, replication: int = 3) -> pb.JournalSpec:
    fragment = pb.JournalSpec.Fragment(length=1024, compression_codec=pb.NONE)
    fragment.refresh_interval.seconds = 30
    return pb.JournalSpec(name=name, replication=replication, fragment=fragment)


@pytest.mark.parametrize(
    ("decode", "key", "value"),
    [
        (ENTITIES.decode_item, "a/journal", b"\xff"),
        (ENTITIES.decode_item, "a/journal", spec("another/journal")),
        (ENTITIES.decode_item, "a/journal", pb.JournalSpec(name="a/journal")),
        (ENTITIES.decode_member, A, broker(B)),
        (ENTITIES.decode_member, A, pb.BrokerSpec()),
        (ENTITIES.decode_assignment, key(A, 0), pb.Route(primary=3)),
    ],
)
def test_values_that_contradict_their_key_are_refused(decode: Any, key: Any, value: Message | bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(key, value if isinstance(value, bytes) else value.SerializeToString())


def test_values_are_decoded_and_replication_is_capped() -> None:
    journal = ENTITIES.decode_item("a/journal", spec("a/journal").SerializeToString())
    assert ENTITIES.replication(journal) == 2
    member = ENTITIES.decode_member(A, broker(A).SerializeToString())
    assert (ENTITIES.item_limit(member), ENTITIES.exiting(member)) == (5, False)
    assert ENTITIES.endpoint(member) == "http://host:80"
    assert ENTITIES.decode_assignment(key(A, 0), b"").primary == -1


def test_assignments_are_consistent_when_all_have_the_route_of_their_keys() -> None:
    keys = [key(A, 1), key(B, 0)]
    route = implied_route(keys)
    assert (route.primary, len(route.members)) == (1, 2)
    assert ENTITIES.consistent([(each, route) for each in keys]) == [True, True]
    assert ENTITIES.consistent([(keys[0], route), (keys[1], pb.Route(primary=-1))]) == [False, False]
    assert implied_route([key(A, 1)]).primary == -1
