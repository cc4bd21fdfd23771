"""What the runtime's tests share: journals with messages, and an application that sums them."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text, select

from coranto.client import JournalClient
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import Clock, Envelope, JsonLines, Sequencer, TransactionBuilder, iter_messages, new_producer_id
from coranto.messages import read_committed as committed_of
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.sql_shard import SqlShardStore

SUMS = Table(
    "sums",
    MetaData(),
    Column("key", Text, primary_key=True),
    Column("total", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
)


class Journals:
    """Journals of a fake broker, written to and read from as messages."""

    def __init__(self, fake: FakeBroker) -> None:
        self.fake = fake
        self._clock = Clock(time.time_ns)

    def create(self, *names: str) -> None:
        for name in names:
            self.fake.create(name, labels=label_set([(CONTENT_TYPE, JSON_LINES)]))

    def producer(self) -> TransactionBuilder[Any]:
        return TransactionBuilder(new_producer_id(os.urandom), self._clock, JsonLines())

    async def flush(self, builder: TransactionBuilder[Any]) -> None:
        """Append what the builder holds."""
        for journal, batch in builder.take_batches(1 << 20):
            await self.fake.write(journal, batch)

    async def commit(self, builder: TransactionBuilder[Any]) -> None:
        """Append what the builder holds, and acknowledge it."""
        await self.flush(builder)
        builder.ack_intents()
        for journal, content in builder.commit().items():
            await self.fake.write(journal, content)
        builder.finish()

    async def publish(self, journal: str, *messages: dict[str, Any]) -> int:
        """Publish a transaction, and return the journal's head behind it."""
        builder = self.producer()
        for message in messages:
            builder.add(journal, message)
        await self.commit(builder)
        return self.head(journal)

    def head(self, journal: str) -> int:
        return self.fake.journals[journal].head

    def committed(self, journal: str) -> list[dict[str, Any]]:
        """What a read-committed reader sees, without UUIDs."""
        content = self.fake.journals[journal].content

        def read(begin: int, end: int) -> list[Envelope[Any]]:
            return list(iter_messages(JsonLines(), journal, [content[begin:end]], begin))

        found = committed_of(read(0, len(content)), Sequencer(), lambda wanted: read(wanted.begin, wanted.end))
        return [{key: value for key, value in each.message.items() if key != "_meta"} for each in found]


class Sums(Application[SqlShardStore]):
    """Sums `n` by `key` in a table, and publishes each sum that a transaction changed."""

    def __init__(self, database: SqlStore, output: str = "") -> None:
        self.database = database
        self.output = output
        self.transactions: list[list[int]] = [[]]
        """The numbers consumed, by transaction as they were tried."""
        self.before: Callable[[dict[str, Any]], None] = lambda message: None

    def new_store(self, shard: Shard) -> SqlShardStore:
        return SqlShardStore(self.database, SUMS)

    def consume_message(
        self, shard: Shard, store: SqlShardStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        content = message.message
        self.before(content)
        self.transactions[-1].append(content["n"])
        key, n = content["key"], content["n"]
        row = store.connection.execute(select(SUMS).where(SUMS.c.key == key)).one_or_none()
        if row is None:
            store.connection.execute(SUMS.insert().values(key=key, total=n, count=1))
        else:
            store.connection.execute(
                SUMS.update().where(SUMS.c.key == key).values(total=row.total + n, count=row.count + 1)
            )
        if self.output:
            publisher.publish(self.output, {"key": key, "n": n})

    def finalize_txn(self, shard: Shard, store: SqlShardStore, publisher: ShardPublisher) -> None:
        self.transactions.append([])

    def sums(self) -> dict[str, tuple[int, int]]:
        with self.database.engine.connect() as connection:
            return {row.key: (row.total, row.count) for row in connection.execute(select(SUMS))}


@pytest.fixture
async def journals() -> AsyncIterator[Journals]:
    async with FakeBroker() as fake:
        made = Journals(fake)
        made.create("in/one", "in/two", "out/one")
        yield made


@pytest.fixture
async def client(journals: Journals) -> AsyncIterator[JournalClient]:
    async with JournalClient(journals.fake.endpoint, patience=20.0) as connected:
        yield connected


@pytest.fixture
def sums(store_url: str) -> Sums:
    """The application over an empty store of each kind in turn, publishing to `out/one`."""
    return Sums(SqlStore(store_url), "out/one")
