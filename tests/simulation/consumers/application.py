"""The application: counts and sums by key, records each message, and publishes one message for each.

Its store is any of `KINDS`, within a `WatchedStore` that records the store's reports to the runtime.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from coranto.messages import Checkpoint, Envelope
from coranto_consumers.recoverylog import Recorder
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.runtime.transaction import DeferToNextTransaction
from coranto_consumers.stores import JsonFileStore, SqliteStore, SqlShardStore
from coranto_consumers.stores.base import Store

from . import tables
from .database import SimSqlStore
from .history import Book, Delivery, Entry, Owner, Record

SCHEMA = """
CREATE TABLE IF NOT EXISTS sums (key TEXT PRIMARY KEY, count INTEGER NOT NULL, total INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entries
    (n INTEGER PRIMARY KEY, id TEXT, journal TEXT, producer TEXT, clock TEXT, key TEXT, amount INTEGER, token TEXT);
CREATE TABLE IF NOT EXISTS tokens (n INTEGER PRIMARY KEY, token TEXT);
"""


class BookStore(ABC):
    """A store that has a `Book`."""

    store: Store

    async def begin(self) -> None:  # noqa: B027  # Most have nothing to begin.
        """Start a transaction. `async` methods must await it before they call the others."""

    @abstractmethod
    def record(self, entry: Entry) -> int:
        """Count a message in the current transaction, and return the sum of its key."""

    @abstractmethod
    def end_transaction(self, token: str) -> None: ...

    @abstractmethod
    def tokens(self) -> list[str]: ...


class SqlBook(BookStore):
    def __init__(self, store: SimSqlStore) -> None:
        self.store = self._sql = store

    def record(self, entry: Entry) -> int:
        self._sql.record(entry)
        return self._sql.book.sums[entry.key][1]

    def end_transaction(self, token: str) -> None:
        self._sql.end_transaction(token)

    def tokens(self) -> list[str]:
        return list(self._sql.book.tokens)


class TablesBook(BookStore):
    def __init__(self, store: SqlShardStore, path: Path) -> None:
        self.store = self._tables = store
        self._path = path

    async def begin(self) -> None:
        await self._tables.begin()

    def record(self, entry: Entry) -> int:
        return tables.record(self._tables, entry)

    def end_transaction(self, token: str) -> None:
        tables.end_transaction(self._tables, token)

    def tokens(self) -> list[str]:
        return tables.read(self._path).tokens


class JsonBook(BookStore):
    def __init__(self, recorder: Recorder) -> None:
        self._json: JsonFileStore[Book] = JsonFileStore(recorder, Book(), dump=dump_book, load=load_book)
        self.store = self._json

    def record(self, entry: Entry) -> int:
        book = self._json.state
        count = book.sums.setdefault(entry.key, [0, 0])
        count[0] += 1
        count[1] += entry.amount
        book.entries.append(entry)
        return count[1]

    def end_transaction(self, token: str) -> None:
        self._json.state.tokens.append(token)

    def tokens(self) -> list[str]:
        return list(self._json.state.tokens)


class SqliteBook(BookStore):
    def __init__(self, recorder: Recorder, copy_bytes: int) -> None:
        self.store = self._lite = SqliteStore(recorder, SCHEMA, copy_bytes=copy_bytes)

    def record(self, entry: Entry) -> int:
        connection = self._lite.connection
        connection.execute(
            "INSERT INTO sums VALUES (?, 1, ?) ON CONFLICT DO UPDATE SET count = count + 1, total = total + ?",
            (entry.key, entry.amount, entry.amount),
        )
        # A clock has 64 bits and is unsigned.
        row = [str(value) if name == "clock" else value for name, value in entry._asdict().items()]
        connection.execute("INSERT INTO entries VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", row)
        (total,) = connection.execute("SELECT total FROM sums WHERE key = ?", (entry.key,)).fetchone()
        return int(total)

    def end_transaction(self, token: str) -> None:
        self._lite.connection.execute("INSERT INTO tokens VALUES (NULL, ?)", (token,))

    def tokens(self) -> list[str]:
        return [token for (token,) in self._lite.connection.execute("SELECT token FROM tokens ORDER BY n")]


def dump_book(book: Book) -> Any:
    return {"sums": book.sums, "entries": book.entries, "tokens": book.tokens}


def load_book(decoded: Any) -> Book:
    return Book(decoded["sums"], [Entry(*entry) for entry in decoded["entries"]], decoded["tokens"])


def read_database(path: Path) -> Book:
    """Return the book of a SQLite store's database."""
    connection = sqlite3.connect(path)
    try:
        sums = {key: [count, total] for key, count, total in connection.execute("SELECT * FROM sums ORDER BY key")}
        rows = connection.execute(
            "SELECT id, journal, producer, clock, key, amount, token FROM entries ORDER BY n"
        ).fetchall()
        entries = [Entry(*row)._replace(clock=int(row[3])) for row in rows]
        tokens = [token for (token,) in connection.execute("SELECT token FROM tokens ORDER BY n")]
    finally:
        connection.close()
    return Book(sums, entries, tokens)


class WatchedStore(Store):
    """A store whose restored and committed transactions are recorded."""

    def __init__(self, inner: BookStore, owner: Owner, record: Record, now: Callable[[], float]) -> None:
        self.book = inner
        self.owner = owner
        self.count = 0
        """Messages of the current transaction."""
        self.token = f"{owner.number}.0"
        self._transactions = 0
        self._record = record
        self._now = now

    def end_transaction(self) -> None:
        self.book.end_transaction(self.token)

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        checkpoint = await self.book.store.restore_checkpoint(shard)
        self.owner.restored, self.owner.found = self._now(), tuple(self.book.tokens())
        self._license(checkpoint)
        return checkpoint

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        token = self.token
        self._transactions += 1
        self.count, self.token = 0, f"{self.owner.number}.{self._transactions}"
        return self._confirm(await self.book.store.start_commit(shard, checkpoint, wait_for), token, checkpoint)

    async def _confirm(self, committing: Awaitable[None], token: str, checkpoint: Checkpoint) -> None:
        await committing
        self.owner.confirmed.append(token)
        self._license(checkpoint)

    def _license(self, checkpoint: Checkpoint) -> None:
        for journal, intent in checkpoint.ack_intents.items():
            self._record.intents[journal, intent] = None

    async def destroy(self) -> None:
        await self.book.store.destroy()

    def is_transient(self, error: BaseException) -> bool:
        return self.book.store.is_transient(error)


class Tally(Application[WatchedStore]):
    """The application with synchronous methods, which do not block."""

    def __init__(
        self,
        open_book: Callable[[Shard], tuple[BookStore, Owner]],
        record: Record,
        outputs: Sequence[str],
        rng: random.Random,
        now: Callable[[], float],
        *,
        defers: bool,
    ) -> None:
        self._open_book = open_book
        self._record = record
        self._outputs = outputs
        self._rng = rng
        self._now = now
        self._defers = defers

    def new_store(self, shard: Shard) -> WatchedStore:
        return WatchedStore(*self._open_book(shard), self._record, self._now)

    def consume_message(
        self, shard: Shard, store: WatchedStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        self.consume(shard, store, message, publisher)

    def finalize_txn(self, shard: Shard, store: WatchedStore, publisher: ShardPublisher) -> None:
        store.end_transaction()

    def consume(self, shard: Shard, store: WatchedStore, message: Envelope[Any], publisher: ShardPublisher) -> None:
        if self._defers and store.count and self._rng.random() < 0.1:
            raise DeferToNextTransaction
        content = message.message
        self._record.deliveries.append(Delivery(store.owner.number, shard.id, content["id"]))
        store.count += 1
        key, amount = content["key"], content["amount"]
        producer = message.producer.hex()
        entry = Entry(content["id"], message.journal, producer, message.clock, key, amount, store.token)
        total = store.book.record(entry)
        output = output_of(key, self._outputs)
        publisher.publish(output, {"shard": shard.id, "of": content["id"], "key": key, "total": total})


class AsyncTally(Tally):
    """`Tally` with methods that wait."""

    async def consume_message(  # type: ignore[override]
        self, shard: Shard, store: WatchedStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        if self._rng.random() < 0.3:
            await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.02, 0.2)))
        await store.book.begin()
        self.consume(shard, store, message, publisher)

    async def finalize_txn(  # type: ignore[override]
        self, shard: Shard, store: WatchedStore, publisher: ShardPublisher
    ) -> None:
        await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.02)))
        await store.book.begin()
        store.end_transaction()


def output_of(key: str, outputs: Sequence[str]) -> str:
    """Return the journal that messages of a key are published to."""
    return outputs[sum(key.encode()) % len(outputs)]
