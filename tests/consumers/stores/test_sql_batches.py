"""Arrow batches inserted and merged by a shard's transaction, in each database."""

from __future__ import annotations

import asyncio
import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, DateTime, Float, LargeBinary, MetaData, Numeric, String, Table, select

from coranto.errors import InvalidInput
from coranto_consumers.stores.contract import SHARD, commit
from coranto_consumers.stores.merge import Add, Max, Replace
from coranto_consumers.stores.sql_shard import SqlShardStore

PLAIN = Table(
    "plain_rows",
    MetaData(),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    Column("name", String(40)),
    Column("part", Float),
    Column("made", String(10), default="by us"),
)
OTHERS = Table(
    "other_rows",
    MetaData(),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    Column("at", DateTime),
    Column("price", Numeric(20, 4)),
    Column("raw", LargeBinary),
)
SUMS = Table(
    "sums_of_rows",
    MetaData(),
    Column("name", String(40), primary_key=True),
    Column("total", BigInteger),
    Column("top", BigInteger),
    Column("last", String(40)),
)


async def test_batches_equal_rows_inserted_one_by_one(store_url: str) -> None:
    rows = [{"n": n, "name": (None, "a\tb\\", "é\n")[n % 3], "part": (None, 0.25)[n % 2]} for n in range(100)]
    others = [
        {"n": 1, "at": dt.datetime(2024, 2, 29, 1, 2, 3), "price": Decimal("12345678901.2345"), "raw": b"\0\xff"},
        {"n": 2, "at": None, "price": None, "raw": None},
    ]
    store = SqlShardStore(store_url, PLAIN, OTHERS)
    await store.restore_checkpoint(SHARD)

    def write() -> None:
        store.insert(PLAIN, {**rows[0], "made": "x"})
        store.insert_batch(PLAIN, pa.RecordBatch.from_pylist(rows[1:50]))
        store.insert_batch(PLAIN, pa.RecordBatch.from_pylist([{**row, "made": "y"} for row in rows[50:]]))
        store.insert_batch(PLAIN, pa.RecordBatch.from_pylist(rows[:0], pa.schema([("n", pa.int64())])))
        store.insert_batch(OTHERS, pa.RecordBatch.from_pylist(others))
        with pytest.raises(InvalidInput, match="no column 'm'"):
            store.insert_batch(PLAIN, pa.RecordBatch.from_pydict({"m": [1]}))

    await asyncio.to_thread(write)
    await commit(store, 100)
    with store.database.engine.connect() as connection:
        found = [dict(row) for row in connection.execute(select(PLAIN).order_by(PLAIN.c.n)).mappings()]
        assert [dict(row) for row in connection.execute(select(OTHERS).order_by(OTHERS.c.n)).mappings()] == others
    await store.destroy()
    made = ["x"] + ["by us"] * 49 + ["y"] * 50
    assert found == [{**row, "made": by} for row, by in zip(rows, made, strict=True)]


async def test_batches_are_merged_by_key_and_see_earlier_rows(store_url: str) -> None:
    rules = {"total": Add(), "top": Max(), "last": Replace()}
    store = SqlShardStore(store_url, SUMS)
    await store.restore_checkpoint(SHARD)

    def batch(*rows: tuple[str, int, str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"name": a, "total": n, "top": n, "last": last} for a, n, last in rows])

    def write() -> None:
        store.insert(SUMS, {"name": "a", "total": 1, "top": 1, "last": "first"})
        store.merge_batch(SUMS, batch(("a", 5, "second"), ("b", 2, "x")), ["name"], rules)
        store.merge_batch(SUMS, batch(("a", 3, "third")), ["name"], rules)
        store.merge_batch(SUMS, batch(("c", 0, "y")).slice(1), ["name"], rules)

    await asyncio.to_thread(write)
    await commit(store, 100)
    await asyncio.to_thread(lambda: store.merge_batch(SUMS, batch(("b", 40, "z")), ["name"], rules))
    await commit(store, 200)
    with store.database.engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(select(SUMS).order_by(SUMS.c.name))]
    assert found == [("a", 9, 5, "third"), ("b", 42, 40, "z")]

    with pytest.raises(InvalidInput, match="say how 'last' merges"):
        store.merge_batch(SUMS, batch(("a", 1, "")), ["name"], {"total": Add(), "top": Max()})
    store.merge_batch(SUMS, batch(("a", 1, "one"), ("a", 1, "other")), ["name"], rules)
    with pytest.raises(InvalidInput, match=r"a key \(name\) was staged more than once"):
        await commit(store, 300)
    await store.destroy()


async def test_batches_with_a_column_of_deletes(store_url: str) -> None:
    rules = {"total": Replace(), "top": Replace(), "last": Replace()}
    store = SqlShardStore(store_url, SUMS)
    await store.restore_checkpoint(SHARD)

    def merge(*rows: tuple[str, int, bool | None]) -> None:
        given = [{"name": a, "total": n, "top": n, "last": "", "gone": gone} for a, n, gone in rows]
        store.merge_batch(SUMS, pa.RecordBatch.from_pylist(given), ["name"], rules, "gone")

    await asyncio.to_thread(merge, ("a", 1, False), ("b", 2, None), ("c", 3, True))
    await commit(store, 100)
    await asyncio.to_thread(merge, ("a", 5, True), ("b", 6, False))
    await commit(store, 200)
    with store.database.engine.connect() as connection:
        assert [tuple(row)[:2] for row in connection.execute(select(SUMS).order_by(SUMS.c.name))] == [("b", 6)]
    await store.destroy()
