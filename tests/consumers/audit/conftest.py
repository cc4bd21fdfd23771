"""Fixtures of the consumers' audits: a real broker, a consumer with a table and an output, and its audit."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, text

from coranto.audit import Depth, Report, run_checks
from coranto.client import JournalClient
from coranto.effects import Clock, SystemClock
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import Envelope, JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.testing import Cluster
from coranto_consumers.audit import ConsumerCheck, SqlEvidence, parse_expectation
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.testing import RunningShard, running_shard, shard_spec
from coranto_consumers.stores import SqlShardStore
from coranto_consumers.stores.sql import SqlStore

ORDERS = Table(
    "orders",
    MetaData(),
    Column("id", String(60), primary_key=True),
    Column("cents", BigInteger, nullable=False),
)
SPEC = shard_spec("shard-orders", ["in/one", "in/two"], max_seconds=0.5)
EXPECTATIONS = ("SELECT COUNT(*) FROM orders == messages", "SELECT SUM(cents) FROM orders == sum(/cents)")


class Orders(Application[SqlShardStore]):
    """An application that stores each order as a row and republishes it."""

    def __init__(self, database: SqlStore) -> None:
        self.database = database
        self.before: Callable[[dict[str, Any]], None] = lambda message: None

    def new_store(self, shard: Shard) -> SqlShardStore:
        return SqlShardStore(self.database, ORDERS)

    def consume_message(
        self, shard: Shard, store: SqlShardStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        order = message.message
        self.before(order)
        store.connection.execute(ORDERS.insert().values(id=message.uuid, cents=order["cents"]))
        publisher.publish("out/one", {"cents": order["cents"]})


class Memories:
    """An audit memory in this process."""

    url = ""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def load(self, name: str) -> bytes | None:
        return self.kept.get(name)

    async def save(self, name: str, content: bytes) -> None:
        self.kept[name] = content


class Scene:
    """A consumer over journals of a real broker."""

    def __init__(self, client: JournalClient, store_url: str, clock: Clock | None = None) -> None:
        self.client = client
        self.expect = EXPECTATIONS
        self.clock = clock or SystemClock()
        self.store = SqlStore(store_url)
        self.app = Orders(self.store)
        self.memory = Memories()
        self._clock = ProducerClock(lambda: round(self.clock.now() * 1e9))

    def producer(self) -> TransactionBuilder[Any]:
        return TransactionBuilder(new_producer_id(os.urandom), self._clock, JsonLines())

    async def flush(self, builder: TransactionBuilder[Any]) -> None:
        for journal, batch in builder.take_batches(1 << 20):
            await self.client.append(journal, batch)

    async def commit(self, builder: TransactionBuilder[Any]) -> None:
        await self.flush(builder)
        builder.ack_intents()
        for journal, intent in builder.commit().items():
            await self.client.append(journal, intent)
        builder.finish()

    async def publish(self, count: int, *journals: str) -> None:
        """Publish a transaction of orders over journals, each batch appended twice, and one that is rolled back."""
        journals = journals or ("in/one", "in/two")
        good, bad = self.producer(), self.producer()
        for n in range(count):
            good.add(journals[n % len(journals)], {"cents": 100 + n})
        bad.add(journals[0], {"cents": 7})
        await self.flush(bad)
        batches = good.take_batches(1 << 20)
        for journal, batch in [*batches, *batches]:
            await self.client.append(journal, batch)
        good.ack_intents()
        for journal, intent in good.commit().items():
            await self.client.append(journal, intent)
        for journal, intent in bad.rollback_intents().items():
            await self.client.append(journal, intent)

    async def client_content(self, journal: str) -> bytes:
        return b"".join([chunk.content async for chunk in self.client.read(journal)])

    async def heads(self) -> dict[str, int]:
        return {name: await self.client.head(name) for name in ("in/one", "in/two")}

    async def consume(self) -> None:
        async with self.running() as shard:
            await shard.read_through(await self.heads())
            await shard.finish()

    def running(self) -> AbstractAsyncContextManager[RunningShard]:
        return running_shard(self.app, SPEC, self.client, clock=self.clock)

    async def consume_only(self, journal: str) -> None:
        async with running_shard(
            self.app, shard_spec("shard-orders", [journal], max_seconds=0.5), self.client
        ) as shard:
            await shard.read_through({journal: await self.client.head(journal)})
            await shard.finish()

    async def audit(
        self,
        *,
        remember: bool = True,
        expect: tuple[str, ...] | None = None,
        timeout_s: float = 0.5,
        evidence: SqlEvidence | None = None,
        **options: Any,
    ) -> Report:
        check = ConsumerCheck(
            "orders",
            self.client,
            evidence or SqlEvidence(self.store),
            ["shard-orders"],
            expectations=[parse_expectation(each) for each in (self.expect if expect is None else expect)],
            memory=self.memory if remember else None,
            timeout_s=timeout_s,
            **options,
        )
        return await run_checks("orders", [check], depth=Depth.DEEP if check.is_deep else Depth.CHEAP)

    def execute(self, statement: str, **parameters: Any) -> None:
        with self.store.engine.begin() as connection:
            connection.execute(text(statement), parameters)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster(brokers=1) as made:
        for name in ("in/one", "in/two", "out/one"):
            await made.create(name, labels={CONTENT_TYPE: JSON_LINES})
        yield made


@pytest.fixture
def store_url(request: pytest.FixtureRequest, new_store: Callable[[str], str]) -> str:
    return new_store(getattr(request, "param", "sqlite"))


@pytest.fixture
async def scene(cluster: Cluster, store_url: str) -> Scene:
    return Scene(cluster.client(), store_url)
