"""Messages per second that the consumer runtime writes into SQL exactly once, and the speed of log recovery.

The floor of consuming inserts the same rows, already decoded, by the same driver in transactions of the same size. So
the ratio shows the cost of reading, sequencing, decoding and checkpoints. The floor of recovery reads the same log
through the same client, which recovery must do too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Float, MetaData, Table, Text

from benchmarks.messages import LINES, MESSAGES, SCHEMA, message_content
from benchmarks.runner import Figure, measure_pairs
from coranto.client import JournalClient
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, RECOVERY_LOG, label_set
from coranto.messages import Envelope, Framing, Sequencer, iter_messages
from coranto.messages.sequencer import read_committed
from coranto.specs.validation import ANY_REVISION
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.recoverylog import Hints, Player, Recorder, new_author
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.columns import Columns, MessageBatch
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.runtime.transaction import DeferToNextTransaction
from coranto_consumers.stores import SqlShardStore, SqlStore
from tests.servers.sql import MariadbServer, PostgresServer

PER_TRANSACTION = 10_000
COLUMNS = SCHEMA.names
KINDS = (BigInteger, Text, Float, Text, Text)
LOG_BYTES = 1 << 30
PENDING_BYTES = 16 << 20

Row = tuple[Any, ...]
Insert = Callable[[Connection, str, list[Row]], None]

_numbers = itertools.count()


def _insert_many(connection: Connection, table: str, rows: list[Row]) -> None:
    driver: Any = connection.connection.driver_connection
    places = ", ".join(["?" if connection.dialect.name == "sqlite" else "%s"] * len(COLUMNS))
    cursor = driver.cursor()
    cursor.executemany(f"INSERT INTO {table} VALUES ({places})", rows)
    cursor.close()


def _copy(connection: Connection, table: str, rows: list[Row]) -> None:
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {table} FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


class Rows(Application[SqlShardStore]):
    """Inserts each message as a row, in transactions of `PER_TRANSACTION` messages, as in `docs/consumers.md`.

    Batches are not split, so with them a transaction may have more messages.
    """

    def __init__(self, database: SqlStore, table: str, *, in_batches: bool) -> None:
        self._database = database
        self._in_batches = in_batches
        self._table = Table(table, MetaData(), *(Column(name, kind) for name, kind in zip(COLUMNS, KINDS, strict=True)))
        self._count = 0
        self.transactions = 0

    def new_store(self, shard: Shard) -> SqlShardStore:
        return SqlShardStore(self._database)

    def new_message(self, journal: pb.JournalSpec) -> Framing[Any] | Columns:
        return Columns(SCHEMA) if self._in_batches else super().new_message(journal)

    def consume_batch(self, shard: Shard, store: SqlShardStore, batch: MessageBatch, publisher: ShardPublisher) -> None:
        if self._count >= PER_TRANSACTION:
            raise DeferToNextTransaction
        self._count += len(batch)
        store.insert_batch(self._table, batch.rows)

    def consume_message(
        self, shard: Shard, store: SqlShardStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        if self._count == PER_TRANSACTION:
            raise DeferToNextTransaction
        self._count += 1
        content = message.message
        store.insert(self._table, {name: content[name] for name in COLUMNS})

    def finalize_txn(self, shard: Shard, store: SqlShardStore, publisher: ShardPublisher) -> None:
        self._count = 0
        self.transactions += 1


class Database:
    """A database. Each run writes to a new, empty table."""

    def __init__(self, url: str, insert: Insert) -> None:
        self.store = SqlStore(url)
        self._insert = insert
        self.transactions = 0
        """Transactions of the consumer's last run."""

    def _new_table(self) -> str:
        name = f"rows_{next(_numbers)}"
        with self.store.engine.begin() as connection:
            connection.exec_driver_sql(
                f"CREATE TABLE {name} (id BIGINT, carrier TEXT, delay DOUBLE PRECISION, origin TEXT, at TEXT)"
            )
        return name

    def _drop(self, table: str) -> None:
        """Drop a table. Raises AssertionError if it does not hold each message once."""
        with self.store.engine.begin() as connection:
            found = connection.exec_driver_sql(f"SELECT count(*), count(DISTINCT id) FROM {table}").one()
            assert tuple(found) == (MESSAGES, MESSAGES), found
            connection.exec_driver_sql(f"DROP TABLE {table}")

    def inserted(self, rows: list[Row]) -> float:
        """Insert rows, and return the rows per second."""
        table = self._new_table()
        begun = time.perf_counter()
        for at in range(0, len(rows), PER_TRANSACTION):
            with self.store.engine.begin() as connection:
                self._insert(connection, table, rows[at : at + PER_TRANSACTION])
        seconds = time.perf_counter() - begun
        self._drop(table)
        return len(rows) / seconds

    def consumed(self, endpoint: str, journal: str, *, in_batches: bool) -> float:
        """Consume a journal, and return the messages per second from the start of the shard to its last commit."""
        table = self._new_table()
        app = Rows(self.store, table, in_batches=in_batches)

        async def consume() -> float:
            async with JournalClient(endpoint) as client:
                head = await client.head(journal)
                begun = time.perf_counter()
                # Only the number of messages ends a transaction.
                spec = shard_spec(f"shard-{table}", [journal], min_seconds=0.0, max_seconds=60.0)
                async with running_shard(app, spec, client) as shard:
                    await shard.read_through({journal: head})
                    return MESSAGES / (time.perf_counter() - begun)

        rate = asyncio.run(consume())
        self.transactions = app.transactions
        self._drop(table)
        return rate


def _databases(stack: contextlib.ExitStack, folder: Path) -> Iterator[tuple[str, str, Database]]:
    yield "SQLite", "executemany", Database(f"sqlite:///{folder}/rows.db", _insert_many)
    yield "PostgreSQL", "COPY", Database(stack.enter_context(PostgresServer()).new_database(), _copy)
    if MariadbServer.binary() is not None:
        url = stack.enter_context(MariadbServer()).new_database()
        yield "MariaDB", "executemany", Database(url, _insert_many)


def _consuming(rounds: int, endpoint: str, folder: Path) -> list[Figure]:
    journal = "bench/consuming"
    content = message_content()
    with SyncJournalClient(endpoint) as client:
        _create(client, journal, JSON_LINES)
        client.append(journal, content)
    rows = [tuple(each[name] for name in COLUMNS) for each in _committed(content)]
    assert len(rows) == MESSAGES
    figures = []
    with contextlib.ExitStack() as stack:
        for name, statement, database in _databases(stack, folder):

            def floor(database: Database = database) -> float:
                return database.inserted(rows)

            floor_name = f"the same rows, decoded beforehand, by {statement} in as large transactions"
            for way, in_batches in (("", False), (", in batches", True)):

                def subject(database: Database = database, in_batches: bool = in_batches) -> float:
                    return database.consumed(endpoint, journal, in_batches=in_batches)

                subjects, floors = measure_pairs(rounds, floor, subject)
                note = f"{database.transactions} transactions, floor {MESSAGES // PER_TRANSACTION}"
                figures.append(Figure(f"consumed into {name}{way}", "messages/s", subjects, floors, floor_name, note))
    return figures


def _committed(content: bytes) -> Iterable[Mapping[str, Any]]:
    """Yield the decoded messages of the content."""
    envelopes = iter_messages(LINES, "j", [content], 0)
    return (each.message for each in read_committed(envelopes, Sequencer(), lambda _: ()))


async def _record(endpoint: str, log: str, folder: Path, piece: int) -> None:
    """Record a file of `LOG_BYTES`, written in pieces."""
    content = bytes(range(256)) * (piece // 256)
    async with JournalClient(endpoint) as client:
        async with Player(client, Hints(log), folder / "recorded") as player:
            recovery = await player.hand_off(new_author())
        async with Recorder(client, recovery) as recorder:
            fnode = recorder.create("file")
            for offset in range(0, LOG_BYTES, piece):
                recorder.write(fnode, offset, content)
                if recorder.pending_bytes > PENDING_BYTES:
                    await recorder.barrier()
            await recorder.barrier()


async def _recover(endpoint: str, log: str, folder: Path) -> float:
    """Return the MiB per second of a new owner's recovery of a log."""
    async with JournalClient(endpoint) as client:
        begun = time.perf_counter()
        async with Player(client, Hints(log), folder) as player:
            recovery = await player.hand_off(new_author())
        seconds = time.perf_counter() - begun
    assert recovery.recovered_bytes == LOG_BYTES == (folder / "file").stat().st_size
    return LOG_BYTES / seconds / (1 << 20)


async def _read(endpoint: str, log: str) -> float:
    async with JournalClient(endpoint) as client:
        head = await client.head(log)
        begun, done = time.perf_counter(), 0
        async for chunk in client.read(log, 0, end_offset=head, block=False):
            done += len(chunk.content)
        seconds = time.perf_counter() - begun
    assert done == head, (done, head)
    return LOG_BYTES / seconds / (1 << 20)


def _recovery(rounds: int, endpoint: str, folder: Path) -> list[Figure]:
    figures = []
    for piece, name in ((1 << 20, "1 MiB"), (1 << 14, "16 KiB")):
        log = f"bench/recovery/{piece}"
        with SyncJournalClient(endpoint) as client:
            _create(client, log, RECOVERY_LOG)
        asyncio.run(_record(endpoint, log, folder, piece))

        def subject(log: str = log) -> float:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                return asyncio.run(_recover(endpoint, log, Path(place) / "recovered"))

        def floor(log: str = log) -> float:
            return asyncio.run(_read(endpoint, log))

        subjects, floors = measure_pairs(rounds, floor, subject)
        note = f"median seconds for 1 GiB: {sorted(1024 / rate for rate in subjects)[len(subjects) // 2]:.1f}"
        figures.append(
            Figure(
                f"recovery of 1 GiB in writes of {name}",
                "MiB/s",
                subjects,
                floors,
                "reading the log by the same client",
                note,
            )
        )
        with SyncJournalClient(endpoint) as client:
            client.apply([pb.ApplyRequest.Change(delete=log, expect_mod_revision=ANY_REVISION)])
    return figures


def _create(client: SyncJournalClient, journal: str, content_type: str) -> None:
    spec = pb.JournalSpec(name=journal, replication=1, labels=label_set({CONTENT_TYPE: content_type}))
    spec.fragment.length = 1 << 30
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.refresh_interval.FromSeconds(3600)
    client.apply([pb.ApplyRequest.Change(upsert=spec)])


def run(rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder) / "cluster") as cluster:
        return _consuming(rounds, cluster.info.endpoint, Path(folder))


def run_recovery(rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder) / "cluster") as cluster:
        return _recovery(rounds, cluster.info.endpoint, Path(folder))
