"""Iceberg tables are created from SQLAlchemy's definitions, and outputs are checked against existing tables."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
)

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg.tables import columns_of, find_or_create, plan_for, require_target
from coranto_consumers.stores.merge import Add, Replace

DEFINED = Table(
    "orders",
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("count", Integer),
    Column("share", Double),
    Column("cents", Numeric(12, 2)),
    Column("paid", Boolean),
    Column("customer", String(20)),
    Column("raw", LargeBinary),
    Column("day", Date),
    Column("at", DateTime(timezone=True)),
    Column("local", DateTime),
    info={"partition_by": ["day", "bucket[4](id)"]},
)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    yield catalog
    catalog.engine.dispose()


def test_a_definition_becomes_a_table_once(catalog: SqlCatalog) -> None:
    table = find_or_create(catalog, "shop.orders", DEFINED)
    assert [(each.name, str(each.field_type), each.required) for each in table.schema().fields] == [
        ("id", "long", True),
        ("count", "int", False),
        ("share", "double", False),
        ("cents", "decimal(12, 2)", False),
        ("paid", "boolean", False),
        ("customer", "string", False),
        ("raw", "binary", False),
        ("day", "date", False),
        ("at", "timestamptz", False),
        ("local", "timestamp", False),
    ]
    assert [str(each.transform) for each in table.spec().fields] == ["identity", "bucket[4]"]
    assert find_or_create(catalog, "shop.orders", None).metadata_location == table.metadata_location


@pytest.mark.parametrize("defined", [DEFINED, pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])])
def test_two_processes_that_create_a_table_concurrently_create_it_once(
    catalog: SqlCatalog, monkeypatch: pytest.MonkeyPatch, defined: Table | pa.Schema
) -> None:
    original, others = catalog._write_metadata, []

    def write(*arguments: object, **named: object) -> None:
        if not others:
            others.append(1)
            others.append(find_or_create(catalog, "shop.orders", defined).metadata.table_uuid)
        original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(catalog, "_write_metadata", write)
    table = find_or_create(catalog, "shop.orders", defined)
    assert table.metadata.table_uuid == others[1]
    assert isinstance(defined, Table) or columns_of(table).names == defined.names


def test_unsupported_table_definitions_are_refused(catalog: SqlCatalog) -> None:
    with pytest.raises(InvalidInput, match=r"there is no table shop\.none; create it"):
        find_or_create(catalog, "shop.none", None)
    with pytest.raises(InvalidInput, match="column 'any' is JSON"):
        find_or_create(catalog, "shop.any", Table("any", MetaData(), Column("any", JSON)))
    bad = Table("bad", MetaData(), Column("n", Integer), info={"partition_by": ["month(at)"]})
    with pytest.raises(InvalidInput, match=r"partitioned by 'month\(at\)', and has no column 'at'"):
        find_or_create(catalog, "shop.bad", bad)


def test_outputs_are_checked_against_the_table(catalog: SqlCatalog) -> None:
    table = find_or_create(catalog, "shop.orders", DEFINED)
    plan = plan_for(table, None, ["customer", "count"], ["customer"], {"count": Add()}, "")
    assert (plan.keys, plan.columns) == (("customer",), ("customer", "count"))
    plan_for(table, DEFINED, ["id", "count"], ["id"], {"count": Replace()}, "")
    with pytest.raises(InvalidInput, match="say how 'count' merges"):
        plan_for(table, None, ["customer", "count"], ["customer"], {}, "")
    with pytest.raises(InvalidInput, match="has no column 'nothing'"):
        plan_for(table, None, ["nothing"], [], {}, "")
    wider = Table("orders", MetaData(), Column("id", BigInteger), Column("later", String))
    with pytest.raises(InvalidInput, match=r"table shop\.orders: has no column 'later'"):
        plan_for(table, wider, ["id", "later"], [], {}, "")


def test_a_table_with_required_or_too_narrow_columns_is_refused(catalog: SqlCatalog) -> None:
    there = pa.schema(
        [
            *(
                pa.field("id", pa.int32(), nullable=False),
                pa.field("count", pa.string()),
                pa.field("share", pa.float32()),
            ),
            *(pa.field("cents", pa.decimal128(12, 1)), pa.field("paid", pa.bool_()), pa.field("day", pa.date32())),
            pa.field("shop", pa.string(), nullable=False),
        ]
    )
    table = find_or_create(catalog, "shop.orders", there)
    columns = ["id", "count", "share", "cents", "paid", "day"]
    with pytest.raises(InvalidInput) as caught:
        require_target(table, DEFINED, plan_for(table, DEFINED, columns, (), {}, ""))
    assert str(caught.value) == (
        "table shop.orders: does not fit its definition in the catalog: column 'shop' is required, and gets no value: "
        "write it, or make it optional; column 'id' is int32, and longer values are written there as int64: change its "
        "type; column 'count' is large_string, and a number is written there as int32: change its type; column 'share' "
        "is float, and longer values are written there as double: change its type; column 'cents' is "
        "decimal128(12, 1), and longer values are written there as decimal128(12, 2): change its type"
    )
    with pytest.raises(InvalidInput, match="column 'shop' is required"):
        require_target(table, None, plan_for(table, None, columns, (), {}, ""))
    require_target(table, None, plan_for(table, None, [*columns, "shop"], (), {}, ""))
    whole = find_or_create(catalog, "shop.whole", DEFINED)
    require_target(whole, DEFINED, plan_for(whole, DEFINED, columns, (), {}, ""))
