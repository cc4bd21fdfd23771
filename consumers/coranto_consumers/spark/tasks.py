"""Tasks for an output's rows: they stage rows in the store, or publish them.

Both return only the identity of their attempt, which the driver needs to make the rows count: an attempt id, or
acknowledgements. Spark gives the driver the results of the winning attempts. Rows of other attempts have no effect:
staged rows are not merged, and messages are never acknowledged.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from sqlalchemy import Table

from coranto.client import ClientConfig, SyncJournalClient
from coranto.messages.framing import JsonLines
from coranto.messages.mapping import MappingName
from coranto_consumers.spark.fetching import executor_folder
from coranto_consumers.spark.producer_ids import IdPool
from coranto_consumers.spark.sink.publishing import PendingPublisher
from coranto_consumers.spark.task_errors import told_to_driver
from coranto_consumers.stores.staging import StageWriter

Batches = Iterator[Any]
"""Arrow record batches (pyarrow has no types)."""

STAGED: Final = "attempt STRING, rows BIGINT"
PUBLISHED: Final = (
    "journal STRING, intent BINARY, rollback BINARY, messages BIGINT, producer BINARY, token STRING, clock BIGINT"
)


@dataclass(frozen=True, slots=True)
class StageTask:
    """Stages the rows of a partition. Yields (attempt, rows) if there are rows."""

    store_url: str = field(repr=False)  # It may hold a password.
    stage: Table
    shard: str
    fence: int

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._stage(batches)

    def _stage(self, batches: Batches) -> Batches:
        attempt, rows = uuid.uuid4().hex, 0
        first = next(batches, None)
        if first is None:
            return
        with StageWriter(self.store_url, self.stage, self.shard, self.fence, attempt) as writer:
            for batch in _chain(first, batches):
                rows += writer.write_batch(batch)
        if rows:
            yield pa.record_batch({"attempt": [attempt], "rows": [rows]})


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows (`key`, `value`) of a partition as pending. Yields each journal's acknowledgement.

    On return all messages are in their journals. They commit when the acknowledgements are appended. An attempt that
    fails tells readers to drop its messages.
    """

    client: ClientConfig
    journals: tuple[str, ...]
    mapping: MappingName
    pool: IdPool

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._publish(batches)

    def _publish(self, batches: Batches) -> Batches:
        first = next(batches, None)
        if first is None:
            return
        taken = self.pool.take(executor_folder())
        framing = JsonLines()
        with (
            SyncJournalClient.of(self.client) as client,
            PendingPublisher(
                client, self.journals, self.mapping, framing, producer=taken.use.producer, clock=taken.clock
            ) as publisher,
        ):
            for batch in _chain(first, batches):
                publisher.add(batch.column("value"), batch.column("key"))
            pending = publisher.finish()
        if intents := pending.intents(framing):
            rollbacks = pending.rollbacks(framing)
            yield pa.record_batch(
                {
                    "journal": pa.array(intents, pa.string()),
                    "intent": pa.array(intents.values(), pa.binary()),
                    "rollback": pa.array([rollbacks[journal] for journal in intents], pa.binary()),
                    "messages": pa.array([pending.counts[journal] for journal in intents], pa.int64()),
                    "producer": pa.array([taken.use.producer] * len(intents), pa.binary()),
                    "token": pa.array([taken.use.token] * len(intents), pa.string()),
                    "clock": pa.array([max(pending.ack_clocks.values())] * len(intents), pa.int64()),
                }
            )


def _chain(first: Any, rest: Batches) -> Batches:
    yield first
    yield from rest
