"""Dagster gets facts about an Iceberg table from its metadata, without reading rows."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog

from coranto.errors import InvalidInput
from coranto_consumers.spark.outputs.iceberg import IcebergStore
from dagster_coranto.consumers.definition import ConsumerSettings
from dagster_coranto.translation.iceberg_tables import iceberg_facts

ROWS = pa.table([[1, 2]], schema=pa.schema([pa.field("n", pa.int64(), nullable=False)]))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("shop")
    yield catalog
    catalog.engine.dispose()


def test_facts_describe_the_current_snapshot(catalog: SqlCatalog) -> None:
    store = IcebergStore(catalog, "shop.orders", namespace="shop")
    assert iceberg_facts(store, dg.AssetSpec("orders")) == {}
    catalog.create_table("shop.orders", ROWS.schema)
    assert iceberg_facts(store, dg.AssetSpec("orders"))["dagster/row_count"] == 0
    table = catalog.load_table("shop.orders")
    table.append(ROWS)
    named = dg.AssetSpec(["lake", "any"], metadata={"dagster/table_name": "shop.orders"})
    for spec in (dg.AssetSpec(["lake", "orders"]), named):
        facts = iceberg_facts(store, spec)
        assert (facts["dagster/table_name"], facts["dagster/row_count"]) == ("shop.orders", 2)
        assert facts["iceberg/snapshot"] == str(table.current_snapshot().snapshot_id)
        (column,) = facts["dagster/column_schema"].columns
        assert (column.name, column.type, column.constraints.nullable) == ("n", "long", False)


def test_windows_need_a_database_store(catalog: SqlCatalog) -> None:
    class Nothing:
        name, sources, value_schema = "nothing", "name=none", "n INT"

    settings = ConsumerSettings(Nothing(), IcebergStore(catalog, "shop.orders"))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"iceberg lake/shop\.orders is not a database, which windows need"):
        settings.database_url  # noqa: B018
