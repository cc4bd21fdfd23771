"""The SQL store of a shard: the contract of all stores, and its own behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Integer, MetaData, Table, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from coranto.errors import Fenced, InvalidInput, SqlStoreError
from coranto_consumers.stores.contract import SHARD, StoreContract, StoreSubject, checkpoint, commit
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.sql_shard import SqlShardStore

NUMBERS = Table("numbers", MetaData(), Column("n", Integer, primary_key=True))


class SqlSubject(StoreSubject):
    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> SqlShardStore:
        return SqlShardStore(self.url, NUMBERS)

    async def add(self, store: Any, number: int) -> None:
        connection = await store.begin()
        await asyncio.to_thread(connection.execute, NUMBERS.insert().values(n=number))

    async def numbers(self, store: Any) -> Sequence[int]:
        connection = await store.begin()
        return list((await asyncio.to_thread(connection.execute, select(NUMBERS.c.n))).scalars())


class TestSqlShardStore(StoreContract):
    @pytest.fixture
    def subject(self, store_url: str) -> SqlSubject:
        return SqlSubject(store_url)


async def restored(url: str, **options: Any) -> SqlShardStore:
    store = SqlShardStore(SqlStore(url, **options), NUMBERS)
    await store.restore_checkpoint(SHARD)
    return store


async def test_a_transaction_must_be_begun_first_on_the_event_loop(store_url):
    """Otherwise it would block the event loop that the previous commit needs."""
    store = await restored(store_url)
    gate = asyncio.get_running_loop().create_future()
    committing = await store.start_commit(SHARD, checkpoint(1), [gate])
    with pytest.raises(InvalidInput, match=r"await store\.begin"):
        _ = store.connection
    gate.set_result(None)
    await committing
    assert (await store.begin()) is store.connection
    await store.destroy()


async def test_a_blocking_method_waits_for_the_previous_commit(store_url):
    store = await restored(store_url)
    await asyncio.to_thread(lambda: store.connection.execute(NUMBERS.insert().values(n=1)))
    gate = asyncio.get_running_loop().create_future()
    committing = await store.start_commit(SHARD, checkpoint(1), [gate])
    reading = asyncio.create_task(
        asyncio.to_thread(lambda: store.connection.execute(select(NUMBERS.c.n)).scalars().all())
    )
    done, _ = await asyncio.wait([reading], timeout=0.05)
    assert not done
    gate.set_result(None)
    await committing
    assert await reading == [1]
    await store.destroy()


async def test_the_outcome_of_an_unknown_commit_is_read_from_the_store(store_url):
    """The connection breaks once after the database has committed, and once before."""
    lost = OperationalError("COMMIT", {}, Exception("connection lost"))
    plan: list[bool] = []

    def breaking_commit(connection: Connection) -> None:
        if not plan:
            connection.commit()
        elif plan.pop():
            connection.commit()
            raise lost
        else:
            connection.invalidate()
            raise lost

    store = await restored(store_url, commit=breaking_commit)
    plan.append(True)
    await commit(store, 100)
    assert store.database.read(SHARD).checkpoint == checkpoint(100)

    plan.append(False)
    with pytest.raises(SqlStoreError, match="was not applied") as failure:
        await commit(store, 200)
    assert store.is_transient(failure.value)
    with pytest.raises(SqlStoreError, match="was not applied"):
        await store.begin()
    await store.destroy()
    assert store.database.read(SHARD).checkpoint == checkpoint(100)


async def test_the_next_transaction_raises_the_failure_of_the_previous_commit(store_url):
    """The error keeps its type, because the shard restarts after a transient one from either of the two calls."""

    def fail(connection: Connection) -> None:
        raise OperationalError("COMMIT", None, Exception("the connection broke"))

    store = await restored(store_url, commit=fail)
    committing = await store.start_commit(SHARD, checkpoint(1), [])
    with pytest.raises(SqlStoreError, match="was not applied") as failure:
        await store.begin()
    assert store.is_transient(failure.value)
    with pytest.raises(SqlStoreError, match="was not applied"):
        await committing
    await store.destroy()


async def test_transient_and_permanent_errors_are_distinguished(store_url):
    store = await restored(store_url)

    class Conflict(Exception):
        sqlstate = "40001"

    assert store.is_transient(OperationalError("SELECT", {}, Exception("server closed the connection")))
    assert store.is_transient(DBAPIError("SELECT", {}, Conflict("could not serialize access")))
    assert store.is_transient(SqlStoreError("lost"))
    assert not store.is_transient(IntegrityError("INSERT", {}, Exception("duplicate key")))
    assert not store.is_transient(Fenced("a later owner"))
    assert not store.is_transient(ZeroDivisionError())
    await store.destroy()


async def test_destroying_ends_the_open_transaction(store_url):
    store = await restored(store_url)
    await store.begin()
    await store.destroy()
    with store.database.engine.begin() as connection:
        # It would wait for the lock of an open transaction.
        connection.execute(text("UPDATE gazette_checkpoints SET fence = fence + 1"))
    assert store.database.read(SHARD).fence == 2
