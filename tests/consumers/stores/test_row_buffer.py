"""Rows inserted in batches are visible to each later statement, and equal rows written one by one."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Float,
    Integer,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    TypeDecorator,
    func,
    select,
)
from sqlalchemy.exc import IntegrityError

from coranto.errors import InvalidInput, SqlStoreError
from coranto_consumers.stores import row_buffer
from coranto_consumers.stores.contract import SHARD, StoreContract, StoreSubject, checkpoint
from coranto_consumers.stores.merge import MergePlan
from coranto_consumers.stores.row_buffer import RowBuffer
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.sql_shard import SqlShardStore
from coranto_consumers.stores.staging import merge_in_transaction

NUMBERS = Table("numbers", MetaData(), Column("n", Integer, primary_key=True))


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": list(numbers)})


class InsertingSubject(StoreSubject):
    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> SqlShardStore:
        return SqlShardStore(self.url, NUMBERS)

    async def add(self, store: Any, number: int) -> None:
        match number % 3:
            case 0:
                store.insert(NUMBERS, {"n": number})
            case 1:
                store.insert_batch(NUMBERS, batch(number))
            case 2:
                store.merge_batch(NUMBERS, batch(number), ["n"], {})

    async def numbers(self, store: Any) -> Sequence[int]:
        connection = await store.begin()
        return list((await asyncio.to_thread(connection.execute, select(NUMBERS.c.n))).scalars())


class TestInsertedRows(StoreContract):
    @pytest.fixture
    def subject(self, store_url: str) -> InsertingSubject:
        return InsertingSubject(store_url)


async def restored(url: str) -> SqlShardStore:
    store = SqlShardStore(url, NUMBERS)
    await store.restore_checkpoint(SHARD)
    return store


def numbers(connection: Any) -> list[int]:
    return list(connection.execute(select(NUMBERS.c.n).order_by(NUMBERS.c.n)).scalars())


async def test_every_statement_sees_previously_inserted_rows(store_url: str) -> None:
    store = await restored(store_url)

    def work() -> None:
        store.insert(NUMBERS, {"n": 1})
        connection = store.connection
        assert numbers(connection) == [1]
        store.insert(NUMBERS, {"n": 2})
        assert numbers(connection) == [1, 2], "also by a connection requested before"
        store.insert(NUMBERS, {"n": 3})
        with connection.begin_nested() as nested:
            store.insert(NUMBERS, {"n": 4})
            nested.rollback()
        assert numbers(connection) == [1, 2, 3], "a savepoint rolls back only later rows"
        store.insert(NUMBERS, {"n": 5})

    await asyncio.to_thread(work)
    await (await store.start_commit(SHARD, checkpoint(1), []))
    assert numbers(await store.begin()) == [1, 2, 3, 5]
    await store.destroy()


async def test_rows_are_written_once_a_batch_is_full(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await restored(store_url)
    written: list[int] = []
    real = RowBuffer.flush

    def flush(rows: RowBuffer, connection: Any) -> None:
        if len(rows):
            written.append(len(rows))
        real(rows, connection)

    monkeypatch.setattr(RowBuffer, "flush", flush)

    def work() -> None:
        for number in range(2 * row_buffer.MAX_ROWS + 1):
            store.insert(NUMBERS, {"n": number})

    await asyncio.to_thread(work)
    await (await store.start_commit(SHARD, checkpoint(1), []))
    assert written == [row_buffer.MAX_ROWS, row_buffer.MAX_ROWS, 1]
    connection = await store.begin()
    assert connection.execute(select(func.count()).select_from(NUMBERS)).scalar() == 2 * row_buffer.MAX_ROWS + 1
    await store.destroy()


async def test_rows_to_merge_wait_for_their_commit_during_the_next_transaction(store_url: str) -> None:
    store = await restored(store_url)
    store.insert(NUMBERS, {"n": 1})
    store.merge_batch(NUMBERS, batch(1, 2), ["n"], {})
    store.insert(NUMBERS, {"n": 3})
    appended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    committing = await store.start_commit(SHARD, checkpoint(1), [appended])
    store.merge_batch(NUMBERS, batch(3, 4), ["n"], {})
    appended.set_result(None)
    await committing
    await (await store.start_commit(SHARD, checkpoint(2), []))
    assert numbers(await store.begin()) == [1, 2, 3, 4]
    await store.destroy()


async def test_rows_to_merge_are_written_once_a_batch_is_full(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_buffer, "_MAX_MERGED_BYTES", batch(1, 2).nbytes)
    store = await restored(store_url)
    merged: list[int] = []

    def merge(connection: Connection, plan: MergePlan, rows: pa.RecordBatch) -> None:
        merged.append(rows.num_rows)
        merge_in_transaction(connection, plan, rows)

    monkeypatch.setattr("coranto_consumers.stores.row_buffer.merge_in_transaction", merge)
    await asyncio.to_thread(store.merge_batch, NUMBERS, batch(1), ["n"], {})
    assert not merged
    await asyncio.to_thread(store.merge_batch, NUMBERS, batch(2), ["n"], {})
    assert merged == [1, 1]
    await (await store.start_commit(SHARD, checkpoint(1), []))
    assert numbers(await store.begin()) == [1, 2]
    await store.destroy()


@pytest.mark.parametrize("count", [1, 100])
async def test_a_transaction_with_refused_rows_never_commits(store_url: str, count: int) -> None:
    store = await restored(store_url)

    def work() -> None:
        for number in [*range(count), 0]:
            store.insert(NUMBERS, {"n": number})
        with pytest.raises(IntegrityError):
            _ = store.connection
        with pytest.raises(IntegrityError):
            _ = store.connection

    await asyncio.to_thread(work)
    with pytest.raises(SqlStoreError, match=r"(?i)unique|duplicate"):
        await (await store.start_commit(SHARD, checkpoint(1), []))
    await store.destroy()
    again = await restored(store_url)
    assert numbers(await again.begin()) == []
    await again.destroy()


async def test_a_missing_column_is_refused_immediately(store_url: str) -> None:
    store = await restored(store_url)
    with pytest.raises(InvalidInput, match="table numbers has no column 'm', but 'n'"):
        store.insert(NUMBERS, {"m": 1})
    await store.destroy()


class Upper(TypeDecorator[str]):
    impl = String(20)
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return value and value.upper()


def all_kinds(name: str) -> Table:
    return Table(
        name,
        MetaData(),
        Column("id", BigInteger, primary_key=True, autoincrement=False),
        Column("text", Text),
        Column("number", Float(53)),
        Column("exact", Numeric(20, 6)),
        Column("truth", Boolean),
        Column("at", DateTime),
        Column("upper", Upper),
        Column("mixed Name", Text),
        Column("given", Integer, default=7),
    )


TEXTS = ["", "plain", "tab\there", "line\nfeed", "return\r", "back\\slash", "\\N", "\\.", "größe 🙂", None]
COLUMNS: dict[str, Callable[[int], Any]] = {
    "text": lambda n: TEXTS[n % len(TEXTS)],
    "number": lambda n: [0.1 + 0.2, 1e300, -0.5, None, float(n)][n % 5],
    "exact": lambda n: Decimal(n) / 4,
    "truth": lambda n: [True, False, None][n % 3],
    "at": lambda n: dt.datetime(2024, 2, 29, 12, 0, n % 60),
    "upper": lambda n: "abc",
    "mixed Name": lambda n: None,
    "given": lambda n: n % 3,
}
"""Functions that make the value of a row."""


@pytest.mark.parametrize("names", [("text", "number", "truth", "mixed Name", "given"), ("text",), tuple(COLUMNS)])
def test_rows_are_the_same_with_or_without_batching(store_url: str, names: tuple[str, ...]) -> None:
    store = SqlStore(store_url)
    one, many = all_kinds("one_by_one"), all_kinds("many_at_a_time")
    store.create_tables(one, many)
    rows = [{"id": n, **{name: COLUMNS[name](n) for name in names}} for n in range(150)]
    with store.engine.begin() as connection:
        for row in rows:
            connection.execute(one.insert().values(row))
        buffer = RowBuffer()
        for row in rows:
            buffer.add(many, row)
        buffer.flush(connection)
        found = [connection.execute(select(table).order_by(table.c.id)).all() for table in (one, many)]
    assert found[0] == found[1]
    assert len(found[0]) == 150


@pytest.mark.integration
def test_plain_columns_are_copied_to_postgresql(new_store: Callable[[str], str]) -> None:
    table = all_kinds("copied")
    names = ("text", "number", "truth", "mixed Name", "given")
    store = SqlStore(new_store("postgresql"))
    store.create_tables(table)
    rows = [{"id": n, **{name: COLUMNS[name](n) for name in names}} for n in range(150)]
    with store.engine.begin() as connection:
        assert row_buffer._copied(connection, table, ("id", *names), rows)
        assert not row_buffer._copied(connection, table, ("id", "upper"), [{"id": n, "upper": "a"} for n in range(99)])
        assert not row_buffer._copied(connection, table, ("id",), [{"id": n} for n in range(99)]), (
            "a default is missing"
        )
