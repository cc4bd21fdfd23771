"""A writer that is sent to tasks writes files by the partitions and columns of a table."""

import datetime as dt
import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table import Table, Transaction
from pyiceberg.transforms import BucketTransform, parse_transform
from pyiceberg.types import LongType

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg import writing
from coranto_consumers.stores.iceberg.changes import append
from coranto_consumers.stores.iceberg.state import PREFIX
from coranto_consumers.stores.iceberg.writing import FileWriter

SCHEMA = pa.schema([pa.field("n", pa.int32(), nullable=False), ("day", pa.string())])


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/hunter2.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    yield catalog.create_table("shop.days", SCHEMA, properties={f"{PREFIX}x": "hunter2"})
    catalog.engine.dispose()


def batches(count: int, size: int = 10) -> list[pa.RecordBatch]:
    made = pa.table({"day": [f"d{n % 3}" for n in range(count)], "n": pa.array(range(count), pa.int64())})
    found: list[pa.RecordBatch] = made.to_batches(max_chunksize=size)
    return found


def test_a_writer_in_another_process_does_not_need_the_catalog(table: Table, tmp_path: Path) -> None:
    writer = FileWriter.of(table, "mine/1/")
    assert "hunter2" not in str(writer.io)
    assert PREFIX not in writer.metadata
    assert "hunter2" not in repr(writer)
    files = list(pickle.loads(pickle.dumps(writer)).write(batches(25)))
    assert [(file.record_count, Path(file.file_path).parent.name) for file in files] == [(25, "1")]
    assert Path(files[0].file_path.removeprefix("file://")).is_relative_to(tmp_path / "shop/days/data/mine/1")
    assert pickle.loads(pickle.dumps(files)) == files


def test_many_rows_become_several_files_in_each_partition(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_MAX_BYTES", 150)
    with table.update_spec() as spec:
        spec.add_identity("day")
    files = list(FileWriter.of(table, "mine/1/").write(batches(60)))
    assert sum(file.record_count for file in files) == 60
    assert {file.partition[0] for file in files} == {"d0", "d1", "d2"}
    assert len(files) > 3


def test_each_transform_makes_partitions(table: Table) -> None:
    schema = pa.schema([("n", pa.int64()), ("text", pa.string()), ("at", pa.timestamp("us", "UTC"))])
    hours = [dt.datetime(2026, 1, 31, 23, tzinfo=dt.UTC) + dt.timedelta(hours=n) for n in range(6)]
    given = pa.table([range(6), ["aa1", "aa2", "bb1", "bb2", "cc1", "cc2"], hours], schema=schema)
    for transform, column, expected in (
        ("day", "at", [dt.date(2026, 1, 31), *[dt.date(2026, 2, 1)] * 5]),
        ("hour", "at", [int(each.timestamp()) // 3600 for each in hours]),
        ("month", "at", [56 * 12, *[56 * 12 + 1] * 5]),
        ("truncate[2]", "text", ["aa", "aa", "bb", "bb", "cc", "cc"]),
        ("bucket[4]", "n", [BucketTransform(4).transform(LongType(), bucket=True)(n) for n in range(6)]),
    ):
        made = table.catalog.create_table(f"shop.{transform[:4]}", schema)
        with made.update_spec() as spec:
            spec.add_field(column, parse_transform(transform), "part")
        writer = FileWriter.of(made, "mine/1/")
        transaction = Transaction(made)
        append(transaction, {}, list(writer.write(given.to_batches())), writer)
        transaction.commit_transaction()
        in_parts = {}
        for task in made.scan().plan_files():
            for row in ArrowScan(made.metadata, made.io, made.schema(), AlwaysTrue()).to_table([task]).to_pylist():
                in_parts[row["n"]] = task.file.partition[0]
        assert [in_parts[n] for n in range(6)] == [
            (each - dt.date(1970, 1, 1)).days if isinstance(each, dt.date) else each for each in expected
        ], transform
        value = given[column][3].as_py()
        wanted = value.isoformat() if isinstance(value, dt.datetime) else value
        assert made.scan(f"{column} = {wanted!r}").to_arrow().num_rows == 1


def test_staged_rows_are_read_back(table: Table) -> None:
    writer = FileWriter.of(table, "mine/1/")
    places = list(writer.stage(batches(25)))
    assert pa.concat_tables(list(writer.read(places))).equals(pa.Table.from_batches(batches(25)))
    assert list(writer.stage([])) == []


def test_rows_that_do_not_fit_are_refused(table: Table) -> None:
    writer = FileWriter.of(table, "mine/1/")
    for column, problem in (
        (pa.array([2**40]), "do not fit shop.days: Integer value 1099511627776 not in range"),
        (pa.array([None], pa.int64()), "shop.days needs n, which is null"),
        (pa.array(["x"]), "do not fit shop.days"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            list(writer.write([pa.record_batch({"n": column})]))
    with pytest.raises(InvalidInput, match=r"do not fit shop\.days: they have no column n"):
        list(writer.write([pa.record_batch({"day": ["d"]})]))
