"""A shard with an Iceberg store, in a process of the crash matrix."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from crash_matrix_control import Control, StoppingClient
from pyiceberg.catalog.sql import SqlCatalog

from coranto_consumers.runtime.application import Application
from coranto_consumers.runtime.columns import Columns
from coranto_consumers.runtime.testing import running_shard, shard_spec
from coranto_consumers.stores.iceberg import IcebergShardStore
from coranto_consumers.stores.merge import Add

NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False)])
COUNTS = NUMBERS.append(pa.field("count", pa.int64(), nullable=False))


class StoppingCatalog(SqlCatalog):
    """A catalog that stops around the check of a commit against the current table, and around the whole commit."""

    control: Control

    def commit_table(self, *arguments: Any, **options: Any) -> Any:
        self.control.at("commit.before")
        answer = super().commit_table(*arguments, **options)
        self.control.at("commit.after")
        return answer

    def _update_and_stage_table(self, *arguments: Any, **options: Any) -> Any:
        self.control.at("fence.before")
        staged = super()._update_and_stage_table(*arguments, **options)
        self.control.at("fence.after")
        return staged


class Appending(Application[IcebergShardStore]):
    """An application that counts each number in the table, and publishes it to two journals.

    Messages append rows. Batches merge them by keys, so that a duplicate row increments a count.
    """

    def __init__(self, job: dict[str, Any], control: Control) -> None:
        self._job = job
        self._control = control

    def new_store(self, shard: Any) -> IcebergShardStore:
        self._control.say("restoring")
        catalog = StoppingCatalog("lake", **self._job["iceberg"])
        catalog.control = self._control
        merged: dict[str, Any] = {"keys": ["n"], "rules": {"count": Add()}} if self._job["in_batches"] else {}
        return IcebergShardStore(catalog, "cells.counts", COUNTS, **merged)

    def new_message(self, journal: Any) -> Any:
        return Columns(NUMBERS) if self._job["in_batches"] else super().new_message(journal)

    def consume_message(self, shard: Any, store: IcebergShardStore, message: Any, publisher: Any) -> None:
        store.append([{"n": message.message["n"], "count": 1}])
        self._publish([message.message["n"]], publisher)

    def consume_batch(self, shard: Any, store: IcebergShardStore, batch: Any, publisher: Any) -> None:
        store.append(batch.rows.append_column(COUNTS.field("count"), pa.array([1] * batch.rows.num_rows)))
        self._publish(batch.rows.column("n").to_pylist(), publisher)

    def _publish(self, numbers: list[int], publisher: Any) -> None:
        for n in numbers:
            for journal in self._job["outputs"]:
                publisher.publish(journal, {"n": n})

    def finalize_txn(self, shard: Any, store: IcebergShardStore, publisher: Any) -> None:
        self._control.at("flush.before")


async def work(job: dict[str, Any], control: Control) -> None:
    client = StoppingClient(job["endpoint"], retry_timeout=180)
    client.control = control
    spec = shard_spec(job["cell"], [job["input"]], max_seconds=60)
    async with client, running_shard(Appending(job, control), spec, client) as shard:
        await control.follow(shard, job["input"])
