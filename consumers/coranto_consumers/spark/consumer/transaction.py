"""The writing, commit and acknowledgement of one transaction: steps 4 to 6 of a consumer (`consumer.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from coranto.client import SyncJournalClient
from coranto.errors import RejectedRow
from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.outputs.dead_letters import MisfitPolicy
from coranto_consumers.outputs.identity import IdentityCheck
from coranto_consumers.spark.application.application import Outputs, SparkApplication, checked_outputs
from coranto_consumers.spark.application.dead_letters import DeadLetters, dead_letter_outputs
from coranto_consumers.spark.consumer.acknowledging import acknowledge, rolled_back_on_failure
from coranto_consumers.spark.consumer.outages import RunCommits
from coranto_consumers.spark.consumer.pending_report import OldestTransactions
from coranto_consumers.spark.consumer.progress import ConsumeReport, Hooks, PhaseTimes, Step
from coranto_consumers.spark.consumer.rejections import Rejections, without_rejected
from coranto_consumers.spark.inputs.frames import ExpectedRows
from coranto_consumers.spark.inputs.inputs import Input
from coranto_consumers.spark.outputs.output_stores import OutputStore
from coranto_consumers.spark.outputs.staging import Published, publish_journal_outputs
from coranto_consumers.spark.session.task_errors import errors_of_tasks
from coranto_consumers.spark.sink.producer_ids import SettledIds

_log = structlog.get_logger(__name__)

ReadAndWrite = Callable[[Callable[[Outputs, ExpectedRows], list[Any]]], tuple[Input, list[Any]] | None]
"""Reads an input, and passes the application's outputs of it to the function that writes them, in one job.

None if that is impossible: written rows are then never merged.
"""


@dataclass(frozen=True, slots=True)
class OutputTransactions:
    """Processes the inputs of one consumer, one after the other."""

    application: SparkApplication
    store: OutputStore[Any]
    hooks: Hooks
    misfits: MisfitPolicy | DeadLetters
    open_transactions: OldestTransactions
    identity: IdentityCheck
    ids: SettledIds = field(default_factory=SettledIds)
    commits: RunCommits = field(default_factory=RunCommits)

    def process(
        self,
        client: SyncJournalClient,
        reading: AbstractContextManager[Input],
        report: ConsumeReport,
        written: Callable[[Mapping[str, Source]], None],
        optimistic: ReadAndWrite | None = None,
    ) -> tuple[ConsumeReport, dict[str, Source]]:
        """Run steps 3 to 6 for an input.

        Calls `written` before step 5, with the states of sources that step 5 will commit. Tries `optimistic` before it
        enters `reading`.
        """
        times = PhaseTimes()
        optimistic_result = None
        if optimistic is not None:

            def write(made: Outputs, rows: ExpectedRows) -> list[Any]:
                self.identity.take(made.names)
                return self.store.write_expected(made, self.application.name, report.fence, rows)

            optimistic_result = optimistic(write)
        if optimistic_result is not None:
            try:
                return self._finish(client, optimistic_result[0], report, written, times, optimistic_result[1])
            except RejectedRow as rejected:
                _log.info("transaction.read_again", consumer=self.application.name, error=rejected.problem)
        with reading as read:
            times.ended("reading")
            try:
                return self._finish(client, read, report, written, times)
            except RejectedRow as rejected:
                settled = self._settled(read, report.fence, rejected)
            return self._finish(client, settled, report, written, times)

    def _settled(self, read: Input, fence: int, rejected: RejectedRow) -> Input:
        """Return an input without the messages that the store rejects. Raises RejectedRow if `misfits` forbids that."""

        def reject(made: Outputs) -> RejectedRow | None:
            return self.store.rejection(made, self.application.name, fence)

        rejections = Rejections(self.application.name, self.application.outputs, self.misfits, reject)
        return without_rejected(read, rejections, rejected)

    def _finish(
        self,
        client: SyncJournalClient,
        read: Input,
        report: ConsumeReport,
        written: Callable[[Mapping[str, Source]], None],
        times: PhaseTimes,
        staged: list[Any] | None = None,
    ) -> tuple[ConsumeReport, dict[str, Source]]:
        """Run steps 4 to 6 for an input. `staged` has its rows if they are written already.

        Raises RejectedRow, before anything is committed, for rows that the store rejects.
        """
        self.hooks.reached(Step.SEQUENCED)
        with errors_of_tasks():
            staged, published = self._write(client, read, report.fence, staged)
        times.ended("writing")
        with rolled_back_on_failure(client, published) as committing:
            written(read.sources)

            def merged() -> None:
                self.hooks.reached(Step.MERGED)
                committing()

            done = replace(
                report,
                transactions=report.transactions + 1,
                messages=report.messages + read.messages,
                misfits=report.misfits + read.misfits,
                records_read=report.records_read + read.rows,
                published=report.published + published.messages,
                offsets=offsets_of(report.offsets, read.sources),
            )
            self._commit(done, staged, Checkpoint(read.sources, published.intents), merged)
        times.ended("committing")
        self.hooks.reached(Step.COMMITTED)
        if not acknowledge(client, published.intents).may_repeat:
            self.ids.settle(published.uses)
        times.ended("acknowledging")
        self.hooks.reached(Step.ACKNOWLEDGED)
        lasting = self.open_transactions.observe(read.sources)
        done = replace(done, seconds=times.added_to(report.seconds), open_transactions=lasting)
        self.commits.report = done
        return done, read.sources

    def record(self, sources: Mapping[str, Source], report: ConsumeReport) -> None:
        """Commit the states of sources alone, without acknowledgements. Raises as the store's `commit` does."""
        self._commit(report, [], Checkpoint(dict(sources), {}), lambda: None)

    def _commit(
        self, done: ConsumeReport, written: list[Any], checkpoint: Checkpoint, merged: Callable[[], None]
    ) -> None:
        """Commit written rows and the checkpoint. `done` is the progress of the run after that."""
        self.identity.settle()
        checkpoint = replace(checkpoint, identity=self.identity.record)
        self.commits.begin(checkpoint, done)
        self.store.commit(self.application.name, done.fence, written, checkpoint, merged)
        self.commits.committed()

    def _write(
        self, client: SyncJournalClient, read: Input, fence: int, staged: list[Any] | None
    ) -> tuple[list[Any], Published]:
        """Stage and publish the application's outputs of committed messages, and dead letters.

        `staged` has the rows if an optimistic job has written all of them.
        """
        if staged is not None:
            self.hooks.reached(Step.STAGED)
            self.hooks.reached(Step.PUBLISHED)
            return staged, Published()
        made = [checked_outputs(self.application.outputs(read.committed))] if read.messages else []
        for outputs in made:
            self.identity.take(outputs.names)
        if read.dead is not None and isinstance(self.misfits, DeadLetters):
            made.append(dead_letter_outputs(self.misfits, read.dead))
        if not made:
            return [], Published()
        staged = self.store.write_all(made, self.application.name, fence, read.packed)
        self.hooks.reached(Step.STAGED)
        journals = [output for outputs in made for output in outputs.journals]
        published = publish_journal_outputs(journals, client, self.ids)
        self.hooks.reached(Step.PUBLISHED)
        return staged, published


def offsets_of(before: Mapping[str, int], sources: Mapping[str, Source]) -> dict[str, int]:
    """Return the offsets through which journals are processed: of `sources`, and otherwise of `before`."""
    return {journal: sources[journal].offset if journal in sources else offset for journal, offset in before.items()}
