"""The audit reads the recovered files of stores in recovery logs, and does not change them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from coranto.errors import InvalidInput
from coranto.messages import Checkpoint, ProducerId, ProducerState, Source
from coranto_consumers.audit import RecoveredEvidence
from coranto_consumers.stores.json_file import checkpoint_to_json

CHECKPOINT = Checkpoint({"in/one": Source(7, {ProducerId(b"\x01abcde"): ProducerState(9, 3)})}, {"out/one": b"ack"})


def test_a_json_file_has_a_checkpoint_and_accepts_no_queries(tmp_path: Path) -> None:
    lines = [{"in/one": 7}, {"sum": 3}, checkpoint_to_json(CHECKPOINT)]
    (tmp_path / "state.json").write_text("".join(json.dumps(each) + "\n" for each in lines))

    found = RecoveredEvidence(tmp_path).read(["shard"], ["SELECT 1"])

    assert found.rows["shard"].checkpoint == CHECKPOINT
    assert "takes no queries" in str(found.values[0])
    (tmp_path / "state.json").write_text("{")
    assert RecoveredEvidence(tmp_path).read(["shard"], []).rows["shard"].damage


def test_a_database_has_a_checkpoint_and_answers_queries(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE gazette_checkpoint (rowid INTEGER PRIMARY KEY, checkpoint BLOB)")
    connection.execute("INSERT INTO gazette_checkpoint VALUES (0, ?)", (CHECKPOINT.to_bytes(),))
    connection.execute("CREATE TABLE t (n INTEGER)")
    connection.execute("INSERT INTO t VALUES (41)")
    connection.commit()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "store.db-wal" in before

    found = RecoveredEvidence(tmp_path).read(["shard"], ["SELECT n + 1 FROM t", "DELETE FROM t", "SELECT n, n FROM t"])

    assert found.rows["shard"].checkpoint == CHECKPOINT
    assert found.values[0] == 42
    assert all(isinstance(value, Exception) for value in found.values[1:])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if "shm" not in path.name} == {
        name: content for name, content in before.items() if "shm" not in name
    }
    connection.close()


def test_a_folder_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="coranto shards recover"):
        RecoveredEvidence(tmp_path).read(["shard"], [])
    with pytest.raises(InvalidInput, match="one shard, not of 2"):
        RecoveredEvidence(tmp_path).read(["one", "two"], [])
