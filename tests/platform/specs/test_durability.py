"""The durability of acknowledged appends, and the demands of labels."""

from __future__ import annotations

import itertools

import pytest
from google.protobuf.duration_pb2 import Duration

from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto.specs.durability import (
    ACK_REPLICAS,
    ACK_SYNCED,
    ACK_UNMET,
    ACK_ZONES,
    FSYNC,
    NO_DEMAND,
    Demand,
    Durability,
    ReplicaAnswer,
    demand_of,
    durability_of,
    fsync_of,
    unmet,
    validate_durability,
)
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb


def spec(replication: int, **labels: str) -> pb.JournalSpec:
    names = {"replicas": ACK_REPLICAS, "zones": ACK_ZONES, "synced": ACK_SYNCED, "unmet": ACK_UNMET, "fsync": FSYNC}
    return pb.JournalSpec(
        name="a/journal",
        replication=replication,
        labels=label_set({names[name]: value for name, value in labels.items()}),
        fragment=pb.JournalSpec.Fragment(
            length=1 << 20, compression_codec=pb.NONE, refresh_interval=Duration(seconds=60)
        ),
    )


def test_labels_determine_a_demand_and_a_policy() -> None:
    assert demand_of(spec(3).labels) is NO_DEMAND
    assert fsync_of(spec(3).labels) == ""
    found = spec(3, replicas="3", zones="2", synced="true", unmet="accept")
    assert demand_of(found.labels) == Demand(3, 2, synced=True, refuses=False)
    assert fsync_of(found.labels) == "commit"
    for policy in ("never", "interval", "commit"):
        assert fsync_of(spec(1, fsync=policy).labels) == policy
    assert fsync_of(spec(1, synced="false", fsync="never").labels) == "never"
    validate_durability(found)


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ({"replicas": "4"}, "ack-replicas=4 is more than the journal's replication of 3"),
        ({"zones": "3"}, "ack-zones=3 is more than 2: brokers spread a journal over 2 zones"),
        ({"zones": "two"}, "ack-zones=two is not a number"),
        ({"replicas": "0"}, "ack-replicas=0 is not a number"),
        ({"synced": "yes"}, "ack-synced=yes is not one of false, true"),
        ({"unmet": "wait"}, "ack-unmet=wait is not one of refuse, accept"),
        ({"fsync": "sometimes"}, "fsync=sometimes is not one of never, interval, commit"),
        ({"fsync": ""}, "has the values"),
        ({"synced": "true", "fsync": "never"}, "ack-synced=true contradicts coranto.dev/fsync=never"),
    ],
)
def test_invalid_labels_are_refused_on_apply_but_accepted_on_read(labels: dict[str, str], problem: str) -> None:
    bad = spec(3, **labels)
    change = pb.ApplyRequest(changes=[pb.ApplyRequest.Change(upsert=bad)])
    with pytest.raises(InvalidInput, match=problem):
        validate(change)
    validate(bad)  # A broker of Gazette may have applied it: the journal must stay readable.


def test_a_label_with_two_values_is_refused() -> None:
    twice = pb.LabelSet(labels=[pb.Label(name=ACK_ZONES, value=value) for value in ("1", "2")])
    with pytest.raises(InvalidInput, match="has the values 1, 2; give it one"):
        demand_of(twice)


def test_only_replicas_that_report_the_content_count() -> None:
    answers = [
        ReplicaAnswer("a", synced=True, held_from=0),
        ReplicaAnswer("b", synced=True, held_from=100),
        ReplicaAnswer("c", synced=False, held_from=0),
        ReplicaAnswer("d", synced=True),
    ]
    assert durability_of(answers) == Durability(4, 4, 3, 3)
    assert durability_of(answers, since=99) == Durability(2, 2, 1, 1)
    assert durability_of(answers, since=100) == Durability(3, 3, 2, 2)
    assert durability_of([]) == Durability(0, 0)


def test_a_demand_is_met_by_enough_replicas_or_by_stored_content() -> None:
    for replicas, zones, synced in itertools.product(range(3), range(3), (False, True)):
        demand = Demand(replicas, zones, synced)
        assert Durability(0, 0, stored=True).meets(demand)
        assert Durability(2, 2, 2, 2).meets(demand)
        assert Durability(2, 1).meets(demand) == (zones < 2 and not synced)
        assert Durability(2, 2, 1, 1).meets(demand) == (not synced or max(replicas, zones) < 2)


def test_a_route_that_cannot_meet_a_demand_reports_the_cause() -> None:
    two = Demand(zones=2)
    assert unmet(NO_DEMAND, [("a", False)]) == ""
    assert unmet(two, [("a", False), ("b", False)]) == ""
    assert "Start brokers in other zones" in unmet(two, [("a", True), ("a", True)])
    synced = Demand(zones=2, synced=True)
    assert unmet(synced, [("a", True), ("b", True)]) == ""
    assert "do not report their disks" in unmet(synced, [("a", True), ("b", False)])
