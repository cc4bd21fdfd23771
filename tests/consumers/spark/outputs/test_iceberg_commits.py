"""Commits of rows that tasks have written or sent to the driver, without Spark."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from coranto_consumers.spark.outputs.iceberg import IcebergStore, Written
from coranto_consumers.stores.contract import SHARD, checkpoint
from coranto_consumers.stores.iceberg.tables import plan_for
from coranto_consumers.stores.iceberg.writing import FileWriter

ROWS = pa.table({"n": pa.array([1, 2], pa.int64()), "text": pa.array(["a", "b"])})


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    yield catalog
    catalog.engine.dispose()


@pytest.fixture
def store(catalog: SqlCatalog) -> IcebergStore:
    catalog.create_table("shop.one", ROWS.schema)
    store = IcebergStore(catalog, "shop.one")
    store.raise_fence(SHARD)
    return store


def carried(store: IcebergStore, name: str, rows: pa.Table) -> Written:
    """Return rows as tasks send them to the driver."""
    table = store.load(name)
    assert table is not None
    owner = store._owner
    owner.register_table(name)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    writer = FileWriter.of(table, owner.name_of(owner.next_number))
    plan = plan_for(table, None, rows.column_names, [], {}, "")
    return Written(name, plan, False, writer, (), (), (sink.getvalue().to_pybytes(),))


def commit(store: IcebergStore, offset: int, *written: Written) -> None:
    store.commit(SHARD, 1, written, checkpoint(offset), lambda: None)


def found(catalog: SqlCatalog, name: str) -> list[Mapping[str, object]]:
    rows: list[Mapping[str, object]] = catalog.load_table(name).scan().to_arrow().to_pylist()
    return rows


def test_tables_that_share_a_location_keep_the_files_of_each_other(
    store: IcebergStore, catalog: SqlCatalog, tmp_path: Path
) -> None:
    shared = {"write.data.path": f"file://{tmp_path}/shared"}
    for name in ("shop.two", "shop.three"):
        catalog.create_table(name, ROWS.schema, properties=shared)
    for offset in (100, 200):
        commit(store, offset, carried(store, "shop.two", ROWS), carried(store, "shop.three", ROWS))
    assert found(catalog, "shop.two") == found(catalog, "shop.three") == ROWS.to_pylist() * 2


def test_outputs_with_other_columns_append_to_one_table(store: IcebergStore, catalog: SqlCatalog) -> None:
    others = (ROWS.select(["text", "n"]), ROWS.select(["n"]))
    commit(store, 100, *(carried(store, "shop.one", rows) for rows in (ROWS, *others)))
    assert sorted((row["n"], row["text"] or "") for row in found(catalog, "shop.one")) == [
        *((1, ""), (1, "a"), (1, "a")),
        *((2, ""), (2, "b"), (2, "b")),
    ]
    assert len(catalog.load_table("shop.one").snapshots()) == 3, "the fence, the location of files, and one commit"
