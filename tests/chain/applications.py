"""The three consumers. Each has a different kind of store."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import BigInteger, Column, MetaData, Table, Text, select

from coranto.messages import Envelope
from coranto_consumers.runtime.application import Application, Shard
from coranto_consumers.runtime.publishing import ShardPublisher
from coranto_consumers.stores import JsonFileStore, SqliteStore, SqlShardStore, SqlStore
from tests.chain.model import ALERT_EVERY, ALERTS, CLEAN, TOTAL_EVERY, TOTALS, digest_of, journal_of

STORE_VARIABLE = "CORANTO_CHAIN_STORE"
"""The environment variable with the URL of `Aggregate`'s SQL store."""

SUMS = Table(
    "chain_sums",
    MetaData(),
    Column("stream", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
    Column("sum", BigInteger, nullable=False),
    Column("digest", BigInteger, nullable=False),
)

ALERT_SCHEMA = """
CREATE TABLE IF NOT EXISTS totals (
    stream TEXT, count INTEGER, sum INTEGER, digest INTEGER, times INTEGER DEFAULT 1, PRIMARY KEY (stream, count)
);
CREATE TABLE IF NOT EXISTS levels (stream TEXT PRIMARY KEY, level INTEGER, alerts INTEGER);
"""

CleanState = dict[str, dict[str, int]]


class Clean(Application[JsonFileStore[CleanState]]):
    """An application that drops messages without a number, and publishes the others with their stream position."""

    def new_store(self, shard: Shard) -> JsonFileStore[CleanState]:
        return JsonFileStore(shard.recorder, {})

    def consume_message(
        self, shard: Shard, store: JsonFileStore[CleanState], message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        content = message.message
        stream, n = content["stream"], content.get("n")
        mine = store.state.setdefault(stream, {"count": 0, "dropped": 0, "sum": 0, "digest": 0})
        if not isinstance(n, int):
            mine["dropped"] += 1
            return
        chunk = mine["count"]
        mine["count"] += 1
        mine["sum"] += n
        mine["digest"] = digest_of(mine["digest"], chunk, n)
        cleaned = {"stream": stream, "chunk": chunk, "n": n, "last": content["last"]}
        publisher.publish(journal_of(stream, CLEAN), cleaned)


class Aggregate(Application[SqlShardStore]):
    """An application that keeps each stream's sum in a table, and publishes it every `TOTAL_EVERY` numbers and last."""

    def __init__(self) -> None:
        self._database = SqlStore(os.environ[STORE_VARIABLE])

    def new_store(self, shard: Shard) -> SqlShardStore:
        return SqlShardStore(self._database, SUMS)

    def consume_message(
        self, shard: Shard, store: SqlShardStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        content = message.message
        stream, n, last = content["stream"], content["n"], content["last"]
        mine = SUMS.c.stream == stream
        row = store.connection.execute(select(SUMS).where(mine)).one_or_none()
        _, count, total, digest = row if row is not None else (stream, 0, 0, 0)
        # Include the position from the first consumer, so that a wrong position changes the digest.
        digest = digest_of(digest, content["chunk"], n)
        values = {"count": count + 1, "sum": total + n, "digest": digest}
        if row is None:
            store.connection.execute(SUMS.insert().values(stream=stream, **values))
        else:
            store.connection.execute(SUMS.update().where(mine).values(**values))
        if last or values["count"] % TOTAL_EVERY == 0:
            publisher.publish(journal_of(stream, TOTALS), {"stream": stream, **values, "last": last})


class Alert(Application[SqliteStore]):
    """An application that keeps all sums in a local database, and publishes a sum that reaches a new level."""

    def new_store(self, shard: Shard) -> SqliteStore:
        # A small limit, so that the database is copied during the test.
        return SqliteStore(shard.recorder, ALERT_SCHEMA, copy_bytes=512 << 10)

    def consume_message(
        self, shard: Shard, store: SqliteStore, message: Envelope[Any], publisher: ShardPublisher
    ) -> None:
        content = {key: value for key, value in message.message.items() if key != "_meta"}
        stream, connection = content["stream"], store.connection
        connection.execute(
            "INSERT INTO totals (stream, count, sum, digest) VALUES (:stream, :count, :sum, :digest) "
            "ON CONFLICT (stream, count) DO UPDATE SET times = times + 1",
            content,
        )
        row = connection.execute("SELECT level, alerts FROM levels WHERE stream = ?", (stream,)).fetchone()
        before, alerts = row or (0, 0)
        level = content["sum"] // ALERT_EVERY
        if content["last"] or level > before:
            publisher.publish(journal_of(stream, ALERTS), {**content, "alert": alerts})
            alerts += 1
        connection.execute("INSERT OR REPLACE INTO levels VALUES (?, ?, ?)", (stream, max(level, before), alerts))
