"""One attempt of a consumer's run, which processes journals in transactions, from the committed checkpoint on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, JournalRecreated, OffsetJump, RejectedRow
from coranto.messages.checkpoints import Checkpoint, Identity, Source, identified
from coranto_consumers.journals.discovery import (
    ContentExtent,
    Extents,
    begins_of,
    gone_segments,
    require_unread,
    unread_segment_error,
)
from coranto_consumers.journals.losses import (
    LostContent,
    continue_after,
    log_loss,
    loss_by_id,
    loss_by_offsets,
    loss_from_error,
)
from coranto_consumers.journals.ranges import Range
from coranto_consumers.outputs.identity import sources_of
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.application.outputs import SparkApplication, checked_outputs
from coranto_consumers.spark.committed.sequencing import Sources
from coranto_consumers.spark.consumer.outages import Outages
from coranto_consumers.spark.consumer.pending_report import OldestTransactions, log_long_transactions, too_long_for
from coranto_consumers.spark.consumer.prefetch import NextInput, PlannedInput, Prefetcher
from coranto_consumers.spark.consumer.progress import NOTHING, ConsumeReport, OnProgress, PhaseTimes, Step
from coranto_consumers.spark.consumer.transaction import ConsumerTransaction, Owner, offsets_of
from coranto_consumers.spark.consumer.transaction_inputs import TransactionInputs
from coranto_consumers.spark.consumer.unread import UnreadContent, ends_of
from coranto_consumers.spark.inputs.input_reader import FoundLong, Input
from coranto_consumers.spark.session.task_errors import errors_of_tasks

_log = structlog.get_logger(__name__)

Prefetch = Callable[[Input], None]


@dataclass(slots=True)
class Run:
    """One attempt of a run, with the state as of its last commit. Call `begin` once, then `catch_up` any number of
    times."""

    _application: SparkApplication
    _options: ConsumerOptions
    _inputs: TransactionInputs
    _owner: Owner
    _open_transactions: OldestTransactions
    _progress: Callable[[], ConsumeReport]
    """Returns the run's progress as of the last commit, including earlier attempts."""
    _on_progress: OnProgress
    _outages: Outages
    _client: SyncJournalClient
    _ahead: Prefetcher[Input | FoundLong]
    report: ConsumeReport = NOTHING
    sources: Sources = field(default_factory=dict)
    _unread: UnreadContent = field(default_factory=lambda: UnreadContent({}))
    _begins: Mapping[str, int] = field(default_factory=dict)
    _recorded: frozenset[str] = frozenset()
    """The journals in the checkpoint."""
    _has_new_ids: bool = False
    """True if the checkpoint lacks ids of journals that are known now."""
    _times: PhaseTimes | None = None

    def begin(self) -> None:
        """Run step 1 (`spark_consumer.py`), after the database has accepted the application's own SQL."""
        is_first = not self._owner.has_fence
        if is_first:
            self._check()
        checkpoint = self._owner.raise_fence()
        if is_first or not self._owner.identity.is_compared:
            self._compare(checkpoint)
        replayed = self._owner.recover(checkpoint, lambda: nullcontext(self._client))
        report = self._progress()
        replayed += report.replayed_intents
        self.report = replace(report, replayed_intents=replayed, retries=self._outages.retries)
        self.sources = checkpoint.sources

    def present(self) -> dict[str, ContentExtent]:
        return self._inputs.present(self._client)

    def prefetched(self) -> Extents | None:
        return self._ahead.extents()

    def _check(self) -> None:
        """Raise an error for a consumer that cannot run, before an earlier instance is fenced off."""
        owner = self._owner
        found = owner.store.read(owner.shard)
        if owner.is_compared and found is not None and found.fence == owner.fence:
            return  # The fence is this instance's own, from an earlier run.
        for each in getattr(self._application, "sql", ()):
            owner.store.prepare(each)
        recorded = Checkpoint() if found is None else found.checkpoint
        self._compare(recorded)
        # This calls the application with an empty frame. If there is nothing to read, no session is started for it.
        present = self.present()
        done = {journal: source.read_through for journal, source in recorded.sources.items()}
        has_unread = any(each.head > max(each.begin, done.get(journal, 0)) for journal, each in present.items())
        if self._inputs.has_session or has_unread:
            owner.compare(self._inputs.reader().nothing())

    def _compare(self, checkpoint: Checkpoint) -> None:
        owner = self._owner
        now = Identity(sources_of(self._application.sources), store=owner.store.location)
        owner.identity.restored(checkpoint, now, lambda: checkpoint.sources.keys() - self._inputs.names(self._client))

    def catch_up(self, present: Extents, stop: Callable[[], bool] | None = None, most: int | None = None) -> None:
        """Process the content in `present`, until all is read, `most` transactions are done, or `stop` returns True."""
        self._check_state(present)
        while (most is None or self.report.transactions < most) and not (stop is not None and stop()):
            self._times = PhaseTimes(self._owner.name)
            for lost in self._unread.holes.pop_reached(self.sources):
                self._skip_lost(lost)
            due = self._unread.long.due(self.sources, self._options.max_transaction_bytes)
            self.sources = self._unread.known(self.sources)
            ranges = [] if due is not None else self._unread.plan(self.sources, self._inputs.bound.max_bytes)
            if due is None and not ranges:
                self._record()
                return
            self._times.end_phase("planning")
            self._owner.hooks.on_step(Step.PLANNED)
            is_last = most is not None and self.report.transactions + 1 >= most
            try:
                with errors_of_tasks():
                    if due is None:
                        is_done = self._process(ranges, is_last=is_last, is_endless=stop is not None)
                    else:
                        head, size = self._unread.heads[due.journal], self._options.max_transaction_bytes
                        with self._inputs.reader().read_part(due, self.sources, head, size) as read:
                            is_done = self._finish(self._transaction(), read, _prefetch_nothing)
            except OffsetJump as error:
                if self._options.fail_on_data_loss:
                    raise
                self._unread.holes.record(LostContent(error.journal, error.expected, error.actual))
            except JournalRecreated as error:
                if self._options.fail_on_data_loss:
                    raise loss_from_error(error).error(self._advice(error.journal)) from error
                self._check_state(self.present())  # Continue as the current state of the journals requires.
            else:
                if is_done:
                    self._outages.progressed()
                    self._on_progress(self.report)

    def _check_state(self, present: Extents) -> None:
        """Make `present` the content to read. Skips content that is gone, or raises its error."""
        require_unread(self._client, present, self.sources)
        self._unread, self._begins = UnreadContent(present), begins_of(present)
        self._recorded = frozenset(self.sources)
        self._drop_segments(present)
        for journal, extent in present.items():
            source = self.sources.get(journal, Source(extent.begin))
            lost = loss_by_id(source, journal, extent.head, extent.journal_id)
            at = journal, source.read_through, extent.begin, extent.head
            if lost := lost or loss_by_offsets(*at, is_end=extent.is_end):
                self._skip_lost(lost, extent.begin)
        ids = {journal: extent.journal_id for journal, extent in present.items()}
        known = self.sources.keys() & ids.keys()
        self._has_new_ids = any(not self.sources[journal].journal_id for journal in known if ids[journal])
        self.sources = self._unread.known(identified(self.sources, ids))
        self.report = replace(self.report, offsets=offsets_of(self._begins, self.sources), heads=self._unread.heads)
        self._on_progress(self.report)

    def _record(self) -> None:
        """Commit positions of new segments, and journal ids that the checkpoint lacks (as after `accept-journals`)."""
        if self._unread.has_successors(self.sources.keys() - self._recorded) or self._has_new_ids:
            self._owner.record(self.sources, self.report)

    def _process(self, ranges: Sequence[Range], *, is_last: bool, is_endless: bool) -> bool:
        """Process ranges in one transaction. Return False if they have to be planned again."""
        inputs, writing = self._inputs, self._inputs.writing
        prefetch = _prefetch_nothing if is_last else partial(self._prefetch, ranges, is_endless)
        reading = self._ahead.take(PlannedInput.of(ranges, self.sources))
        if reading is None and writing.is_worthwhile(ranges, self.sources):
            if (expected := self._written_as_expected(ranges)) is not None:
                transaction, read = expected
                if not inputs.bound.observe(ranges, read.rows):
                    return False
                try:
                    return self._finish(transaction, read, prefetch, ranges)
                except RejectedRow as rejected:
                    _log.info("transaction.read_again", consumer=self._owner.name, error=rejected.problem)
        else:
            writing.record_two_jobs(wasted=False)
        transaction = self._transaction()
        with reading or inputs.reading(self._client, ranges, self.sources, self._begins) as read_now:
            if isinstance(read_now, FoundLong):
                long, most = read_now.transactions, self._options.max_transaction_bytes
                if self._options.atomic:
                    raise too_long_for(long[0], self.sources, most)
                self._unread.long.add(long)  # These are delivered in parts.
                log_long_transactions(long, self.sources, most)
                return False
            if not inputs.bound.observe(ranges, read_now.rows):
                return False
            return self._finish(transaction, read_now, prefetch, ranges)

    def _written_as_expected(self, ranges: Sequence[Range]) -> tuple[ConsumerTransaction, Input] | None:
        """Run steps 3 and 4 (`spark_consumer.py`) in one job. None if that is impossible (`OptimisticWrites`)."""
        inputs, transaction, read = self._inputs, self._transaction(), None
        expected = inputs.expect(self._client, ranges)
        if expected is not None:
            try:
                outputs = checked_outputs(self._owner.outputs(expected.committed))
                if not inputs.writing.allows(outputs):
                    return None
                transaction.write_expected(outputs, expected)
                read = inputs.confirm(expected, self.sources, self._begins)
            except (CorantoError, PySparkException, Py4JError) as error:
                problem = str(error).partition("\n")[0]
                _log.info("transaction.read_again", consumer=self._owner.name, error=problem)
        if read is None:
            inputs.writing.record_two_jobs(wasted=True)
            return None
        inputs.writing.record_one_job()
        return transaction, read

    def _transaction(self) -> ConsumerTransaction:
        times, self._times = self._times, None  # A second attempt measures its own times.
        return ConsumerTransaction(self._owner, self.report, lambda: nullcontext(self._client), times)

    def _finish(
        self, transaction: ConsumerTransaction, read: Input, prefetch: Prefetch, ranges: Sequence[Range] = ()
    ) -> bool:
        self._owner.hooks.on_step(Step.SEQUENCED)
        transaction.run(read, prefetch)
        self.sources = read.sources
        lasting = self._open_transactions.observe(read.sources)
        self.report = replace(transaction.report, open_transactions=lasting)
        self._owner.commits.report = self.report
        if ranges:
            self._unread.processed(ranges, read.sources)
            self._recorded, self._has_new_ids = frozenset(read.sources), False
        return True

    def _prefetch(self, ranges: Sequence[Range], is_endless: bool, read: Input) -> None:
        inputs, unread = self._inputs, self._unread
        inputs.bound.apply()
        after = unread.known(read.sources)
        if following := unread.plan_next(ranges, after, inputs.bound.max_bytes):
            if not inputs.writing.is_worthwhile(following, after):
                reading = inputs.reading(self._client, following, after, self._begins)
                self._ahead.begin(lambda: NextInput(PlannedInput.of(following, after), reading))
        elif is_endless and unread.is_clear and not self._options.min_transaction_seconds:
            self._ahead.begin(partial(self._prefetch_later, unread.present, after))

    def _prefetch_later(self, before: Extents, sources: Sources) -> NextInput[Input | FoundLong] | None:
        """List the journals again, and return the input after `before`, if something was written since."""
        present = self.present()
        if ends_of(present) == ends_of(before):
            return None
        unread = UnreadContent(present)
        known = unread.known(sources)
        ranges = unread.plan(known, self._inputs.bound.max_bytes)
        if not ranges or self._inputs.writing.is_worthwhile(ranges, known):
            return None
        reading = self._inputs.reading(self._client, ranges, known, begins_of(present))
        return NextInput(PlannedInput.of(ranges, known), reading, present)

    def _skip_lost(self, lost: LostContent, begin: int = 0) -> None:
        if self._options.fail_on_data_loss:
            raise lost.error(self._advice(lost.journal))
        self.report = replace(self.report, lost=(*self.report.lost, lost))
        source, partly = continue_after(self.sources[lost.journal], lost, begin)
        log_loss(lost, partly)
        self.sources = {**self.sources, lost.journal: source}

    def _drop_segments(self, present: Extents) -> None:
        """Drop the state of truncated segments. Raises StreamTruncated if one was not fully read."""
        gone = gone_segments(present, self.sources)
        for journal in sorted(gone.unread):
            lost = LostContent(journal, self.sources[journal].read_through, 0, recreated=True)
            if self._options.fail_on_data_loss:
                raise unread_segment_error(journal, lost.begin)
            log_loss(lost)
            self.report = replace(self.report, lost=(*self.report.lost, lost))
        left = self.sources.keys() - gone.read - gone.unread
        self.sources = {journal: source for journal, source in self.sources.items() if journal in left}

    def _advice(self, journal: str) -> str:
        return (
            "Start a consumer of another name, or continue without the lost content (fail_on_data_loss=False). If the "
            "present journal has the content of the earlier one, such as recovered content, run `coranto consumer "
            f"accept-journals {self._owner.name} {journal} --store URL` with the URL of this consumer's store, and "
            "start again."
        )


def _prefetch_nothing(read: Input) -> None:
    """Prefetch nothing: the run may end after this transaction, or the next plan is not known."""
