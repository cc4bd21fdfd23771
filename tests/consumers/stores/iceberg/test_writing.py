"""Files of a table are written in its partitions and by its columns, by a writer that travels to tasks."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg import writing
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


def test_a_writer_in_another_process_needs_nothing_of_the_catalog(table: Table, tmp_path: Path) -> None:
    writer = FileWriter.of(table, "mine/1/")
    assert "hunter2" not in str(writer.io)
    assert PREFIX not in writer.metadata
    assert "hunter2" not in repr(writer)
    files = list(pickle.loads(pickle.dumps(writer)).write(batches(25)))
    assert [(file.record_count, Path(file.file_path).parent.name) for file in files] == [(25, "1")]
    assert Path(files[0].file_path.removeprefix("file://")).is_relative_to(tmp_path / "shop/days/data/mine/1")
    assert pickle.loads(pickle.dumps(files)) == files


def test_many_rows_become_several_files_in_each_partition(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_MOST_BYTES", 150)
    with table.update_spec() as spec:
        spec.add_identity("day")
    files = list(FileWriter.of(table, "mine/1/").write(batches(60)))
    assert sum(file.record_count for file in files) == 60
    assert {file.partition[0] for file in files} == {"d0", "d1", "d2"}
    assert len(files) > 3


def test_staged_rows_are_read_back(table: Table) -> None:
    writer = FileWriter.of(table, "mine/1/")
    places = list(writer.stage(batches(25)))
    assert pa.concat_tables(writer.read(places)).equals(pa.Table.from_batches(batches(25)))
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
    with table.update_spec() as spec:
        spec.add_field("n", "bucket[4]", "bucket")
    if writing_needs_core():
        with pytest.raises(InvalidInput, match="needs pyiceberg-core"):
            list(FileWriter.of(table, "mine/2/").write(batches(1)))


def writing_needs_core() -> bool:
    try:
        import pyiceberg_core  # noqa: F401
    except ImportError:
        return True
    return False
