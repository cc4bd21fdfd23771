"""`SparkConsumer`: exactly-once consumer transactions that run on Spark's executors.

The driver runs each transaction, and executors do the work (`docs/architecture.md`):

1. **Start.** Raise the fence in the store and restore the checkpoint. From now on no earlier instance can commit.
   Append the checkpoint's acknowledgements again: the earlier instance may have died between its commit and them.
2. **Plan** byte ranges of the source journals, bounded per transaction, from the checkpoint's offsets.
3. **Read and sequence.** Tasks read ranges and number their messages by segment. From the ranges' summaries, the driver
   decides which messages are committed, and computes the next checkpoint's producer states.
4. **Write.** Task attempts stage rows in the store and publish messages as pending, each under its own identity.
5. **Commit** in one transaction of the store: check the fence, merge the rows of winning attempts, and write the
   checkpoint with the acknowledgements of winning attempts.
6. **Acknowledge.** Append the acknowledgements, only after the commit.

Steps 5 and 6 overlap with reading the next transaction's input (`prefetch.py`). Where it is likely to succeed, one job
runs steps 3 and 4 (`optimistic_writes.py`), without prefetch.

After any failure, the next instance continues from the last commit: it deletes staged rows and reads again. Pending
messages of the failed transaction are never acknowledged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from coranto.extras import explained

try:
    from pyspark.sql import SparkSession
except ModuleNotFoundError as error:
    raise explained(error) from error

from coranto.client import ClientConfig, SyncJournalClient
from coranto.client.config import require_client
from coranto.client.retry import RetryPolicy
from coranto.client.routes import KnownRoute
from coranto.errors import JournalRecreated, OffsetJump
from coranto.messages.checkpoints import Checkpoint, Identity, Source, identified
from coranto.messages.pruning import Pruning
from coranto_consumers.outputs.identity import IdentityCheck, sources_of
from coranto_consumers.spark.application.application import DeclaresSql, Outputs, SparkApplication, checked_outputs
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.committed.long_transactions import LongTransaction
from coranto_consumers.spark.consumer.acknowledging import acknowledge
from coranto_consumers.spark.consumer.comparing import compare_tables
from coranto_consumers.spark.consumer.input_settings import InputSettings
from coranto_consumers.spark.consumer.optimistic_writes import NotOptimistic, OptimisticWrites
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.pending_report import OldestTransactions, log_long_transactions
from coranto_consumers.spark.consumer.prefetch import NextInput, PlannedInput, Prefetcher
from coranto_consumers.spark.consumer.progress import NOTHING, ConsumeReport, Hooks, Step
from coranto_consumers.spark.consumer.store_of_url import output_store
from coranto_consumers.spark.consumer.transaction import OutputTransactions, offsets_of
from coranto_consumers.spark.consumer.transaction_bounds import MessageBound, Pace, TooManyMessages
from coranto_consumers.spark.consumer.unread import UnreadContent, ends_of
from coranto_consumers.spark.inputs.frames import ExpectedRows
from coranto_consumers.spark.inputs.inputs import Input, InputReader, MetLongTransactions
from coranto_consumers.spark.journals.discovery import (
    ContentExtent,
    begins_of,
    contents,
    cuts_of,
    heads_of,
    require_unread,
    routes_of,
)
from coranto_consumers.spark.journals.losses import (
    Holes,
    LostContent,
    lost_before,
    lost_of,
    of_another,
    skip_lost,
    warn_of,
)
from coranto_consumers.spark.journals.ranges import WORTHWHILE_BYTES, Range
from coranto_consumers.spark.journals.segments import gone_segments, not_read
from coranto_consumers.spark.outputs.output_stores import OutputStore
from coranto_consumers.spark.session.task_errors import errors_of_tasks

_FENCE_SECONDS: Final = 5.0
"""The time after which a service that has nothing to read asks its store if it is fenced off."""


class SparkConsumer:
    """Runs an application over its source journals, with exactly-once effects.

    `store` is a SQLAlchemy URL (see `coranto_consumers.stores`), a URL like `iceberg://lake/shop.orders`, or an
    `IcebergStore`. `spark` is a session, or a function that starts one when there is something to read. `on_progress`
    is called once the plan is known, and after each transaction.

    Use an instance from one thread only. Instances with the same application name fence each other off, on any machine.

    If a store, broker or fragment store is unavailable, or a transaction conflicts with another one, the consumer
    continues from its last commit, under the same fence.

    The checkpoint records the sources, the outputs and the store's location. If any of them changes under the same
    name, the run ends with ConsumerChanged, which names the code that confirms the change
    (`outputs/identity.py`).
    """

    def __init__(
        self,
        application: SparkApplication,
        client: ClientConfig,
        store: str | OutputStore[Any],
        spark: SparkSession | Callable[[], SparkSession],
        options: ConsumerOptions | None = None,
        *,
        on_progress: Callable[[ConsumeReport], None] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._options = options = options or ConsumerOptions()
        require_client(client)
        if not client.name:
            client = replace(client, name=f"spark-consumer/{quote(application.name)[:100]}")
        self._input = InputSettings(application, client, spark, options, application.name)
        self._application = application
        self._config = client
        self._hooks = hooks or Hooks()
        self._store = output_store(store, self._hooks.commit)
        self._bound = MessageBound(options.max_transaction_bytes, options.max_transaction_messages)
        self._on_progress = on_progress or (lambda report: None)
        self._reader: InputReader | None = None
        self._routes: Mapping[str, KnownRoute] = {}
        self._writing = OptimisticWrites(self._store.writes_optimistically)
        self._identity = IdentityCheck(application.name, options.accept_changes)
        lasting = OldestTransactions(options.max_transaction_bytes)
        self._transactions = OutputTransactions(
            application, self._store, self._hooks, options.misfits, lasting, self._identity
        )
        self._outages = Outages(application.name, RetryPolicy(), self._hooks, self._on_progress)
        self._seen = NOTHING
        """The last progress that `on_progress` got."""

    def run_until_caught_up(self, max_transactions: int | None = None) -> ConsumeReport:
        """Process the present content of the journals, in at most `max_transactions` transactions.

        Messages written during the run, and open transactions of producers, are left to the next run. Raises

        * Fenced when another instance has started (stop then; nothing was committed),
        * ConsumerChanged when the checkpoint records other sources or outputs, or another store,
        * CorruptMessage for a message that is not JSON or does not fit the application's schema, unless `misfits`
          allows it,
        * InvalidInput for outputs that do not fit a table or journal, and for a source that is a fork of a journal in
          the checkpoint which is not a source any more,
        * RejectedRow for a message whose rows the store rejects, unless `misfits` allows it,
        * SqlStoreError or CommitOutcomeUnknown for a store that fails permanently, or for longer than `retry_timeout`,
        * OffsetJump for content that is gone, StreamTruncated for a segment of a stream, and CorruptData when a journal
          is not the one that was processed before, unless `fail_on_data_loss` is False,
        * errors of the client for brokers that are unreachable for longer than `retry_timeout`.

        After any of them, the next run continues from the last commit.
        """

        def catch_up() -> ConsumeReport:
            with SyncJournalClient.of(self._config) as client, Prefetcher[Input]() as ahead:
                report, sources = self._begin(client)
                report, _ = self._catch_up(client, ahead, report, sources, self._present(client), most=max_transactions)
                heads = heads_of(self._present(client))
                return replace(report, heads={journal: heads[journal] for journal in report.heads if journal in heads})

        report = self._run(RetryPolicy(self._options.retry_timeout)).run(catch_up, self._progress)
        assert report is not None  # Nothing stops it.
        return report

    def run_until_stopped(
        self,
        stop: Callable[[], bool],
        *,
        wait: Callable[[], object] = lambda: time.sleep(1.0),
        retry_timeout: float = math.inf,
    ) -> ConsumeReport:
        """Process content as it is written, under one fence, until `stop` returns True.

        Calls `stop` before each transaction, and `wait` when there is nothing to read. Also reads journals that match
        the application's selector only later. Retries unavailable stores and brokers for `retry_timeout` seconds since
        the first failure after the last progress, by default without a limit. Raises other errors as
        `run_until_caught_up` does.
        """
        pace, fence_checks = Pace(self._options.min_transaction_seconds), Pace(_FENCE_SECONDS)
        outages = self._run(RetryPolicy(retry_timeout))

        def serve() -> ConsumeReport:
            with SyncJournalClient.of(self._config) as client, Prefetcher[Input]() as ahead:
                report, sources = self._begin(client)
                caught_up: Mapping[str, object] | None = None
                while not stop():
                    if not pace.is_due:
                        wait()
                        continue
                    # The prefetch may have listed the journals already, while the last transaction committed.
                    present = ahead.extents()
                    if present is None or ends_of(present) == caught_up:
                        present = self._present(client)
                    if ends_of(present) == caught_up:
                        self._progressed(report)
                        if fence_checks.is_due:  # Otherwise only a commit would find out.
                            fence_checks.took()
                            self._store.require_fence(self._application.name, report.fence)
                        wait()
                        continue
                    pace.took()
                    report, sources = self._catch_up(client, ahead, report, sources, present, stop)
                    caught_up = ends_of(present)
                return report

        return outages.run(serve, self._progress, stop) or self._progress()

    def _run(self, policy: RetryPolicy) -> Outages:
        """Begin a run that retries by `policy`."""
        self._transactions.commits.forget()
        self._seen = NOTHING
        self._outages = Outages(self._application.name, policy, self._hooks, self._on_progress)
        return self._outages

    def _progress(self) -> ConsumeReport:
        """Return the progress of the run as of its last commit, with the latest heads that were reported."""
        report = self._transactions.commits.report or NOTHING
        return report if report.heads else replace(report, offsets=self._seen.offsets, heads=self._seen.heads)

    def _report(self, report: ConsumeReport) -> None:
        self._seen = report
        self._on_progress(report)

    def _progressed(self, report: ConsumeReport) -> None:
        """Note that the run makes progress, and show it if that ends an outage."""
        if self._outages.progressed():
            self._report(report)

    def _present(self, client: SyncJournalClient) -> dict[str, ContentExtent]:
        listed = self._input.journals(client, self._application.sources, field="application sources")
        present = contents(client, listed)
        self._routes = routes_of(present)
        return present

    def _begin(self, client: SyncJournalClient) -> tuple[ConsumeReport, Mapping[str, Source]]:
        """Run step 1 (see the module), after the database has accepted the application's own SQL."""
        name, commits = self._application.name, self._transactions.commits
        if (before := commits.report) is None:
            if isinstance(self._application, DeclaresSql):
                for each in self._application.sql:
                    self._store.prepare(each)
            self._compare(client, self._store.recorded(name))
            self._compare_tables(client)
            fence, checkpoint = self._store.raise_fence(name)
            commits.begin(checkpoint, replace(NOTHING, fence=fence))
            commits.committed()
            self._compare(client, checkpoint)
        else:  # An earlier attempt raised the fence. `resume` fails if another instance has raised it since.
            fence, checkpoint = before.fence, self._store.resume(name, before.fence)
            commits.restored(checkpoint, self._store.name)
            if not self._identity.is_compared:
                self._compare(client, checkpoint)
        self._transactions.ids.begin(fence)
        self._hooks.reached(Step.FENCED)
        replayed = acknowledge(client, checkpoint.ack_intents).journals
        self._store.sweep(name, fence if before is None else fence + 1)  # Includes rows of earlier attempts.
        self._hooks.reached(Step.RECOVERED)
        report = self._progress()
        replayed += report.replayed_intents
        return replace(report, replayed_intents=replayed, retries=self._outages.retries), checkpoint.sources

    def _compare_tables(self, client: SyncJournalClient) -> None:
        """Raise InvalidInput for outputs that their tables cannot take, before an earlier instance is fenced off.

        Calls the application with a frame without rows. Starts no session for that if there is nothing to read.
        """
        present = self._present(client)
        if not self._input.has_session and self._reader is None and not self._has_unread(present):
            return
        nothing = self._input_reader().nothing()
        compare_tables(self._application.name, self._application.outputs, self._store, nothing, self._options.misfits)

    def _has_unread(self, present: Mapping[str, ContentExtent]) -> bool:
        restored = self._store.read(self._application.name)
        sources = {} if restored is None else restored.checkpoint.sources
        return any(
            extent.head > max(extent.begin, sources[journal].read_through if journal in sources else 0)
            for journal, extent in present.items()
        )

    def _compare(self, client: SyncJournalClient, checkpoint: Checkpoint) -> None:
        """Compare this consumer with the record in its checkpoint. Raises ConsumerChanged."""
        sources = self._application.sources

        def unread() -> set[str]:
            found = self._input.journals(client, sources, field="application sources")
            return checkpoint.sources.keys() - {each.name for each in found}

        now = Identity(sources_of(sources), store=self._store.location)
        self._identity.restored(checkpoint, now, unread)

    def _catch_up(
        self,
        client: SyncJournalClient,
        ahead: Prefetcher[Input],
        report: ConsumeReport,
        sources: Mapping[str, Source],
        present: Mapping[str, ContentExtent],
        stop: Callable[[], bool] | None = None,
        most: int | None = None,
    ) -> tuple[ConsumeReport, Mapping[str, Source]]:
        """Process the content in `present`, until all is read, `most` transactions are done, or `stop` returns True."""
        require_unread(client, present, sources)
        unread, begins, recorded = UnreadContent(present), begins_of(present), sources.keys()
        report, sources = self._drop_segments(report, sources, present)
        for journal, extent in present.items():
            source = sources.get(journal, Source(extent.begin))
            lost = of_another(source, journal, extent.head, extent.journal_id)
            if lost := lost or lost_before(
                journal, source.read_through, extent.begin, extent.head, is_end=extent.is_end
            ):
                report, sources = self._skip_lost(report, sources, lost, extent.begin)
        ids = {journal: extent.journal_id for journal, extent in present.items()}
        has_new_ids = any(not sources[journal].journal_id for journal in sources.keys() & ids.keys() if ids[journal])
        sources = identified(sources, ids)
        sources = unread.known(sources)
        report = replace(report, offsets=offsets_of(begins, sources), heads=unread.heads)
        self._report(report)
        while (most is None or report.transactions < most) and not (stop is not None and stop()):
            for lost in unread.holes.due(sources):
                report, sources = self._skip_lost(report, sources, lost)
            if (due := unread.long.due(sources, self._options.max_transaction_bytes)) is not None:
                try:
                    with errors_of_tasks():
                        report, sources = self._replay(client, due, sources, unread.heads, report)
                except OffsetJump as error:
                    self._record_loss(unread.holes, error)
                else:
                    self._outages.progressed()
                    self._report(report)
                continue
            sources = unread.known(sources)
            if not (ranges := unread.plan(sources, self._bound.max_bytes)):
                # Record ids for positions without one (as after `accept-journals`): losses are found by comparing ids.
                if unread.has_successors(sources.keys() - recorded) or has_new_ids:
                    self._transactions.record(sources, report)
                break
            self._hooks.reached(Step.PLANNED)
            is_last = most is not None and report.transactions + 1 >= most
            written = (
                _nothing
                if is_last
                else partial(self._prefetch, client, ahead, unread, ranges, begins, stop is not None)
            )
            taken = ahead.take(PlannedInput.of(ranges, sources))
            reading = taken or self._reading(client, ranges, sources, begins)
            optimistic = None
            if taken is None and self._writing.is_worthwhile(ranges, sources):
                optimistic = partial(self._write_optimistically, client, ranges, sources, begins)
            else:
                self._writing.took_two_jobs(wasted=False)
            try:
                with errors_of_tasks():
                    report, sources = self._transactions.process(client, reading, report, written, optimistic)
            except OffsetJump as error:
                self._record_loss(unread.holes, error)
                continue
            except JournalRecreated as error:
                if self._options.fail_on_data_loss:
                    raise lost_of(error).error(self._advice(error.journal)) from error
                # List the journals again: their present state decides how to continue.
                return self._catch_up(client, ahead, report, sources, self._present(client), stop, most)
            except MetLongTransactions as met:
                unread.long.meet(met.found)
                log_long_transactions(met.found, sources, self._options.max_transaction_bytes)
                continue
            except TooManyMessages:
                self._bound.settle()
                continue
            unread.processed(ranges, sources)
            recorded, has_new_ids = sources.keys(), False
            self._outages.progressed()
            self._report(report)
        return report, sources

    def _prefetch(
        self,
        client: SyncJournalClient,
        ahead: Prefetcher[Input],
        unread: UnreadContent,
        ranges: Sequence[Range],
        begins: Mapping[str, int],
        is_endless: bool,
        after: Mapping[str, Source],
    ) -> None:
        """Prefetch the input after `ranges`. `after` has the states of sources that their transaction will commit."""
        self._bound.settle()
        after = unread.known(after)
        if following := unread.plan_next(ranges, after, self._bound.max_bytes):
            if self._writing.is_worthwhile(following, after):
                return
            reading = self._reading(client, following, after, begins)
            ahead.begin(lambda: NextInput(PlannedInput.of(following, after), reading))
        elif is_endless and unread.is_clear and not self._options.min_transaction_seconds:
            ahead.begin(partial(self._prefetch_later, client, unread.present, after))

    def _prefetch_later(
        self, client: SyncJournalClient, before: Mapping[str, ContentExtent], sources: Mapping[str, Source]
    ) -> NextInput[Input] | None:
        """List the journals again, and return the input after `before`, if something was written since."""
        present = self._present(client)
        if ends_of(present) == ends_of(before):
            return None
        unread = UnreadContent(present)
        known = unread.known(sources)
        ranges = unread.plan(known, self._bound.max_bytes)
        if not ranges or self._writing.is_worthwhile(ranges, known):
            return None
        reading = self._reading(client, ranges, known, begins_of(present))
        return NextInput(PlannedInput.of(ranges, known), reading, present)

    def _record_loss(self, holes: Holes, error: OffsetJump) -> None:
        """Record lost content, to skip it when it is due. Raises the error unless losses are accepted."""
        if self._options.fail_on_data_loss:
            raise error
        holes.meet(LostContent(error.journal, error.expected, error.actual))

    def _skip_lost(
        self, report: ConsumeReport, sources: Mapping[str, Source], lost: LostContent, begin: int = 0
    ) -> tuple[ConsumeReport, Mapping[str, Source]]:
        """Continue after lost content. Raises its error unless losses are accepted."""
        if self._options.fail_on_data_loss:
            raise lost.error(self._advice(lost.journal))
        return replace(report, lost=(*report.lost, lost)), skip_lost(sources, lost, begin)

    def _advice(self, journal: str) -> str:
        name = self._application.name
        return (
            "Start a consumer of another name, or continue without the lost content (fail_on_data_loss=False). If the "
            "present journal has the content of the earlier one, such as recovered content, run `coranto consumer "
            f"accept-journals {name} {journal} --store URL` with the URL of this consumer's store, and start again."
        )

    def _drop_segments(
        self, report: ConsumeReport, sources: Mapping[str, Source], present: Mapping[str, ContentExtent]
    ) -> tuple[ConsumeReport, dict[str, Source]]:
        """Drop the state of truncated segments. Raises StreamTruncated if one was not fully read."""
        gone = gone_segments(present, sources)
        for journal in sorted(gone.unread):
            lost = LostContent(journal, sources[journal].read_through, 0, made_again=True)
            if self._options.fail_on_data_loss:
                raise not_read(journal, lost.begin)
            warn_of(lost)
            report = replace(report, lost=(*report.lost, lost))
        left = sources.keys() - gone.read - gone.unread
        return report, {journal: source for journal, source in sources.items() if journal in left}

    def _input_reader(self) -> InputReader:
        if self._reader is None:
            self._reader = self._input.reader()
        self._reader.routes = self._routes
        return self._reader

    @contextmanager
    def _reading(
        self,
        client: SyncJournalClient,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        begins: Mapping[str, int],
    ) -> Iterator[Input]:
        """Run step 3 (see the module) for planned ranges."""
        pruning = Pruning(time.time(), first_offsets=begins)
        reader, cuts = self._input_reader(), _cuts(client, ranges)
        reader.packs = self._store.packs
        with reader.read(ranges, sources, cuts, pruning, self._options.max_transaction_bytes) as read:
            self._bound.see(ranges, read.rows)
            yield read

    def _write_optimistically(
        self,
        client: SyncJournalClient,
        ranges: Sequence[Range],
        sources: Mapping[str, Source],
        begins: Mapping[str, int],
        write: Callable[[Outputs, ExpectedRows], list[Any]],
    ) -> tuple[Input, list[Any]] | None:
        """Run steps 3 and 4 (see the module) in one job. Return None if that is impossible (`optimistic_writes.py`)."""

        def made(expected: ExpectedRows) -> list[Any]:
            outputs = checked_outputs(self._application.outputs(expected.committed))
            self._writing.require_one_table(outputs)
            return write(outputs, expected)

        pruning = Pruning(time.time(), first_offsets=begins)
        try:
            done = self._input_reader().read_and_write(ranges, sources, _cuts(client, ranges), pruning, made)
        except NotOptimistic:
            return None
        if done is None:
            self._writing.took_two_jobs(wasted=True)
        else:
            self._writing.took_one_job()
            self._bound.see(ranges, done[0].rows)
        return done

    def _replay(
        self,
        client: SyncJournalClient,
        long: LongTransaction,
        sources: Mapping[str, Source],
        heads: Mapping[str, int],
        report: ConsumeReport,
    ) -> tuple[ConsumeReport, dict[str, Source]]:
        """Run steps 2 to 6 for one part of a long transaction."""
        self._hooks.reached(Step.PLANNED)
        reader, head = self._input_reader(), heads[long.journal]
        reading = reader.read_part(long, sources, head, self._options.max_transaction_bytes)
        return self._transactions.process(client, reading, report, _nothing)


def _cuts(client: SyncJournalClient, ranges: Sequence[Range]) -> dict[str, list[int]]:
    # Small ranges are not split, so the begins of their fragments are not needed.
    return cuts_of(client, [each.journal for each in ranges if each.length > WORTHWHILE_BYTES])


def _nothing(after: Mapping[str, Source]) -> None:
    """Read nothing ahead."""
