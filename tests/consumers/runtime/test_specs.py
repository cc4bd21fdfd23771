"""Shard specs: validation, status, and values for the allocator."""

from __future__ import annotations

import pytest

from coranto.coordination.layout import AssignmentKey, MemberId
from coranto.errors import InvalidInput
from coranto.labels import label_set
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.specs import (
    ShardEntities,
    most_advanced,
    recovery_log,
    replication,
    validate_change,
    validate_shard_spec,
)

Code = pc.ReplicaStatus


def shard(id: str = "shard-one", *, journals: tuple[str, ...] = ("a/journal",), **fields: object) -> pc.ShardSpec:
    spec = pc.ShardSpec(id=id, **fields)  # type: ignore[arg-type]
    spec.max_txn_duration.FromSeconds(1)
    for journal in journals:
        spec.sources.add(journal=journal)
    return spec


def changed(**fields: object) -> pc.ShardSpec:
    spec = shard()
    spec.MergeFrom(pc.ShardSpec(**fields))  # type: ignore[arg-type]
    return spec


def test_a_plain_spec_is_valid():
    validate_shard_spec(shard(labels=label_set({"app": "sums"})))
    validate_shard_spec(shard(recovery_log_prefix="recovery/logs", hint_prefix="/hints"))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (shard("bad id"), "id"),
        (shard("x"), "id"),
        (changed(hint_prefix="/hints"), "hint_prefix"),
        (changed(recovery_log_prefix="logs"), "hint_prefix"),
        (changed(recovery_log_prefix="logs", hint_prefix="/hints/"), "hint_prefix"),
        (changed(recovery_log_prefix="logs//x", hint_prefix="/hints"), "recovery_log_prefix"),
        (changed(hint_backups=-1), "hint_backups"),
        (pc.ShardSpec(id="shard-one"), "max_txn_duration"),
        (changed(labels=label_set({"id": "x"})), "labels"),
        (shard(journals=("b/journal", "a/journal")), r"sources\[1\].journal"),
        (shard(journals=("a/journal", "a/journal")), r"sources\[1\].journal"),
        (shard(journals=("/a",)), r"sources\[0\].journal"),
    ],
)
def test_errors_name_the_invalid_field(spec, field):
    with pytest.raises(InvalidInput, match=rf"^{field}"):
        validate_shard_spec(spec)


def test_a_change_is_either_an_upsert_or_a_deletion():
    validate_change(pc.ApplyRequest.Change(upsert=shard()))
    validate_change(pc.ApplyRequest.Change(delete="shard-one", expect_mod_revision=-1))
    for change, field in (
        (pc.ApplyRequest.Change(), "upsert"),
        (pc.ApplyRequest.Change(upsert=shard(), delete="shard-one"), "upsert"),
        (pc.ApplyRequest.Change(delete="shard-one"), "expect_mod_revision"),
        (pc.ApplyRequest.Change(upsert=shard("bad id")), "upsert.id"),
    ):
        with pytest.raises(InvalidInput, match=f"^{field}"):
            validate_change(change)


def test_replication_counts_the_primary_and_standbys_up_to_the_cap():
    assert replication(shard()) == 1
    assert replication(shard(hot_standbys=2)) == 3
    assert replication(shard(hot_standbys=9), max_hot_standbys=1) == 2
    assert replication(shard(hot_standbys=9, disable=True)) == 0


def test_the_recovery_log_is_named_after_the_shard():
    assert recovery_log(shard(recovery_log_prefix="recovery/logs", hint_prefix="/hints")) == "recovery/logs/shard-one"
    assert recovery_log(shard()) == ""


def test_the_most_advanced_replica_is_the_status_of_a_shard():
    standby, failed = pc.ReplicaStatus(code=Code.STANDBY), pc.ReplicaStatus(code=Code.FAILED, errors=["boom"])

    assert most_advanced([]).code == Code.IDLE
    assert most_advanced([standby, pc.ReplicaStatus()]).code == Code.STANDBY
    assert most_advanced([failed, standby]) == failed


def statuses(*codes: int) -> list[bool]:
    pairs = [
        (AssignmentKey("shard", MemberId("zone", f"p{slot}"), slot), pc.ReplicaStatus(code=code))  # type: ignore[arg-type]
        for slot, code in enumerate(codes)
    ]
    return list(ShardEntities().consistent(pairs))


def test_replicas_are_consistent_once_they_can_take_over():
    assert statuses(Code.PRIMARY, Code.STANDBY, Code.BACKFILL, Code.IDLE) == [True, True, False, False]
    assert statuses(Code.PRIMARY, Code.FAILED) == [True, False]
    # A failed primary can be moved with the others in any state.
    assert statuses(Code.FAILED, Code.FAILED, Code.IDLE) == [True, True, False]


def test_values_that_do_not_match_their_key_are_refused():
    entities = ShardEntities()
    member = pc.ConsumerSpec(shard_limit=1)
    member.process_spec.id.zone, member.process_spec.id.suffix = "zone", "process-a"
    member.process_spec.endpoint = "http://127.0.0.1:80"

    assert entities.decode_item("shard-one", shard().SerializeToString()) == shard()
    assert entities.decode_member(MemberId("zone", "process-a"), member.SerializeToString()) == member
    with pytest.raises(InvalidInput, match="its key is of 'other'"):
        entities.decode_item("other", shard().SerializeToString())
    with pytest.raises(InvalidInput, match="its key is of zone#other"):
        entities.decode_member(MemberId("zone", "other"), member.SerializeToString())
    with pytest.raises(InvalidInput, match="not a ShardSpec"):
        entities.decode_item("shard-one", b"\xff")
    key = AssignmentKey("shard-one", MemberId("zone", "process-a"), 0)
    assert entities.decode_assignment(key, b"") == pc.ReplicaStatus()
    with pytest.raises(InvalidInput, match="errors"):
        entities.decode_assignment(key, pc.ReplicaStatus(code=Code.FAILED).SerializeToString())
