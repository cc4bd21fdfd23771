"""Every write path stores the same row or raises the same error, for all types of columns and in all stores."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import re
import traceback
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Double,
    Enum,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    TypeDecorator,
    func,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import SQLAlchemyError

from coranto.errors import CorantoError, InvalidInput, RejectedRow
from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.binding import rows_of
from coranto_consumers.stores.contract import SHARD, commit
from coranto_consumers.stores.merge import Replace, merge_staged, plan_merge
from coranto_consumers.stores.sql_shard import SqlShardStore
from coranto_consumers.stores.staging import StageWriter, stage_of, write_in_transaction


class Sealed(TypeDecorator[str]):
    """A type that stores no plain text, like one that encrypts."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:
        return None if value is None else f"sealed:{value[::-1]}"

    def process_result_value(self, value: str | None, dialect: object) -> str | None:
        return None if value is None else value.removeprefix("sealed:")[::-1]


class Upper(TypeDecorator[str]):
    """A type that binds values by a function of the database."""

    impl = Text
    cache_ok = True

    def bind_expression(self, bindparam: Any) -> Any:
        return func.upper(bindparam)


Way = Callable[[str, Table, "pa.RecordBatch"], None]


def in_shard(url: str, table: Table, work: Callable[[SqlShardStore], None]) -> None:
    async def run() -> None:
        store = SqlShardStore(url, *table.metadata.sorted_tables)
        await store.restore_checkpoint(SHARD)
        try:
            await asyncio.to_thread(work, store)
            await commit(store, 100)
        finally:
            await store.destroy()

    asyncio.run(run())


def inserted(url: str, table: Table, batch: pa.RecordBatch) -> None:
    """Insert one row after the other, as in `consume_message`."""

    def work(store: SqlShardStore) -> None:
        for row in rows_of(batch, table, store.database.engine.dialect):
            store.insert(table, row)

    in_shard(url, table, work)


def inserted_batch(url: str, table: Table, batch: pa.RecordBatch) -> None:
    in_shard(url, table, lambda store: store.insert_batch(table, batch))


def merged_batch(url: str, table: Table, batch: pa.RecordBatch) -> None:
    rules = {name: Replace() for name in batch.schema.names if name != "id"}
    in_shard(url, table, lambda store: store.merge_batch(table, batch, ["id"], rules))


def staged(url: str, table: Table, batch: pa.RecordBatch, *, keys: bool = False) -> None:
    """Stage the rows in a Spark task, and append them in the driver."""
    store = SqlStore(url)
    names = list(batch.schema.names)
    rules = {name: Replace() for name in names if name != "id"} if keys else {}
    plan = plan_merge(table, names, ["id"] if keys else (), rules)
    fence, _ = store.raise_fence(SHARD)
    stage = stage_of(store, plan, table.metadata.sorted_tables)
    with StageWriter(url, stage, SHARD, fence, "attempt") as writer:
        writer.write_batch(batch)
    with store.transaction(SHARD, fence) as transaction:
        merge_staged(transaction.connection, plan, stage, ["attempt"], batch.num_rows)
        transaction.connection.commit()


def staged_and_merged(url: str, table: Table, batch: pa.RecordBatch) -> None:
    staged(url, table, batch, keys=True)


def carried(url: str, table: Table, batch: pa.RecordBatch) -> None:
    """Send the rows from a Spark task to the driver, and write them there."""
    store = SqlStore(url)
    store.create_tables(*table.metadata.sorted_tables)
    fence, _ = store.raise_fence(SHARD)
    with store.transaction(SHARD, fence) as transaction:
        write_in_transaction(transaction.connection, table, batch)
        transaction.connection.commit()


WAYS: dict[str, Way] = {
    each.__name__: each for each in (inserted, inserted_batch, merged_batch, staged, staged_and_merged, carried)
}
BY_STATEMENT = "inserted"

NOON = dt.datetime(2024, 2, 29, 12, 0, 0, 123456)
DOCUMENT = pa.struct(
    [("a", pa.int64()), ("b", pa.list_(pa.string())), ("at", pa.timestamp("us")), ("c", pa.decimal128(9, 2))]
)
TYPES: dict[str, tuple[Any, Any, list[Any], list[Any]]] = {
    "text": (Text(), pa.string(), ["a\tb\\N\n", "", "é😀", None], ["a\tb\\N\n", "", "é😀", None]),
    "varchar": (String(5), pa.string(), ["abcde", None], ["abcde", None]),
    "whole": (Integer(), pa.int32(), [1, -(1 << 31), None], [1, -(1 << 31), None]),
    "large": (BigInteger(), pa.int64(), [(1 << 63) - 1, None], [(1 << 63) - 1, None]),
    "double": (Double(), pa.float64(), [0.1, -1e300, None], [0.1, -1e300, None]),
    "numeric": (Numeric(6, 2), pa.decimal128(6, 2), [Decimal("1234.50"), None], [Decimal("1234.50"), None]),
    "flag": (Boolean(), pa.bool_(), [True, False, None], [True, False, None]),
    "day": (
        Date(),
        pa.date32(),
        [dt.date(1, 1, 1), dt.date(9999, 12, 31), None],
        [dt.date(1, 1, 1), dt.date(9999, 12, 31), None],
    ),
    "local": (DateTime(), pa.timestamp("us"), [NOON, None], [NOON, None]),
    "bytes": (LargeBinary(), pa.binary(), [b"\x00\xff", b"", None], [b"\x00\xff", b"", None]),
    "choice": (Enum("red", "blue", name="colour", native_enum=False), pa.string(), ["red", None], ["red", None]),
    "sealed": (Sealed(), pa.string(), ["secret", None], ["secret", None]),
    "upper": (Upper(), pa.string(), ["abc", None], ["ABC", None]),
    "struct in JSON": (
        JSON(),
        DOCUMENT,
        [{"a": 1, "b": ["x", None], "at": NOON, "c": Decimal("0.10")}, None],
        [{"a": 1, "b": ["x", None], "at": NOON.isoformat(), "c": "0.10"}, None],
    ),
    "struct in JSONB": (
        JSON().with_variant(JSONB(), "postgresql"),
        DOCUMENT,
        [{"a": 1}, None],
        [{"a": 1, "b": None, "at": None, "c": None}, None],
    ),
    "map in JSON": (JSON(), pa.map_(pa.string(), pa.int64()), [[("k", 1)], [], None], [{"k": 1}, {}, None]),
    "list in JSON": (JSON(), pa.list_(pa.int64()), [[1, 2], [], None], [[1, 2], [], None]),
    "text in JSON": (JSON(), pa.string(), ["{}", None], ["{}", None]),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_path_stores_the_values_of_the_types(store_url: str, way: str) -> None:
    found, wanted = {}, {}
    for number, (kind, (column_type, arrow, values, expected)) in enumerate(TYPES.items()):
        key = Column("id", Integer, primary_key=True, autoincrement=False)
        table = Table(f"kind_{number}", MetaData(), key, Column("v", column_type))
        batch = pa.record_batch([pa.array(range(len(values)), pa.int32()), pa.array(values, arrow)], names=["id", "v"])

        WAYS[way](store_url, table, batch)

        with SqlStore(store_url).engine.connect() as connection:
            nulls = connection.execute(text(f"SELECT count(*) FROM {table.name} WHERE v IS NULL")).scalar_one()
            found[kind] = list(connection.execute(select(table.c.v).order_by(table.c.id)).scalars()), nulls
            if kind == "sealed":
                kept = connection.execute(text(f"SELECT v FROM {table.name} WHERE id = 0")).scalar_one()
                assert kept == "sealed:terces"
        wanted[kind] = expected, values.count(None)
    assert found == wanted


BAD: dict[str, tuple[Any, Any, Any, str]] = {
    "too long": (Column("v", String(5)), pa.string(), "SECRET-VALUE", "too long"),
    "NUL": (Column("v", Text), pa.string(), "SECRET\0VALUE", "NUL"),
    "overflow": (Column("v", Numeric(6, 2)), pa.decimal128(12, 2), Decimal("7777777.00"), "out of its column's range"),
    "whole overflow": (Column("v", Integer), pa.int64(), 77777777777, "out of its column's range"),
    "null": (Column("v", Text, nullable=False), pa.string(), None, "null|NOT NULL"),
    "check": (
        Column("v", Text),
        pa.string(),
        "SECRET-VALUE",
        "v_is_open",
    ),
    "foreign key": (Column("v", Integer, ForeignKey("parents.id")), pa.int32(), 77777777, "foreign key|FOREIGN KEY"),
    "unique": (Column("v", String(20), unique=True), pa.string(), "a", "unique|UNIQUE"),
    "a late time": (Column("v", DateTime), pa.timestamp("us"), 1 << 60, "years 1 to 9999"),
    "a late day": (Column("v", Date), pa.date32(), 1 << 24, "years 1 to 9999"),
    "no choice": (
        Column("v", Enum("a", "b", name="colour", native_enum=False, validate_strings=True)),
        pa.string(),
        "SECRET-VALUE",
        "type",
    ),
}
GOOD = {
    pa.string(): "a",
    pa.int32(): None,
    pa.int64(): 1,
    pa.decimal128(12, 2): Decimal(1),
    pa.timestamp("us"): 0,
    pa.date32(): 0,
}
KEPT = {"sqlite": {"too long", "NUL", "overflow", "whole overflow"}, "mysql": {"NUL"}, "postgresql": set()}


@pytest.mark.parametrize("way", WAYS)
def test_each_path_rejects_the_same_rows_and_shows_no_value(store_url: str, way: str) -> None:
    for number, (kind, (column, arrow, value, expected)) in enumerate(BAD.items()):
        if kind in KEPT[re.match(r"[a-z]+", store_url)[0]]:
            continue
        if kind == "unique" and store_url.startswith("mysql") and "merged" in way:
            continue  # Merges refuse a table with another unique key.
        metadata = MetaData()
        if kind == "foreign key":
            Table("parents", metadata, Column("id", Integer, primary_key=True, autoincrement=False))
        key = Column("id", Integer, primary_key=True, autoincrement=False)
        # MariaDB accepts a named constraint only after all columns.
        checks = [CheckConstraint("v <> 'SECRET-VALUE'", name="v_is_open")] if kind == "check" else []
        table = Table(f"rejecting_{number}", metadata, key, column._copy(), *checks)
        batch = pa.record_batch(
            [pa.array([1, 2], pa.int32()), pa.array([GOOD[arrow], value], arrow)], names=["id", "v"]
        )

        with pytest.raises((SQLAlchemyError, RejectedRow)) as caught:
            WAYS[way](store_url, table, batch)

        rejected = SqlShardStore(store_url).rejection_of(caught.value)
        assert rejected is not None, (kind, caught.value)
        assert re.search(expected, str(rejected)), kind
        shown = io.StringIO()
        traceback.print_exception(rejected, file=shown)
        if isinstance(caught.value, CorantoError):
            traceback.print_exception(caught.value, file=shown)
        assert "SECRET" not in shown.getvalue(), kind
        assert "7777" not in shown.getvalue(), kind
        with SqlStore(store_url).engine.connect() as connection:
            assert connection.execute(select(func.count()).select_from(table)).scalar_one() == 0


@pytest.mark.parametrize("way", [BY_STATEMENT, "a statement of the application"])
def test_an_unpaired_surrogate_is_stored_as_sparks_reader_reads_it(store_url: str, way: str) -> None:
    table = Table("halves", MetaData(), Column("id", Integer, primary_key=True, autoincrement=False), Column("v", Text))

    def work(store: SqlShardStore) -> None:
        rows = [{"id": 1, "v": "a\ud83db"}, {"id": 2, "v": "😀"}]
        if way == BY_STATEMENT:
            for row in rows:
                store.insert(table, row)
        else:
            store.connection.execute(table.insert(), rows)
            store.connection.execute(table.insert().values(id=3, v="\ude00"))

    in_shard(store_url, table, work)
    with SqlStore(store_url).engine.connect() as connection:
        found = list(connection.execute(select(table.c.v).order_by(table.c.id)).scalars())
    assert found == ["a?b", "😀", "?"][: len(found)]


def test_nested_values_need_a_column_for_nested_values(store_url: str) -> None:
    table = Table("flat", MetaData(), Column("id", Integer, primary_key=True, autoincrement=False), Column("v", Text))
    batch = pa.record_batch([pa.array([1], pa.int32()), pa.array([{"a": 1}])], names=["id", "v"])
    for way in ("inserted_batch", "merged_batch", "staged", "carried"):
        with pytest.raises(InvalidInput, match=r"table .*: column 'v' is Text.*give the column the type JSON"):
            WAYS[way](store_url, table, batch)


def test_values_are_shown_if_the_url_requests_it(store_url: str) -> None:
    url = store_url + ("&" if "?" in store_url else "?") + "show_row_values=true"
    table = Table("shown", MetaData(), Column("id", Integer, primary_key=True), Column("v", Integer, unique=True))
    batch = pa.record_batch([pa.array([1, 2], pa.int32()), pa.array([4242, 4242])], names=["id", "v"])
    with pytest.raises(RejectedRow, match="4242" if not store_url.startswith("sqlite") else "shown.v"):
        carried(url, table, batch)
