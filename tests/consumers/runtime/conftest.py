"""Fixtures for tests of the runtime: journals with messages, and an application that sums them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, select

from coranto.client import JournalClient
from coranto.cluster import EtcdServer
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_selector, label_set
from coranto.messages import (
    Envelope,
    JsonLines,
    ProducerClock,
    Sequencer,
    TransactionBuilder,
    iter_messages,
    new_producer_id,
)
from coranto.messages import read_committed as committed_of
from coranto.testing.fake_broker import FakeBroker
from coranto.wire import consumer_pb2 as pc
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.outputs.dead_letters import DeadLetters
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.columns import Columns, MessageBatch
from coranto_consumers.runtime.peers import ShardPeers
from coranto_consumers.runtime.process import ConsumerProcess
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.resolver import ShardState
from coranto_consumers.runtime.settings import ConsumerProcessSettings
from coranto_consumers.runtime.transaction import DeferToNextTransaction
from coranto_consumers.stores.merge import Add
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.sql_shard import SqlShardStore

_numbers = itertools.count()

TIMEOUT = 120.0
"""Seconds to wait for certain events, enough for a slow machine."""

SUMS = Table(
    "sums",
    MetaData(),
    Column("key", String(50), primary_key=True),
    Column("total", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
)


COLUMNS = pa.schema([("key", pa.string()), ("n", pa.int64())])


class Journals:
    """Journals of a fake broker, written and read as messages."""

    def __init__(self, fake: FakeBroker) -> None:
        self.fake = fake
        self._clock = ProducerClock(time.time_ns)

    def create(self, *names: str) -> None:
        for name in names:
            self.fake.create(name, labels=label_set([(CONTENT_TYPE, JSON_LINES)]))

    def producer(self) -> TransactionBuilder[Any]:
        return TransactionBuilder(new_producer_id(os.urandom), self._clock, JsonLines())

    async def flush(self, builder: TransactionBuilder[Any]) -> None:
        """Append the builder's pending messages."""
        for journal, batch in builder.take_batches(1 << 20):
            await self.fake.write(journal, batch)

    async def commit(self, builder: TransactionBuilder[Any]) -> None:
        """Append the builder's pending messages, and acknowledge them."""
        await self.flush(builder)
        builder.ack_intents()
        for journal, content in builder.commit().items():
            await self.fake.write(journal, content)
        builder.finish()

    async def publish(self, journal: str, *messages: dict[str, Any]) -> int:
        """Publish a transaction, and return the journal's head after it."""
        builder = self.producer()
        for message in messages:
            builder.add(journal, message)
        await self.commit(builder)
        return self.head(journal)

    def head(self, journal: str) -> int:
        return self.fake.journals[journal].head

    def committed(self, journal: str) -> list[dict[str, Any]]:
        """Return the messages that a read-committed reader sees, without UUIDs."""
        content = self.fake.journals[journal].content

        def read(begin: int, end: int) -> list[Envelope[Any]]:
            return list(iter_messages(JsonLines(), journal, [content[begin:end]], begin))

        found = committed_of(read(0, len(content)), Sequencer(), lambda wanted: read(wanted.begin, wanted.end))
        return [{key: value for key, value in each.message.items() if key != "_meta"} for each in found]


class Sums(Application[SqlShardStore]):
    """An application that sums `n` by `key` in a table, and republishes each message."""

    def __init__(self, database: SqlStore, output: str = "", *, in_batches: Container[str] = ()) -> None:
        self.database = database
        self.in_batches = in_batches
        """The sources that are consumed in columns."""
        self.columns = Columns(COLUMNS)
        self.most = 1 << 30
        """The number of messages in a transaction after which the application defers a batch."""
        self.output = output
        self.transactions: list[list[int]] = [[]]
        """The consumed numbers, by attempted transaction."""
        self.before: Callable[[dict[str, Any]], None] = lambda message: None

    def new_store(self, shard: Shard) -> SqlShardStore:
        letters = self.columns.misfits
        tables = [letters.table] if isinstance(letters, DeadLetters) and letters.table is not None else []
        return SqlShardStore(self.database, SUMS, *tables)

    def new_message(self, journal: pb.JournalSpec) -> Any:
        return self.columns if journal.name in self.in_batches else super().new_message(journal)

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

    def consume_batch(self, shard: Shard, store: SqlShardStore, batch: MessageBatch, publisher: ShardPublisher) -> None:
        if len(self.transactions[-1]) >= self.most:
            raise DeferToNextTransaction
        for content in batch.rows.to_pylist():
            self.before(content)
        rows = batch.rows.select(["key", "n"]).to_pylist()
        self.transactions[-1] += [row["n"] for row in rows]
        changes = [batch.rows.column("key"), batch.rows.column("n"), pa.array([1] * len(rows))]
        added = pa.RecordBatch.from_arrays(changes, ["key", "total", "count"])
        store.merge_batch(SUMS, added, ["key"], {"total": Add(), "count": Add()})
        if self.output:
            for row in rows:
                publisher.publish(self.output, row)

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
    async with JournalClient(journals.fake.endpoint) as connected:
        yield connected


@pytest.fixture
def in_batches() -> Container[str]:
    """The sources that the application consumes in batches; test modules override it."""
    return ()


@pytest.fixture
def sums(store_url: str, in_batches: Container[str]) -> Sums:
    """The application with an empty store, for each kind of store, publishing to `out/one`."""
    return Sums(SqlStore(store_url), "out/one", in_batches=in_batches)


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path_factory.mktemp("etcd"), fsync=False) as server:
        yield server


class Consumer:
    """Processes of one consumer, run in this process, and calls of their service."""

    def __init__(self, etcd: str, client: JournalClient) -> None:
        self.settings = ConsumerProcessSettings(
            etcd=etcd, etcd_prefix=f"/test/consumer-{next(_numbers)}", lease_seconds=60, exit_seconds=60
        )
        self.client = client
        self._exits = contextlib.AsyncExitStack()
        self._peers = ShardPeers()

    async def close(self) -> None:
        await self._exits.aclose()
        await self._peers.close()

    async def start(self, app: Application[Any], id: str = "process-a", **settings: Any) -> ConsumerProcess:
        made = ConsumerProcess(
            ConsumerProcessSettings(**{**self.settings.model_dump(), "id": id, **settings}), app, self.client
        )
        return await self._exits.enter_async_context(made)

    def stub(self, process: ConsumerProcess) -> Any:
        return self._peers.stub(process.endpoint)

    async def apply(self, process: ConsumerProcess, *specs: pc.ShardSpec, revision: int = 0) -> pc.ApplyResponse:
        changes = [pc.ApplyRequest.Change(upsert=spec, expect_mod_revision=revision) for spec in specs]
        response: pc.ApplyResponse = await self.stub(process).Apply(pc.ApplyRequest(changes=changes))
        return response

    async def shard(self, process: ConsumerProcess, id: str = "shard-sums") -> pc.ListResponse.Shard:
        request = pc.ListRequest(selector=label_selector(include={"id": id}))
        (found,) = (await self.stub(process).List(request)).shards
        return found

    async def stat(self, process: ConsumerProcess, id: str = "shard-sums", **read_through: int) -> pc.StatResponse:
        """Call Stat once there is a primary. Journals are given without the prefix `in/`."""
        offsets = {f"in/{name}": offset for name, offset in read_through.items()}
        async with asyncio.timeout(TIMEOUT):
            while True:
                state = process.keyspace.state
                response: pc.StatResponse = await self.stub(process).Stat(
                    pc.StatRequest(shard=id, read_through=offsets)
                )
                if response.status != pc.NO_SHARD_PRIMARY:
                    return response
                await process.keyspace.wait_for_change(state)

    async def status(self, process: ConsumerProcess, *codes: str, id: str = "shard-sums") -> None:
        """Wait until the shard's replicas have these statuses, by slot."""

        def reached(state: ShardState) -> bool:
            found = [pc.ReplicaStatus.Code.Name(each.value.code) for each in state.assignments(id)]
            return found == list(codes)

        await process.keyspace.wait_until(reached, timeout=TIMEOUT)


@pytest.fixture
async def consumer(etcd: EtcdServer, client: JournalClient) -> AsyncIterator[Consumer]:
    made = Consumer(etcd.endpoint, client)
    yield made
    await made.close()
