"""The writers of `option("stream", …)`: rows go to the segments of a stream by their routing keys, all or none.

Tasks append events as pending (`stream_publishing.py`), and the driver commits their results as one bulk transaction
(`coranto.streams.writer.multi_key.bulk`): one append to the stream's journal of decisions is the commit.

A query's batch is identified by the query's id and the batch's number, a batch write by `writerId`. Each is committed
only once. For batch writes, a register of the journal of decisions has the last named write, and a ledger has the
earlier ones: a name is recorded in the ledger before the register is overwritten. Before the first named write, the
register is created, and then the ledger gets a record that it keeps the names of this stream. If the register or the
record is missing later, it was lost, or its journal was recreated: the write is rejected.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from coranto.client import JournalClient, SyncJournalClient
from coranto.client.loop import run_blocking
from coranto.errors import BatchChanged, InvalidInput, LedgerDamaged
from coranto.labels import label_selector
from coranto.publication import Decision, Ledger, Mark
from coranto.security.tokens import Capability
from coranto.streams.model.stream import Stream
from coranto.streams.writer.multi_key.bulk import BulkCommitter
from coranto.streams.writer.multi_key.bulk_parts import BulkPart, roll_back
from coranto_consumers.spark.session.access import for_tasks
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.session.versions import DataSourceStreamArrowWriter
from coranto_consumers.spark.sink.message_rows import RowDigest
from coranto_consumers.spark.sink.sink_options import RowForm, SinkOptions
from coranto_consumers.spark.sink.stream_publishing import SegmentPublisher
from coranto_consumers.spark.sink.writer import ABORT_SECONDS, SinkWriter, WrittenPartition

T = TypeVar("T")
Parts = tuple[BulkPart, ...]

_log = structlog.get_logger(__name__)


class _ToStream(SinkWriter[Parts]):
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool, *, streaming: bool) -> None:
        super().__init__(options, overwrite, streaming=streaming)
        self._form = RowForm.of(schema, options)
        stream, self._last_batches = self._with_committer(_prepared)
        self._prepared = [segment.journal for segment in stream.active()]
        self._check()
        # Tasks and the driver's commit get a token for this stream instead of keys.
        ledger = [("name", options.ledger)] if options.ledger else []
        scope = label_selector(include=[("name:prefix", f"{options.stream}/"), *ledger])
        capability = Capability.APPEND | Capability.READ | Capability.LIST
        self._options = replace(options, client=for_tasks(options.client, capability, scope))

    def _check(self) -> None:
        """Check earlier named writes, while the user's keys are available."""

    def _with_committer(self, work: Callable[[BulkCommitter], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            async with JournalClient.of(self._options.client) as client:
                return await work(BulkCommitter(client, self._options.stream))

        return run_blocking(run())

    def _publish(self, batches: Iterator[Any], digest: RowDigest | None = None) -> Parts:
        options, form = self._options, self._form
        with errors_to_driver(), SyncJournalClient.of(options.client) as client:
            publisher = SegmentPublisher(client, options.stream, self._prepared, digest)
            try:
                for batch in batches:
                    publisher.add(form.rows(batch), batch.column(form.key))
                return publisher.finish()
            except BaseException:
                publisher.roll_back()
                raise

    def _commit(self, written: Sequence[WrittenPartition[Parts]], **write: Any) -> bool:
        """Commit the results of attempts. For a named write, `write` has parameters of `BulkCommitter.commit`."""
        parts = [part for each in written for part in each.pending]
        loss = self._options.accept_loss
        with errors_to_driver():
            return self._with_committer(lambda committer: committer.commit(parts, accept_loss=loss, **write))

    def _roll_back(self, written: Sequence[WrittenPartition[Parts]]) -> None:
        config = replace(self._options.client, retry_timeout=ABORT_SECONDS)

        async def run() -> None:
            async with JournalClient.of(config) as client:
                await roll_back(client, [part for each in written for part in each.pending])

        run_blocking(run())


class StreamBatchWriter(_ToStream, DataSourceArrowWriter):
    """Writes the rows of one DataFrame to a stream, all or none."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        digest = hashlib.sha256(options.writer_id.encode()).digest()
        self._number = int.from_bytes(digest[:7], "big") or 1  # The number for the name in the register; never 0.
        self._register = f"jobs-{hashlib.sha256(options.ledger.encode()).hexdigest()[:16]}"
        self._is_known = False
        self._last = 0
        self._mark: Mark | None = None
        super().__init__(options, schema, overwrite, streaming=False)

    def _check(self) -> None:
        """Find out if a named write is already done. Raises InvalidInput and LedgerDamaged if names may be missing."""
        options = self._options
        if not options.writer_id:
            return
        with SyncJournalClient.of(options.client) as client:
            ledger = self._ledger(client)
            # The register is created before the ledger's record, so it is read after the record.
            keeps_names = ledger.find(self._name()) is not None
            last = self._with_committer(lambda committer: committer.last_batch(self._register))
            if last is None:
                if keeps_names and not options.accept_loss:
                    raise InvalidInput(
                        f"{options.ledger} has named writes to stream {options.stream}, but the stream has none: if "
                        "the stream was recreated, name another ledger. If all brokers of its decisions were lost, "
                        "acceptLoss=true continues, and the last write may appear twice if it is repeated",
                        field="option ledger",
                    )
                self._with_committer(lambda committer: committer.enlist(self._register))
            elif last and not keeps_names:
                ledger.refresh()  # Another job may just have recorded the first name.
                if ledger.find(self._name()) is None and not options.accept_loss:
                    raise LedgerDamaged(
                        f"stream {options.stream} has named writes, but {options.ledger} does not have their names: "
                        "was it recreated? With acceptLoss=true the write continues, and earlier writes may appear "
                        "twice if they are repeated"
                    )
            self._record(ledger, self._name())
            self._last = last or 0
            self._is_known = self._last == self._number or ledger.find(self._name(self._number)) is not None
            names = {self._name(number) for number in (self._number, self._last) if number}
            self._mark = ledger.mark(*(name for name in names if ledger.find(name) is None))

    def _keep(self, last: int) -> bool:
        """Record the last named write in the ledger, if there is one. Returns True if the ledger has this write."""
        options, name, mark = self._options, self._name(last), self._mark
        with SyncJournalClient.of(options.client) as client:
            if mark is None or last != self._last:  # Another job has written since this job read the ledger.
                ledger = self._ledger(client)
                is_due = bool(last)
            else:
                ledger = Ledger.resume(client, mark, like=self._prepared[0], accept_loss=options.accept_loss)
                is_due = name in mark.writer_ids
            if is_due:
                self._record(ledger, name)
            return ledger.find(self._name(self._number)) is not None

    def _ledger(self, client: SyncJournalClient) -> Ledger:
        options = self._options
        return Ledger.open(client, options.ledger, like=self._prepared[0], accept_loss=options.accept_loss)

    def _record(self, ledger: Ledger, name: str) -> None:
        if ledger.find(name) is None:
            ledger.decide(Decision(name, "", 0, time.time(), {}))

    def _name(self, number: int | None = None) -> str:
        """Return the name of a write's record. Without a number: of the record that the ledger keeps names."""
        return f"stream/{self._options.stream}/{'names' if number is None else number}"

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return WrittenPartition(self._publish(iter(()) if self._is_known else iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        written = self._written(messages)
        if not self._options.writer_id:
            self._commit(written)
            return

        async def kept(last: int) -> bool:
            return await asyncio.to_thread(self._keep, last)

        if self._is_known or not self._commit(written, writer=self._register, batch=self._number, kept=kept):
            _log.info("sink.written_before", writer_id=self._options.writer_id)


class StreamQueryWriter(_ToStream, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query to a stream, each once."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        digest = RowDigest()
        return self._of_batch(self._publish(iterator, digest), digest)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = self._written(messages)
        query = self._query(written)
        digest = str(RowDigest.of(each.digest for each in written))
        try:
            planned_after = written[0].planned_after
            is_new = self._commit(written, writer=query, batch=batchId, digest=digest, planned_after=planned_after)
        except BatchChanged as error:
            counts = ({part.journal: part.events} for each in written for part in each.pending)
            with errors_to_driver():
                self._skip_batch(error, query, batchId, counts)
            return
        if not is_new:
            _log.info("sink.batch_written_before", query=query, batch=batchId)


async def _prepared(committer: BulkCommitter) -> tuple[Stream, Mapping[str, int]]:
    return await committer.prepare(), committer.last_batches
