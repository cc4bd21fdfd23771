"""Specs of shards for the reconciler: shards that release logs or hints to others are deleted first."""

from __future__ import annotations

from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.reconcile import SHARDS


def shard(id: str, logs: str = "") -> pc.ShardSpec:
    return pc.ShardSpec(id=id, recovery_log_prefix=logs, hint_prefix="/hints" if logs else "")


def test_a_shard_blocks_another_shard_with_the_same_log() -> None:
    deleted = [shard("sums-000", "logs/app"), shard("sums-001", "logs/app"), shard("plain")]
    created = [shard("app/sums-000", "logs"), shard("plain-too")]
    assert SHARDS.blocking_deletions(deleted, created) == {"sums-000"}


def test_shards_without_logs_share_nothing() -> None:
    assert SHARDS.blocking_deletions([shard("one")], [shard("two")]) == set()
    assert SHARDS.name_of(shard("one")) == "one"
