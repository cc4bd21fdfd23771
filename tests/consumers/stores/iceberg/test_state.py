"""An owner's state lists committed files and possible leftovers for the next owner."""

from types import SimpleNamespace
from typing import Any

import pytest

from coranto.errors import CorruptData
from coranto_consumers.stores.contract import SHARD, checkpoint
from coranto_consumers.stores.iceberg.state import (
    SWEPT_OWNERS,
    ShardState,
    SnapshotId,
    encode,
    file_name,
    key_of,
    state_of,
)


def table(value: str | None, snapshot: int = 7) -> Any:
    current = SimpleNamespace(snapshot_id=snapshot, sequence_number=3, parent_snapshot_id=None)
    return SimpleNamespace(
        properties={} if value is None else {key_of(SHARD): value},
        current_snapshot=lambda: current,
        snapshot_by_id=lambda number: None,
        name=lambda: ("shop", "orders"),
    )


def test_a_state_survives_a_round_trip() -> None:
    tables = {"shop.orders": SnapshotId(7, 3)}
    state = ShardState(2, checkpoint(100), 7, 3, "mine/", 4, ("old-1.parquet",), "mine/4/", tables)
    assert state_of(table(encode(SHARD, state)), SHARD) == state
    assert state_of(table(None), SHARD) == ShardState()


def test_each_owner_leaves_at_most_one_uncommitted_name() -> None:
    assert (file_name("mine/", 3), file_name("mine", 3)) == ("mine/3/", "mine-3.parquet")
    assert ShardState().uncommitted == ()
    state = ShardState(files="mine/", committed=2, left=("a/1/", "b-2.parquet", "c/9/"))
    assert state.uncommitted == ("b-2.parquet", "c/9/", "mine/3/")
    assert len(state.uncommitted) == SWEPT_OWNERS


def test_invalid_states_are_refused() -> None:
    with pytest.raises(CorruptData, match=r"is not a shard's state: .*; restore the table's properties"):
        state_of(table('{"fence": 1}'), SHARD)
    later = encode(SHARD, ShardState(2, checkpoint(100), 9, 4))
    with pytest.raises(CorruptData, match=r"shop\.orders was rolled back behind the checkpoint of contract-shard"):
        state_of(table(later), SHARD)
