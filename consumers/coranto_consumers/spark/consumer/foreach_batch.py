"""`exactly_once`: makes a function for `foreachBatch` with exactly-once effects on a store and on journals.

::

    def delays(batch: DataFrame) -> Outputs:
        rows = batch.groupBy("carrier").agg(F.count("*").alias("flights"))
        return Outputs(tables=[TableOutput(DELAYS, rows, keys=["carrier"], merge={"flights": Add()})])

    write = exactly_once("postgresql://…", delays, name="delays")
    query = frame.writeStream.foreachBatch(write).option("checkpointLocation", "/srv/checkpoints/delays").start()

If a query ends before Spark has recorded its last batch, Spark repeats the batch. So each batch commits in one
transaction of the store with its number and content (`batch_content.py`), under a fence: a repeated batch is skipped,
and a query whose successor has started cannot commit. The store identifies a query by the id in its checkpoint. A query
with another checkpoint counts batches from 0, so it is rejected under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog
from pyspark.sql import DataFrame

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.config import require_client
from coranto.client.retry import RetryPolicy
from coranto.errors import BatchChanged, CorruptData, InvalidInput, Outcome, Unavailable
from coranto.messages.checkpoints import Identity, Source
from coranto_consumers.outputs.dead_letters import DeadLetters
from coranto_consumers.outputs.identity import IdentityCheck
from coranto_consumers.spark.application.consumer_options import BATCH_OPTIONS, ConsumerOptions
from coranto_consumers.spark.application.outputs import Outputs
from coranto_consumers.spark.consumer.batch_content import (
    BatchContent,
    BatchDifference,
    RunningQuery,
    difference,
    older_checkpoint,
)
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.progress import ConsumeReport, Hooks, OnProgress
from coranto_consumers.spark.consumer.transaction import ConsumerTransaction, Owner, output_store
from coranto_consumers.spark.inputs.input_reader import Input
from coranto_consumers.spark.outputs.stores import OutputStore
from coranto_consumers.spark.session.task_errors import errors_of_tasks, errors_to_driver

_PREFIX = "spark-query/"

_log = structlog.get_logger(__name__)


def exactly_once(
    store: str | OutputStore[Any],
    outputs: Callable[[DataFrame], Outputs],
    *,
    name: str,
    client: ClientConfig | None = None,
    options: ConsumerOptions | None = None,
    first_batch: int = 0,
    on_progress: OnProgress | None = None,
    hooks: Hooks | None = None,
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that commits the outputs of each batch exactly once.

    `store` is a SQLAlchemy URL, a URL like `iceberg://lake/shop.orders`, or an `IcebergStore`. `outputs` makes the
    outputs of a batch's rows. It may be called several times for a batch, and must have no side effects (like
    `SparkApplication.outputs`). Before the fence is raised, it is called with an empty batch, to compare the outputs
    with their tables. `name` is the query's identity in the store: a starting query fences off a running one with the
    same name. `client` is needed to publish to journals. `first_batch` is the number of the first batch that the query
    commits in this store; it is above 0 if the query ran without this store before.

    While a store, a broker or a fragment store is unavailable, or after a conflict of transactions, the batch is
    retried under the same fence. Queries that end by themselves (trigger `availableNow` or `once`) retry for
    `retry_timeout` seconds since the first failure, other queries until `query.stop()`. `on_progress` is called after
    each batch, and at each failure that is retried. Its report counts batches since the fence was raised (as
    transactions), and has neither rows nor offsets.

    The options in `BATCH_OPTIONS` apply. `misfits` is the policy for rows that the store rejects: they end the query
    with RejectedRow, or their nullable columns become null (`MisfitPolicy.NULLS`; `outputs` is called again), or they
    become `DeadLetters` in the same transaction, as lines of JSON. Errors, the log and dead letters identify a message
    by journal and offset if the batch has these columns of `format("journal")`, otherwise by the batch and the row's
    number in it, from 0.

    The function raises Fenced when another query has taken the name, InvalidInput for outputs that do not fit and for a
    query with another checkpoint, BatchChanged for a batch whose number is committed with other content,
    ConsumerChanged when the checkpoint records other outputs or another store (`accept_changes` takes the code in the
    error), Unavailable when the query is stopped while it waits, and errors of the store and brokers that are permanent
    or outlast the retries. The query then ends, and may be started again. With `fail_on_data_loss=False`, a batch that
    differs is skipped, and the loss is logged (`batch.content_lost`).
    """
    options = options or ConsumerOptions()
    options.require_only(BATCH_OPTIONS, "`exactly_once`: the query's source reads the content of batches")
    if client is not None:
        require_client(client)
    elif isinstance(options.misfits, DeadLetters) and options.misfits.journals:
        raise InvalidInput("dead letters in journals need a client; give exactly_once one", field="client")
    hooks = hooks or Hooks()
    identity = IdentityCheck(name, options.accept_changes)
    target = output_store(store, hooks.commit)
    owner = Owner(name, name, outputs, target, options.misfits, identity, hooks)
    return _Batches(owner, client, options, first_batch, on_progress or (lambda report: None))


@dataclass(slots=True, eq=False)
class _Batches:
    _owner: Owner
    _client: ClientConfig | None
    _options: ConsumerOptions
    _first_batch: int
    _on_progress: OnProgress
    _query: str | None = None
    """The id of the query that holds the fence. None before the first batch, and after an error that ended a query."""
    _is_restored: bool = False
    """True while the fields below agree with the store. False after a batch has failed."""
    _next: int = 0
    _last: BatchContent | None = None
    _outages: Outages = field(init=False)

    def __call__(self, batch: DataFrame, number: int) -> None:
        name, store = self._owner.name, self._owner.store.name
        with errors_to_driver(), errors_of_tasks():
            query = RunningQuery.of(batch)
            if self._query != query.id:
                self._owner.commits.clear()
                policy = RetryPolicy(self._options.retry_timeout if query.ends_by_itself else math.inf)
                self._outages = Outages(name, policy, self._owner.hooks, self._on_progress)
                self._is_restored = False
            self._query = None
            attempt = partial(self._process, batch, query, number)
            if self._outages.run(attempt, lambda: self._owner.progress, query.is_stopped) is None:
                stopped = Unavailable(
                    f"the query was stopped while batch {number} of {name} waited for {store} or for "
                    "brokers. Spark repeats the batch when the query is started again"
                )
                stopped.outcome = Outcome.UNKNOWN  # A commit whose response was lost may have been applied.
                raise stopped
            self._query = query.id

    def _process(self, batch: DataFrame, query: RunningQuery, number: int) -> ConsumeReport:
        is_restored, self._is_restored = self._is_restored, False
        if not is_restored:
            self._begin(query.id, number, batch)
        content = query.content_of_batch(number)
        if number < self._next:
            self._skip_committed(number, content)
        elif number > self._next:
            raise CorruptData(
                f"the query runs batch {number} of {self._owner.name}, but {self._next} was not committed: the store "
                "is older than the query's checkpoint, as after a restoration. Begin a new query, with another name"
            )
        else:
            sources, name = {_PREFIX + query.id: Source(number + 1)}, f"batch {number} of {self._owner.name}"
            read = Input(batch, 0, 0, sources, batch=name, record=content.to_text())
            ConsumerTransaction(self._owner, self._owner.progress, self._connected).run(read)
            self._next, self._last = number + 1, content
        self._is_restored = True
        self._outages.progressed()
        report = replace(self._owner.progress, retries=self._outages.retries)
        self._on_progress(report)
        return report

    def _skip_committed(self, number: int, content: BatchContent) -> None:
        """Skip a batch whose number is committed. If losses are errors, raises BatchChanged for other content."""
        name, store = self._owner.name, self._owner.store.name
        batches = self._next - number
        last = self._last
        if batches == 1 and last is None:  # Committed by an older version, which did not record content.
            _log.warning("batch.committed_before", name=name, batch=number, content="unknown")
            return
        if batches == 1 and last is not None and content.is_same(last):
            _log.info("batch.committed_before", name=name, batch=number)
            return
        found = BatchDifference() if last is None else difference(content, last, batches)
        if self._options.fail_on_data_loss:
            text = older_checkpoint(number, batches, f"{name} is committed in {store}", found, last)
            raise BatchChanged(text, batches=batches)
        if found or batches == 1:
            lost, twice = list(found.lost), list(found.twice)
            _log.warning("batch.content_lost", name=name, batch=number, lost=lost, twice=twice)
        else:
            _log.warning("batch.committed_before", name=name, batch=number, content="unknown")

    def _begin(self, query: str, number: int, batch: DataFrame) -> None:
        """Raise the fence, or resume under it. Compares outputs first: an error must not fence off another query."""
        name, store = self._owner.name, self._owner.store.name
        key = _PREFIX + query
        owner, is_first = self._owner, not self._owner.has_fence
        if is_first:
            owner.compare(batch.limit(0))
        checkpoint = owner.raise_fence()
        if is_first:
            owner.identity.restored(checkpoint, Identity(store=owner.store.location), tuple)
        if others := sorted(checkpoint.sources.keys() - {key}):
            raise InvalidInput(
                f"the name {name} belongs to {others[0]} in {store}, and this query is {key}, with "
                "another checkpoint. Start the query with its own checkpoint, or choose another name",
                field="name",
            )
        known = checkpoint.sources.get(key)
        if known is None and number != self._first_batch:
            raise InvalidInput(
                f"{store} has no batch of {name}, but its next batch is {number}. Did the query use another store "
                f"before? With first_batch={number} the query begins in this one",
                field="first_batch",
            )
        self._next = number if known is None else known.read_through
        self._last = BatchContent.from_text(checkpoint.batch) if checkpoint.batch else None
        owner.recover(checkpoint, self._connected)

    def _connected(self) -> SyncJournalClient:
        if self._client is None:
            raise InvalidInput("publishing to journals needs a connection; give exactly_once a client", field="client")
        return SyncJournalClient.of(self._client)
