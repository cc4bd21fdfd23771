"""A shard with a SQL store, in a process of the crash matrix."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.json
from crash_matrix_control import Control, StoppingClient
from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, create_engine, event

from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.columns import Columns
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores import SqlShardStore, SqlStore
from coranto_consumers.stores.merge import Add

# Import drivers once for all processes.
for url in ("sqlite://", "postgresql+psycopg://", "mysql+pymysql://"):
    create_engine(url)

COUNTS = Table(
    "counts",
    MetaData(),
    Column("cell", String(100), primary_key=True),
    Column("n", BigInteger, primary_key=True, autoincrement=False),
    Column("count", BigInteger, nullable=False),
)


class Counting(Application[SqlShardStore]):
    """An application that counts each number in the store, and publishes it to two journals."""

    def __init__(self, job: dict[str, Any], control: Control) -> None:
        self._job = job
        self._control = control
        self._seen: list[int] = []

    def new_message(self, journal: Any) -> Any:
        return Columns(pa.schema([("n", pa.int64())])) if self._job["in_batches"] else super().new_message(journal)

    def new_store(self, shard: Any) -> SqlShardStore:
        control = self._control
        control.say("restoring")

        def commit(connection: Connection) -> None:
            control.at("commit.before")
            connection.commit()
            control.at("commit.after")

        database = SqlStore(self._job["store"], commit=commit)

        @event.listens_for(database.engine, "before_cursor_execute")
        def before(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE gazette_checkpoints SET checkpoint"):
                control.at("fence.before")

        @event.listens_for(database.engine, "after_cursor_execute")
        def after(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE gazette_checkpoints SET checkpoint"):
                control.at("fence.after")

        return SqlShardStore(database, COUNTS)

    def consume_message(self, shard: Any, store: SqlShardStore, message: Any, publisher: Any) -> None:
        self._consume([message.message["n"]], publisher)

    def consume_batch(self, shard: Any, store: SqlShardStore, batch: Any, publisher: Any) -> None:
        self._consume(batch.rows.column("n").to_pylist(), publisher)

    def _consume(self, numbers: list[int], publisher: Any) -> None:
        self._control.at("consume.before")
        self._seen += numbers
        for n in numbers:
            for journal in self._job["outputs"]:
                publisher.publish(journal, {"n": n})
        self._control.at("consume.after")

    def finalize_txn(self, shard: Any, store: SqlShardStore, publisher: Any) -> None:
        seen, self._seen = self._seen, []
        cell = self._job["cell"]
        self._control.at("flush.before")
        for n in seen:
            mine = (COUNTS.c.cell == cell) & (COUNTS.c.n == n)
            row = {"cell": cell, "n": n, "count": 1}
            if self._job["in_batches"]:
                store.merge_batch(COUNTS, pa.RecordBatch.from_pylist([row]), ["cell", "n"], {"count": Add()})
            elif not store.connection.execute(COUNTS.update().where(mine).values(count=COUNTS.c.count + 1)).rowcount:
                store.insert(COUNTS, row)
        self._control.at("flush.after")


async def work(job: dict[str, Any], control: Control) -> None:
    client = StoppingClient(job["endpoint"], retry_timeout=180)
    client.control = control
    spec = shard_spec(job["cell"], [job["input"]], max_seconds=60)
    async with client, running_shard(Counting(job, control), spec, client) as shard:
        await control.follow(shard, job["input"])
