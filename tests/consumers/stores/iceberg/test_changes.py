"""Changes of a table make one snapshot each, and rewrite only affected files."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table, Transaction

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores.iceberg import changes
from coranto_consumers.stores.iceberg.changes import append, merge_rows, overwrite_partitions
from coranto_consumers.stores.iceberg.tables import plan_for
from coranto_consumers.stores.iceberg.writing import FileWriter
from coranto_consumers.stores.merge import Add

SCHEMA = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("day", pa.date32())])


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    yield catalog.create_table("shop.days", SCHEMA, properties={"coranto.shard.x": "secret", "write.data.path": ""})
    catalog.engine.dispose()


def rows(*given: tuple[int, int, int]) -> pa.Table:
    days = [{"key": key, "n": n, "day": dt.date(2026, 1, day)} for key, n, day in given]
    return pa.Table.from_pylist(days, SCHEMA)


def add(table: Table, change, *given: tuple[int, int, int]) -> None:
    table.refresh()
    writer = FileWriter.of(table, "folder/1/")
    files = list(writer.write(rows(*given).to_batches()))
    transaction = Transaction(table)
    change(transaction, {"by": "test"}, files, writer)
    transaction.commit_transaction()


def found(table: Table) -> list[tuple[int, ...]]:
    table.refresh()
    return sorted((row["key"], row["n"], row["day"].day) for row in table.scan().to_arrow().to_pylist())


def paths(table: Table) -> set[str]:
    table.refresh()
    return {task.file.file_path for task in table.scan().plan_files()}


def test_rows_are_merged_in_the_files_with_their_keys(table: Table) -> None:
    add(table, append, (1, 1, 1), (2, 1, 1))
    add(table, append, (3, 1, 1), (8, 1, 1))
    add(table, append, (900, 1, 1))
    before = paths(table)
    new = rows((2, 5, 2), (2, 6, 2), (7, 1, 2)).select(["key", "n"])
    plan = plan_for(table, None, ["key", "n"], ["key"], {"n": Add()})
    transaction = Transaction(table)
    written = merge_rows(transaction, {"by": "test"}, plan, lambda: [new], FileWriter.of(table, "folder/2/"))
    transaction.commit_transaction()
    assert len(before & paths(table)) == 2, "one file had a key, and the others stay"
    assert len(table.snapshots()) == 4
    current = table.current_snapshot()
    assert current is not None
    assert (current.summary or {})["by"] == "test"
    assert {each.file_path for each in written} == paths(table) - before
    by_key = {row["key"]: (row["n"], row["day"]) for row in table.scan().to_arrow().to_pylist()}
    first = dt.date(2026, 1, 1)
    assert by_key == {1: (1, first), 2: (12, first), 3: (1, first), 7: (1, None), 8: (1, first), 900: (1, first)}


@pytest.mark.parametrize("most", [200, 1])
def test_only_files_whose_bounds_admit_texts_are_read(most: int, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_MAX_KEYS", most)
    texts = pa.schema([pa.field("key", pa.string(), nullable=False), ("n", pa.int64())])
    table = table.catalog.create_table("shop.texts", texts)
    last = "\U0010ffff" * 20  # Its first part cannot be rounded up to a bound.
    given = [["customer-number-one-1", "customer-number-one-3"], ["é"], ["zz", last]]
    for keys in given:
        table.append(pa.table({"key": keys, "n": [1] * len(keys)}, schema=texts))
    plan = plan_for(table, None, ["key", "n"], ["key"], {"n": Add()})
    read, original = [], changes._read
    monkeypatch.setattr(changes, "_read", lambda *given: read.append(given) or original(*given))
    for keys, count in ((["customer-number-one-2", "customer-number-one-3"], 1), (["zz"], 1), (["é", last], 2)):
        read.clear()
        transaction = Transaction(table)
        new = pa.table({"key": keys, "n": [5] * len(keys)})
        merge_rows(transaction, {}, plan, lambda new=new: [new], FileWriter.of(table, "folder/1/"))
        transaction.commit_transaction()
        assert len(read) == count
    found = {row["key"]: row["n"] for row in table.scan().to_arrow().to_pylist()}
    assert found == {key: 6 for keys in given for key in keys} | {
        "customer-number-one-1": 1,
        "customer-number-one-2": 5,
    }


def test_required_columns_are_merged_next_to_unchanged_rows(table: Table) -> None:
    needed = pa.schema([SCHEMA.field("key").with_nullable(False), SCHEMA.field("n").with_nullable(False)])
    table = table.catalog.create_table("shop.needed", needed)
    table.append(pa.table({"key": [1, 2], "n": [1, 1]}, schema=needed))
    plan = plan_for(table, None, ["key", "n"], ["key"], {"n": Add()})

    def merge(new: pa.Table) -> None:
        transaction = Transaction(table)
        merge_rows(transaction, {}, plan, lambda: [new], FileWriter.of(table, "folder/1/"))
        transaction.commit_transaction()

    merge(pa.table({"key": [2, 3], "n": [5, 5]}))
    assert sorted(tuple(row.values()) for row in table.scan().to_arrow().to_pylist()) == [(1, 1), (2, 6), (3, 5)]
    with pytest.raises(InvalidInput, match=r"shop\.needed needs n, which is null"):
        merge(pa.table({"key": [4], "n": pa.array([None], pa.int64())}))


def test_rows_replace_the_rows_of_their_partitions(table: Table) -> None:
    with table.update_spec() as spec:
        spec.add_identity("day")
    add(table, append, (1, 1, 1), (2, 1, 2), (3, 1, 3))
    add(table, append, (4, 1, 2))
    add(table, overwrite_partitions, (5, 1, 2), (6, 1, 4))
    assert found(table) == [(1, 1, 1), (3, 1, 3), (5, 1, 2), (6, 1, 4)]
    assert len(table.snapshots()) == 3
    with table.update_spec() as spec:
        spec.add_identity("key")
    with pytest.raises(InvalidInput, match=r"table shop\.days: has files of an earlier partitioning"):
        add(table, overwrite_partitions, (7, 1, 2))


def test_files_of_another_partitioning_and_rows_of_a_wrong_type_are_refused(table: Table) -> None:
    writer = FileWriter.of(table, "folder/1/")
    files = list(writer.write(rows((1, 1, 1)).to_batches()))
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.refresh()
    with pytest.raises(SqlStoreError, match=r"shop\.days: its partitioning changed while rows were written"):
        append(Transaction(table), {}, files, writer)
    plan = plan_for(table, None, ["key", "n"], ["key"], {"n": Add()})
    with pytest.raises(SqlStoreError, match="its partitioning changed"):
        merge_rows(Transaction(table), {}, plan, lambda: [rows((1, 1, 1)).select(["key", "n"])], writer)
    with pytest.raises(InvalidInput, match=r"do not fit shop\.days"):
        merge_rows(Transaction(table), {}, plan, lambda: [pa.table({"key": ["x"], "n": [1]})], writer)
    assert table.current_snapshot() is None
