"""Tasks for an output's rows: they stage rows in the store, write them as files of an Iceberg table, or publish them.

Each attempt returns the data that the driver needs to commit its rows: an attempt id, files or acknowledgements, or the
rows themselves if they are few. Rows of losing attempts have no effect.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField
from sqlalchemy import Table

from coranto.client import ClientConfig, SyncJournalClient
from coranto.messages.framing import JsonLines
from coranto.messages.mapping import MappingName
from coranto_consumers.spark.inputs.strategies import ChooseTask
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.sink.message_rows import ColumnRows, ObjectTextRows, Rows
from coranto_consumers.spark.sink.producer_ids import IdPool
from coranto_consumers.spark.sink.publishing import publish
from coranto_consumers.stores.staging import StageWriter

if TYPE_CHECKING:
    from coranto_consumers.stores.iceberg.writing import FileWriter  # Needs the extra `lake`.

Batches = Iterator[Any]
"""Arrow record batches (pyarrow has no type hints)."""

_WITH_FULL_SHARE: Final = 8
_STAGED: Final = pa.schema({"attempt": pa.string(), "rows": pa.int64(), "carried": pa.binary(), "summary": pa.string()})
_FILES: Final = pa.schema({"files": pa.binary(), "staged": pa.list_(pa.string()), "carried": pa.binary()})
_PUBLISHED: Final = pa.schema(
    {
        **{"journal": pa.string(), "intent": pa.binary(), "rollback": pa.binary(), "messages": pa.int64()},
        **{"producer": pa.binary(), "token": pa.string(), "clock": pa.int64()},
    }
)
STAGED, FILES, PUBLISHED = map(from_arrow_schema, (_STAGED, _FILES, _PUBLISHED))


@dataclass(frozen=True, slots=True)
class StageTask:
    """Stages the rows of a partition, or carries a few rows. Yields (attempt, rows, carried), then summaries."""

    store_url: str = field(repr=False)  # May contain a password.
    stage: Table
    shard: str
    fence: int
    carried_bytes: int = 0
    choose: ChooseTask | None = None
    """Reads the rows and summaries if the partition has only numbers of slices."""

    def __call__(self, batches: Batches) -> Batches:
        with errors_to_driver():
            yield from self._stage(batches if self.choose is None else self.choose(batches))
            if self.choose is not None and self.choose.texts:
                yield _results(_STAGED, [{"rows": 0, "summary": text} for text in self.choose.texts])

    def _stage(self, batches: Batches) -> Batches:
        attempt = uuid.uuid4().hex
        held, are_all = _taken(batches, self.carried_bytes)
        if are_all:
            rows = sum(each.num_rows for each in held)
            carried = as_stream(held) if rows else None
        else:
            carried = None
            with StageWriter(self.store_url, self.stage, self.shard, self.fence, attempt) as writer:
                rows = sum(map(writer.write_batch, _drained(held, batches)))
        if rows:
            yield _results(_STAGED, [{"attempt": attempt, "rows": rows, "carried": carried}])


def _taken(batches: Batches, carried_bytes: int) -> tuple[list[Any], bool]:
    """Take the batches that this task may carry to the driver. Return them, and True if no batches are left.

    Tasks with higher numbers carry less, so 10,000 tasks carry at most 80 times as much as one.
    """
    context = TaskContext.get()
    held, left = [], carried_bytes // (1 + (0 if context is None else context.partitionId()) // _WITH_FULL_SHARE)
    for batch in batches:
        held.append(batch)
        left -= batch.nbytes
        if left < 0:
            return held, False
    return held, True


def _drained(held: list[Any], batches: Batches) -> Batches:
    """Yield the batches that were taken, releasing each one, and then the remaining batches."""
    while held:
        yield held.pop(0)
    yield from batches


def _results(schema: Any, rows: Sequence[Mapping[str, object]]) -> Any:
    return pa.RecordBatch.from_pylist(rows, schema)


def as_stream(batches: Sequence[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return bytes(sink.getvalue())


@dataclass(frozen=True, slots=True)
class WriteFilesTask:
    """Writes the rows of a partition. Yields (files, staged, carried) if there are rows.

    `files` are the pickled `DataFile`s to commit. If the driver has to merge the rows (`merged`), `staged` are the
    locations of files for it to read. Few rows are `carried`, as by `StageTask`.
    """

    writer: FileWriter
    carried_bytes: int
    merged: bool = False

    def __call__(self, batches: Batches) -> Batches:
        with errors_to_driver():
            held, are_all = _taken(batches, self.carried_bytes)
            if not are_all and self.merged:
                yield _results(_FILES, [{"staged": list(self.writer.stage(_drained(held, batches)))}])
            elif not are_all:
                yield _results(_FILES, [{"files": pickle.dumps(list(self.writer.write(_drained(held, batches))))}])
            elif any(each.num_rows for each in held):
                yield _results(_FILES, [{"carried": as_stream(held)}])


@dataclass(frozen=True, slots=True)
class PublishTask:
    """Publishes the rows (`key`, `value`) of a partition as pending messages. Yields each journal's acknowledgement."""

    client: ClientConfig
    journals: tuple[str, ...]
    mapping: MappingName
    pool: IdPool
    fields: tuple[StructField, ...] | None = None
    """The fields of values that are structs. None: values are JSON objects as text."""

    def __call__(self, batches: Batches) -> Batches:
        first = next(batches, None)
        if first is None:
            return
        framing = JsonLines()
        with errors_to_driver(), SyncJournalClient.of(self.client) as client:
            pending, use = publish(
                client, self.journals, self.mapping, framing, self.pool, map(self._rows, chain([first], batches))
            )
        if intents := pending.intents(framing):
            rollbacks = pending.rollbacks(framing)
            rows = [
                {"journal": journal, "intent": intent, "rollback": rollbacks[journal], **use._asdict()}
                | {"messages": pending.counts[journal]}
                for journal, intent in intents.items()
            ]
            yield _results(_PUBLISHED, rows)

    def _rows(self, batch: Any) -> tuple[Rows, Any, None]:
        values = batch.column("value")
        rows = ObjectTextRows(values) if self.fields is None else ColumnRows.of_structs(self.fields, values)
        return rows, batch.column("key"), None
