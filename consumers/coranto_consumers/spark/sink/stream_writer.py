"""The writers of `option("stream", …)`: rows go to the segments of a stream by their routing keys, all or none.

Tasks append events as pending to the segments of their keys (`stream_publishing.py`). When all tasks have succeeded,
the driver commits what they report as one bulk transaction (`coranto.streams.writer.multi_key.bulk`): one append to the
stream's journal of decisions makes the write happen, and acknowledgements follow. The stream may be scaled at any time.

A batch of a streaming query is known by the query's id, which its checkpoint holds, and by its number, and is committed
once. A batch write has no name: it is written as often as the job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import structlog
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.loop import run_blocking
from coranto.labels import label_selector
from coranto.security.tokens import Capability
from coranto.streams.writer.multi_key.bulk import BulkCommitter
from coranto.streams.writer.multi_key.bulk_parts import BulkPart, roll_back
from coranto_consumers.spark.access import for_selector
from coranto_consumers.spark.sink.options import RowForm, SinkOptions
from coranto_consumers.spark.sink.stream_publishing import SegmentPublisher
from coranto_consumers.spark.sink.writer import query_of, query_of_task, refuse_overwriting
from coranto_consumers.spark.task_errors import told_to_driver

_ABORT_SECONDS: Final = 5.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PublishedPartition(WriterCommitMessage):
    """The result of an attempt of a task."""

    parts: tuple[BulkPart, ...]
    query: str = ""


class _ToStream:
    """The common part of both writers. Spark pickles it, and uses it in tasks and in the driver."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool, *, streaming: bool) -> None:
        refuse_overwriting(overwrite, streaming=streaming)
        self._form = RowForm.of(schema, options)
        self._options = options
        stream = self._with_committer(lambda committer: committer.prepare())
        self._prepared = [segment.journal for segment in stream.active()]
        # Tasks and the driver's commit get a token for this stream instead of keys.
        scope = label_selector(include=[("name:prefix", f"{options.stream}/")])
        capability = Capability.APPEND | Capability.READ | Capability.LIST
        self._options = replace(options, client=for_selector(options.client, capability, scope))

    def _with_committer(self, work: Callable[[BulkCommitter], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with JournalClient.of(self._options.client) as client:
                return await work(BulkCommitter(client, self._options.stream))

        return run_blocking(run())

    def _publish(self, batches: Iterator[Any]) -> tuple[BulkPart, ...]:
        options, form = self._options, self._form
        with told_to_driver(), SyncJournalClient.of(options.client) as client:
            with SegmentPublisher(client, options.stream, self._prepared) as publisher:
                for batch in batches:
                    publisher.add(form.texts(batch), batch.column(form.key), checked=form.is_checked(options.framing))
                return publisher.finish()

    def _commit(self, messages: Sequence[WriterCommitMessage | None], writer: str = "", batch: int = 0) -> bool:
        parts = [part for each in published(messages) for part in each.parts]
        loss = self._options.accept_loss
        with told_to_driver():
            return self._with_committer(
                lambda committer: committer.commit(parts, writer=writer, batch=batch, accept_loss=loss)
            )

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        # With a result of each task, the driver has tried to commit, and the write may be decided already.
        if None not in messages:
            return
        parts = [part for each in published(messages) for part in each.parts]
        config = replace(self._options.client, patience=_ABORT_SECONDS)

        async def run() -> None:
            async with JournalClient.of(config) as client:
                await roll_back(client, parts)

        run_blocking(run())


class StreamBatchWriter(_ToStream, DataSourceArrowWriter):
    """Writes the rows of one DataFrame to a stream, all or none."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=False)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return PublishedPartition(self._publish(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamQueryWriter(_ToStream, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query to a stream, each once."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return PublishedPartition(self._publish(iterator), query_of_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        query = query_of(each.query for each in published(messages))
        if not self._commit(messages, query, batchId):
            _log.info("sink.batch_written_before", query=query, batch=batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._abort(messages)


def published(messages: Sequence[WriterCommitMessage | None]) -> list[PublishedPartition]:
    """Return the results of the attempts that Spark reports."""
    return [each for each in messages if isinstance(each, PublishedPartition)]
