"""`SparkConsumer`: exactly-once consumer transactions that run on Spark's executors.

1. **Start.** Raise the fence, restore the checkpoint, and append its acknowledgements again.
2. **Plan** byte ranges of the source journals.
3. **Read and sequence.** Tasks read ranges. From their summaries, the driver decides which messages are committed.
4. **Write.** Task attempts stage rows in the store and publish messages as pending, each under its own identity.
5. **Commit** the winning attempts' rows and acknowledgements with the checkpoint, in one transaction of the store.
6. **Acknowledge.** Append the acknowledgements, only after the commit.

`Run` implements steps 1 and 2, `ConsumerTransaction` steps 4 to 6. Steps 5 and 6 overlap with reading the next input
(`prefetch.py`). If all messages are probably committed, one job runs steps 3 and 4, without prefetch
(`OptimisticWrites`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from coranto.extras import with_install_advice

try:
    from pyspark.sql import SparkSession
except ModuleNotFoundError as error:
    raise with_install_advice(error) from error

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.config import require_client
from coranto.client.retry import RetryPolicy
from coranto_consumers.journals.discovery import heads_of
from coranto_consumers.outputs.identity import IdentityCheck
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.application.outputs import SparkApplication
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.pending_report import OldestTransactions
from coranto_consumers.spark.consumer.prefetch import Prefetcher
from coranto_consumers.spark.consumer.progress import NOTHING, ConsumeReport, Hooks, OnProgress
from coranto_consumers.spark.consumer.run import Run
from coranto_consumers.spark.consumer.transaction import Owner, output_store
from coranto_consumers.spark.consumer.transaction_inputs import TransactionInputs
from coranto_consumers.spark.consumer.unread import ends_of
from coranto_consumers.spark.inputs.input_reader import FoundLong, Input
from coranto_consumers.spark.outputs.stores import OutputStore

_FENCE_SECONDS: Final = 5.0
"""The seconds between an idle service's checks of its fence in the store."""


class Throttle:
    """Limits how often a service begins to catch up: at most once in `seconds`."""

    def __init__(self, seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._due = float("-inf")

    @property
    def is_due(self) -> bool:
        return self._monotonic() >= self._due

    def restart(self) -> None:
        self._due = self._monotonic() + self._seconds


class SparkConsumer:
    """Runs an application over its source journals, with exactly-once effects.

    `store` is a SQLAlchemy URL (see `coranto_consumers.stores`), a URL like `iceberg://lake/shop.orders`, or an
    `IcebergStore`. `spark` is a session, or a function that starts one when there is something to read. `on_progress`
    is called when the content to read is known, after each transaction, and at each failure that is retried.

    Use an instance from one thread only. Instances with the same application name fence each other off, on any machine.
    After a failure of a store or broker, or a conflict of transactions, a run continues from its last commit, under the
    same fence. The checkpoint records the sources, the outputs and the store's location. If one of them changes under
    the same name, the run ends with ConsumerChanged, which has the code to confirm the change (`outputs/identity.py`).
    """

    def __init__(
        self,
        application: SparkApplication,
        client: ClientConfig,
        store: str | OutputStore[Any],
        spark: SparkSession | Callable[[], SparkSession],
        options: ConsumerOptions | None = None,
        *,
        on_progress: OnProgress | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._options = options = options or ConsumerOptions()
        require_client(client)
        if not client.name:
            client = replace(client, name=f"spark-consumer/{quote(application.name)[:100]}")
        self._config = client
        self._hooks = hooks = hooks or Hooks()
        self._on_progress = on_progress or (lambda report: None)
        target = output_store(store, hooks.commit)
        identity = IdentityCheck(application.name, options.accept_changes)
        name = application.name
        self._owner = Owner(name, name, application.outputs, target, options.misfits, identity, hooks)
        inputs = TransactionInputs(application, client, spark, options, name, target.writes_optimistically)
        lasting = OldestTransactions(options.max_transaction_bytes)
        self._run = partial(Run, application, options, inputs, self._owner, lasting, self._progress, self._report)
        self._seen = NOTHING

    def run_until_caught_up(self, max_transactions: int | None = None) -> ConsumeReport:
        """Process the current content of the journals, in at most `max_transactions` transactions.

        Messages written during the run, and open transactions of producers, are left to the next run. Raises

        * Fenced when another instance has started (stop then; nothing was committed),
        * ConsumerChanged when the checkpoint records other sources or outputs, or another store,
        * CorruptMessage for a message that is not JSON or does not fit the application's schema, unless `misfits`
          allows it,
        * InvalidInput for outputs that do not fit a table or journal, and for a source that is a fork of a former
          source in the checkpoint,
        * RejectedRow for a message whose rows the store rejects, unless `misfits` allows it,
        * SqlStoreError or CommitOutcomeUnknown for a store that fails permanently, or for longer than `retry_timeout`,
        * OffsetJump for content that is gone, StreamTruncated for a truncated segment of a stream, and CorruptData when
          a journal is not the one that was processed before, unless `fail_on_data_loss` is False,
        * errors of the client for brokers that are unreachable for longer than `retry_timeout`.

        After any of these errors, the next run continues from the last commit.
        """

        outages = self._begin_run(RetryPolicy(self._options.retry_timeout))

        def catch_up() -> ConsumeReport:
            with self._running(outages) as run:
                run.begin()
                run.catch_up(run.present(), most=max_transactions)
                heads = heads_of(run.present())
                known = {journal: heads[journal] for journal in run.report.heads if journal in heads}
                return replace(run.report, heads=known)

        report = outages.run(catch_up, self._progress)
        assert report is not None  # There is no `stop`.
        return report

    def run_until_stopped(
        self,
        stop: Callable[[], bool],
        *,
        wait: Callable[[], object] = lambda: time.sleep(1.0),
        retry_timeout: float = math.inf,
    ) -> ConsumeReport:
        """Process content as it is written, under one fence, until `stop` returns True.

        Calls `stop` before each transaction, and `wait` when there is nothing to read. Also reads journals that start
        to match the application's selector during the run. Retries unavailable stores and brokers for `retry_timeout`
        seconds from the first failure after the last progress, by default without a limit. Raises other errors as
        `run_until_caught_up` does.
        """
        throttle, fence_checks = Throttle(self._options.min_transaction_seconds), Throttle(_FENCE_SECONDS)
        outages = self._begin_run(RetryPolicy(retry_timeout))

        def serve() -> ConsumeReport:
            with self._running(outages) as run:
                run.begin()
                caught_up: Mapping[str, object] | None = None
                while not stop():
                    if not throttle.is_due:
                        wait()
                        continue
                    # The prefetch may have listed the journals already, while the last transaction committed.
                    present = run.prefetched()
                    if present is None or ends_of(present) == caught_up:
                        present = run.present()
                    if ends_of(present) == caught_up:
                        if outages.progressed():
                            self._report(run.report)
                        if fence_checks.is_due:  # Otherwise only a commit would detect a later owner.
                            fence_checks.restart()
                            self._owner.store.require_fence(self._owner.shard, self._owner.fence)
                        wait()
                        continue
                    throttle.restart()
                    run.catch_up(present, stop)
                    caught_up = ends_of(present)
                return run.report

        return outages.run(serve, self._progress, stop) or self._progress()

    def _begin_run(self, policy: RetryPolicy) -> Outages:
        self._owner.commits.clear()
        self._seen = NOTHING
        return Outages(self._owner.name, policy, self._hooks, self._on_progress)

    @contextmanager
    def _running(self, outages: Outages) -> Iterator[Run]:
        with SyncJournalClient.of(self._config) as client, Prefetcher[Input | FoundLong]() as ahead:
            yield self._run(outages, client, ahead)

    def _progress(self) -> ConsumeReport:
        """Return the progress of the run as of its last commit, with the latest heads that were reported."""
        report = self._owner.progress
        return report if report.heads else replace(report, offsets=self._seen.offsets, heads=self._seen.heads)

    def _report(self, report: ConsumeReport) -> None:
        self._seen = report
        self._on_progress(report)
