"""Tasks for an output's rows: they stage rows in the store, write them as files of an Iceberg table, or publish them.

Each returns the identity of their attempt, which the driver needs to commit the rows: an attempt id, files or
acknowledgements. If a table's rows are few, the task carries them to the driver instead. Spark gives the driver the
results of the winning attempts. Rows of other attempts have no effect: staged rows are not merged, files are swept,
carried rows do not arrive, and messages are never acknowledged.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructField
from sqlalchemy import Table

from coranto.client import ClientConfig, SyncJournalClient
from coranto.messages.framing import JsonLines
from coranto.messages.mapping import MappingName
from coranto_consumers.spark.inputs.strategies import ChooseTask
from coranto_consumers.spark.journals.fetching import executor_folder
from coranto_consumers.spark.session.task_errors import told_to_driver
from coranto_consumers.spark.sink.message_rows import ColumnRows, ObjectTextRows
from coranto_consumers.spark.sink.producer_ids import IdPool
from coranto_consumers.spark.sink.publishing import PendingPublisher
from coranto_consumers.stores.staging import StageWriter

if TYPE_CHECKING:
    from coranto_consumers.stores.iceberg.writing import FileWriter  # Needs the extra `lake`.

Batches = Iterator[Any]
"""Arrow record batches (pyarrow has no types)."""

_WITH_FULL_SHARE: Final = 8
STAGED: Final = "attempt STRING, rows BIGINT, carried BINARY, summary STRING"
FILES: Final = "rows BIGINT, files BINARY, staged ARRAY<STRING>, carried BINARY"
PUBLISHED: Final = (
    "journal STRING, intent BINARY, rollback BINARY, messages BIGINT, producer BINARY, token STRING, clock BIGINT"
)


@dataclass(frozen=True, slots=True)
class StageTask:
    """Stages the rows of a partition. Yields (attempt, rows, carried) if there are rows, then summaries.

    Few rows are not staged but carried to the driver, as an Arrow stream. All tasks together carry a bounded number of
    bytes: a task may carry `carried_bytes`, and less the higher its number is (`share_of`).
    """

    store_url: str = field(repr=False)  # It may hold a password.
    stage: Table
    shard: str
    fence: int
    carried_bytes: int = 0
    choose: ChooseTask | None = None
    """Reads the rows and summaries, if the partition does not have the rows themselves."""

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._stage(batches if self.choose is None else self.choose(batches))
            if self.choose is not None and self.choose.texts:
                yield _summaries(self.choose.texts)

    def _stage(self, batches: Batches) -> Batches:
        attempt, rows = uuid.uuid4().hex, 0
        first = next(batches, None)
        if first is None:
            return
        held, left = [first], share_of(self.carried_bytes, partition_number()) - first.nbytes
        while left >= 0:
            batch = next(batches, None)
            if batch is None:
                rows = sum(each.num_rows for each in held)
                if rows:
                    yield _staged(attempt, rows, as_stream(held))
                return
            held.append(batch)
            left -= batch.nbytes
        with StageWriter(self.store_url, self.stage, self.shard, self.fence, attempt) as writer:
            for batch in held:
                rows += writer.write_batch(batch)
            held.clear()
            for batch in batches:
                rows += writer.write_batch(batch)
        if rows:
            yield _staged(attempt, rows, None)


def share_of(most: int, partition: int) -> int:
    """Return the number of bytes that the task of a partition may carry to the driver.

    The first tasks may carry `most` each, later ones less: 10,000 tasks carry at most 80 times as much as one.
    """
    return most // (1 + partition // _WITH_FULL_SHARE)


def partition_number() -> int:
    """Return the number of the task's partition; 0 outside of tasks."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def as_stream(batches: Sequence[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(sink.getvalue())


def _staged(attempt: str, rows: int, carried: bytes | None) -> Any:
    return pa.record_batch(
        {
            "attempt": pa.array([attempt], pa.string()),
            "rows": pa.array([rows]),
            "carried": pa.array([carried], pa.binary()),
            "summary": pa.nulls(1, pa.string()),
        }
    )


def _summaries(texts: Sequence[str]) -> Any:
    return pa.record_batch(
        {
            "attempt": pa.nulls(len(texts), pa.string()),
            "rows": pa.array([0] * len(texts), pa.int64()),
            "carried": pa.nulls(len(texts), pa.binary()),
            "summary": pa.array(texts, pa.string()),
        }
    )


@dataclass(frozen=True, slots=True)
class WriteFilesTask:
    """Writes the rows of a partition. Yields (rows, files, staged, carried) if there are rows.

    `files` are the pickled `DataFile`s to commit. If the driver has to merge the rows (`merged`), `staged` are the
    locations of files for it to read. Rows up to `carried_bytes` (less for later tasks) are `carried` as an Arrow
    stream.
    """

    writer: FileWriter
    carried_bytes: int
    merged: bool = False

    def __call__(self, batches: Batches) -> Batches:
        with told_to_driver():
            yield from self._write(batches)

    def _write(self, batches: Batches) -> Batches:
        held: list[Any] = []
        left = share_of(self.carried_bytes, partition_number())
        rows = 0

        def counted() -> Iterator[Any]:
            nonlocal rows
            while held:
                rows += held[0].num_rows
                yield held.pop(0)
            for batch in batches:
                rows += batch.num_rows
                yield batch

        for batch in batches:
            held.append(batch)
            left -= batch.nbytes
            if left < 0:
                break
        else:
            if rows := sum(each.num_rows for each in held):
                yield _files(rows, carried=as_stream(held))
            return
        if self.merged:
            staged = list(self.writer.stage(counted()))
            yield _files(rows, staged=staged)
        else:
            files = pickle.dumps(list(self.writer.write(counted())))
            yield _files(rows, files=files)


def _files(rows: int, files: bytes | None = None, staged: list[str] | None = None, carried: bytes | None = None) -> Any:
    columns = {
        "rows": pa.array([rows]),
        "files": pa.array([files], pa.binary()),
        "staged": pa.array([staged or []], pa.list_(pa.string())),
        "carried": pa.array([carried], pa.binary()),
    }
    return pa.record_batch(columns)


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows (`key`, `value`) of a partition as pending. Yields each journal's acknowledgement.

    On return all messages are in their journals. They commit when the acknowledgements are appended. A failing attempt
    tells readers to drop its messages.
    """

    client: ClientConfig
    journals: tuple[str, ...]
    mapping: MappingName
    pool: IdPool
    fields: tuple[StructField, ...] | None = None
    """The fields of values that are structs. None: values are texts of JSON objects."""

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
                values = batch.column("value")
                rows = ObjectTextRows(values) if self.fields is None else ColumnRows.of_structs(self.fields, values)
                publisher.add(rows, batch.column("key"))
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
