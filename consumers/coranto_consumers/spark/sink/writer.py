"""The writers of `write.format("journal")` and `writeStream.format("journal")`.

Tasks append messages as pending (`publishing.py`). Spark passes the results of the winning attempts to the driver, and
the driver commits the write:

1.  **Decide.** One append to the ledger records all acknowledgements. This is the commit.
2.  **Acknowledge.** The acknowledgements are appended to their journals, and readers see the messages.

If the driver dies in between, a repeated write finds the decision, appends the acknowledgements, and publishes nothing
else. Any other batch write with the same ledger also does so before its own work, as far as its permissions allow.

A batch write is identified by `writerId`, and cannot be repeated without it. A query's batch is identified by the
query's id, from its checkpoint, and the batch's number. If two queries share a checkpoint, one of them decides a batch,
and the other ends with `Fenced`. A query whose checkpoint is older than the ledger ends with `BatchChanged`: its batch
has other rows than the decided batch, or was planned when a later batch was already decided.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

import structlog
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from coranto.client import SyncJournalClient
from coranto.errors import BatchChanged, CorantoError, Fenced, InvalidInput
from coranto.publication import BatchLedger, Decision, Ledger, Mark
from coranto.publication.publish import append_intents, finish_batch, finish_decision, finish_decisions
from coranto.security.tokens import Capability
from coranto_consumers.spark.session.access import for_tasks
from coranto_consumers.spark.session.task_errors import errors_to_driver
from coranto_consumers.spark.session.versions import DataSourceStreamArrowWriter
from coranto_consumers.spark.sink.message_rows import RowDigest
from coranto_consumers.spark.sink.producer_ids import IdPool, Use, release, released_pools, run_of_task
from coranto_consumers.spark.sink.publishing import Pending, publish
from coranto_consumers.spark.sink.sink_options import RowForm, SinkOptions

ABORT_SECONDS: Final = 5.0
_QUERY: Final = "sql.streaming.queryId"
_NEW_IDS: Final = IdPool()

P = TypeVar("P")
Messages = Sequence[WriterCommitMessage | None]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WrittenPartition(WriterCommitMessage, Generic[P]):
    """The result of one attempt of a task."""

    pending: P
    query: str | None = None
    digest: RowDigest = field(default_factory=RowDigest)
    planned_after: int | None = None
    """The last decided batch of the query when this batch was planned."""
    run: str | None = None
    use: Use | None = None
    """The use of a producer id, if tasks of this run may reuse the id."""


class SinkWriter(Generic[P]):
    """The common part of all writers. Spark pickles writers, and uses them in tasks and in the driver."""

    _last_batches: Mapping[str, int]
    """The last decided batch of each query when this writer was made. Spark commits the batch with another writer."""

    def __init__(self, options: SinkOptions, overwrite: bool, *, streaming: bool) -> None:
        """Raise InvalidInput for a write that replaces content."""
        if overwrite:
            mode = "outputMode('append') or ('update')" if streaming else "mode('append')"
            raise InvalidInput(f"journals are only appended to: use {mode}", field="mode")
        self._options = options

    def _of_batch(self, pending: P, digest: RowDigest) -> WrittenPartition[P]:
        context = TaskContext.get()
        query = (context.getLocalProperty(_QUERY) if context is not None else None) or None
        return WrittenPartition(pending, query, digest, self._last_batches.get(query or ""))

    def _written(self, messages: Messages) -> list[WrittenPartition[P]]:
        return [each for each in messages if isinstance(each, WrittenPartition)]

    def _query(self, written: Iterable[WrittenPartition[P]]) -> str:
        """Return the query's id, which all tasks report. Raises InvalidInput."""
        [query] = {each.query for each in written} or {None}
        if query is None:
            raise InvalidInput("Spark did not pass the query's id; this version of Spark is not supported")
        return query

    def abort(self, messages: Messages, batchId: int = 0) -> None:
        # If all tasks have results, the driver has tried to commit, and the write may already be decided.
        if None in messages:
            self._roll_back(self._written(messages))

    @abstractmethod
    def _roll_back(self, written: Sequence[WrittenPartition[P]]) -> None:
        """Append rollbacks for attempts that no decision includes, or will include: readers drop the messages."""

    def _skip_batch(self, error: BatchChanged, query: str, batch: int, counts: Iterable[Mapping[str, int]]) -> None:
        """Log that a batch with other rows than the written batch is skipped. If losses are errors, raise the error."""
        now: Counter[str] = Counter()
        for each in counts:
            now.update(each)
        lost = ", ".join(f"{count} for {journal}" for journal, count in sorted(now.items())) or "none"
        if not self._options.fail_on_data_loss:
            _log.warning("sink.batch_differs", query=query, batch=batch, lost=dict(now), reason=str(error))
            return
        advice = "With failOnDataLoss=false it continues without these batches, and logs the messages of each"
        if error.batches == 1:
            advice = (
                "With failOnDataLoss=false it continues without this batch. That is also for a query whose rows differ "
                "each time that a batch is computed, as with rand() or uuid(): such a batch was written as a whole"
            )
        raise BatchChanged(
            f"{error} Leaving batch {batch} out loses its messages that were not written before (now: {lost}). "
            "Restore the newer checkpoint, or start the query with a new checkpoint that begins where the written "
            f"batches end. {advice}",
            batches=error.batches,
        ) from error


class _ToJournals(SinkWriter[Pending]):
    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool, *, streaming: bool) -> None:
        super().__init__(options, overwrite, streaming=streaming)
        with SyncJournalClient.of(options.client) as client:
            self._journals = tuple(each.name for each in options.target.selected.list(client, options.target.labels))
            if options.ledger in self._journals:
                raise InvalidInput(
                    f"{options.ledger} is a journal that is written: name another", field="option ledger"
                )
            self._form = RowForm.of(schema, options, len(self._journals))
            self._prepare(client)
        # Tasks and the driver's commit get a token for these journals instead of keys.
        scope = Capability.APPEND | Capability.READ | Capability.LIST
        self._options = replace(options, client=for_tasks(options.client, scope, [*self._journals, options.ledger]))

    def _prepare(self, client: SyncJournalClient) -> None:
        """Check the ledger before the write, and create it if it is missing."""
        self._last_batches = Ledger.unread(client, self._options.ledger, **self._of_ledger).last_batches

    @property
    def _of_ledger(self) -> dict[str, Any]:
        return {"like": self._journals[0], "accept_loss": self._options.accept_loss}

    def _publish(
        self, batches: Iterator[Any], pool: IdPool = _NEW_IDS, digest: RowDigest | None = None
    ) -> tuple[Pending, Use]:
        options, form = self._options, self._form
        parts = (
            (
                form.rows(batch),
                None if form.key is None else batch.column(form.key),
                None if form.journal is None else batch.column(form.journal),
            )
            for batch in batches
        )
        with errors_to_driver(), SyncJournalClient.of(options.client) as client:
            return publish(client, self._journals, options.mapping, options.framing, pool, parts, digest)

    def _decision(self, writer_id: str, written: Sequence[WrittenPartition[Pending]]) -> Decision:
        intents = _joined(each.pending.intents(self._options.framing) for each in written)
        count = sum(each.pending.messages for each in written)
        return Decision(writer_id, uuid.uuid4().hex, count, time.time(), intents)

    def _roll_back(self, written: Sequence[WrittenPartition[Pending]]) -> None:
        contents = _joined(each.pending.rollbacks(self._options.framing) for each in written)
        try:
            with SyncJournalClient.of(replace(self._options.client, retry_timeout=ABORT_SECONDS)) as client:
                for journal, content in contents.items():
                    client.append(journal, content, retry_unknown=True)
        except CorantoError as error:
            _log.warning("sink.not_rolled_back", reason=str(error))


class JournalWriter(_ToJournals, DataSourceArrowWriter):
    """Writes the rows of one DataFrame, all or none."""

    _seen: Decision | Mark
    """The earlier decision about this write, or a mark at the end of a ledger that has none."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        self._writer_id = options.writer_id or f"spark/{uuid.uuid4()}"
        super().__init__(options, schema, overwrite, streaming=False)

    def _prepare(self, client: SyncJournalClient) -> None:
        ledger = Ledger.open(client, self._options.ledger, **self._of_ledger)
        finish_decisions(client, ledger, own=self._writer_id)
        self._seen = ledger.find(self._writer_id) or ledger.mark(self._writer_id)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        pending, _ = self._publish(iter(()) if isinstance(self._seen, Decision) else iterator)
        return WrittenPartition(pending)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if isinstance(self._seen, Decision):
            _log.info("sink.written_before", writer_id=self._writer_id, messages=self._seen.messages)
            return
        written = self._written(messages)
        mine = self._decision(self._writer_id, written)
        with errors_to_driver(), SyncJournalClient.of(self._options.client) as client:
            ledger = Ledger.resume(client, self._seen, **self._of_ledger)
            counts = ledger.decide(mine)
            # Other writes' acknowledgements are left to the next write: this token may not cover their journals.
            finish_decision(client, ledger, counts)
        if counts.producer != mine.producer:
            _log.info("sink.written_before", writer_id=self._writer_id, messages=counts.messages)
            self._roll_back(written)


class JournalStreamWriter(_ToJournals, DataSourceStreamArrowWriter):
    """Writes the batches of a streaming query, each once."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=True)
        self._pools = released_pools()

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        run, digest = run_of_task(), RowDigest()
        pending, use = self._publish(iterator, self._pools.get(run or "") or IdPool(run), digest)
        return replace(self._of_batch(pending, digest), run=run, use=use)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        written = self._written(messages)
        query, options = self._query(written), self._options
        mine = self._decision(f"spark/{query}/{batchId}", written)
        with errors_to_driver(), SyncJournalClient.of(options.client) as client:
            ledger = BatchLedger.open(client, options.ledger, query, **self._of_ledger)
            known = ledger.last()
            if known is None and batchId and not options.accept_loss:
                raise InvalidInput(
                    f"{options.ledger} has no batch of this query, but its next batch is {batchId}: did it use another "
                    "ledger? With acceptLoss=true the query continues, and an interrupted batch may appear twice",
                    field="option ledger",
                )
            if known is not None and not known.is_acknowledged:
                finish_batch(client, ledger, known.batch)
            digest = str(RowDigest.of(each.digest for each in written))
            try:
                counts = ledger.decide(batchId, mine, digest, written[0].planned_after)
            except Fenced:
                self._roll_back(written)
                raise
            except BatchChanged as error:
                self._roll_back(written)
                self._skip_batch(error, query, batchId, (each.pending.counts for each in written))
                return
            if counts is not None and counts.producer == mine.producer:
                may_repeat = append_intents(client, counts)
                if ledger.acknowledge(batchId) and not may_repeat:
                    release(written[0].run, [each.use for each in written if each.use is not None])
                return
            finish_batch(client, ledger, batchId)
        messages_before = None if counts is None else counts.messages
        _log.info("sink.batch_written_before", query=query, batch=batchId, messages=messages_before)
        self._roll_back(written)


def _joined(contents: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    found: defaultdict[str, bytes] = defaultdict(bytes)
    for each in contents:
        for journal, content in each.items():
            found[journal] += content
    return dict(found)
