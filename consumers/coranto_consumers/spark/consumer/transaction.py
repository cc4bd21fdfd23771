"""One transaction of a consumer: its outputs are staged and published, committed, and acknowledged.

`SparkConsumer`, `WindowConsumer` and `exactly_once` share it. The states of a transaction, in order:

| state | content of the store | content of the output journals |
|---|---|---|
| begun | as before | as before |
| staged | rows in stage tables or files, which readers do not see | messages that are pending |
| committing | as before, or as after the commit | pending messages |
| committed | rows and checkpoint, in one transaction | pending messages; the checkpoint has their acknowledgements |
| acknowledged | the same | committed messages |

A failure before `committing` rolls the pending messages back. After a later failure, the next start restores the
store's checkpoint, and appends the acknowledgements in it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import structlog
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sqlalchemy import Connection

from coranto.client import SyncJournalClient
from coranto.errors import CorantoError, CorruptData, JournalNotFound, PermissionDenied, RejectedRow
from coranto.messages.checkpoints import Checkpoint
from coranto.security.tokens import shows
from coranto_consumers.outputs.dead_letters import COLUMNS, DeadLetters, MisfitPolicy
from coranto_consumers.outputs.identity import IdentityCheck
from coranto_consumers.spark.application.outputs import JournalOutput, Outputs, TableOutput, checked_outputs
from coranto_consumers.spark.committed.sequencing import Sources
from coranto_consumers.spark.consumer.progress import NOTHING, ConsumeReport, Hooks, PhaseTimes, Step
from coranto_consumers.spark.consumer.rejections import Rejections, without_rejected
from coranto_consumers.spark.inputs.input_reader import Input
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.spark.outputs.staging import Published, publish_journal_outputs
from coranto_consumers.spark.outputs.stores import Merged, OutputStore, SqlOutputs
from coranto_consumers.spark.session.task_errors import errors_of_tasks
from coranto_consumers.spark.sink.producer_ids import ReleasedIds
from coranto_consumers.stores.reading import ICEBERG
from coranto_consumers.stores.sql import SqlStore

_TIMEOUT_AFTER_FAILURE: Final = 5.0
"""The retry timeout in seconds of each further acknowledgement, once one has failed."""
_ROLLBACK_TIMEOUT: Final = 1.0
"""The retry timeout in seconds of each rollback. Rollbacks are optional: they only save readers memory."""

_log = structlog.get_logger(__name__)

Connect = Callable[[], AbstractContextManager[SyncJournalClient]]


@dataclass(slots=True)
class RunCommits:
    """The commits of one run, as far as its driver knows."""

    checkpoint: Checkpoint | None = None
    """The last checkpoint that is known to be committed."""
    report: ConsumeReport | None = None
    """The progress of the run as of that checkpoint."""
    _committing: tuple[Checkpoint, ConsumeReport] | None = None

    def clear(self) -> None:
        self.checkpoint = self.report = self._committing = None

    def begin(self, checkpoint: Checkpoint, report: ConsumeReport) -> None:
        """Record the checkpoint that is about to be committed, and the run's progress after that commit."""
        self._committing = checkpoint, report

    def complete(self) -> None:
        assert self._committing is not None
        self.checkpoint, self.report = self._committing
        self._committing = None

    def check_restored(self, checkpoint: Checkpoint, name: str) -> None:
        """Compare with the store's checkpoint after a failure. Raises CorruptData if the store has lost commits."""
        if self._committing is not None and checkpoint == _as_stored(self._committing[0]):
            self.complete()
        elif self.checkpoint is None or checkpoint != _as_stored(self.checkpoint):
            raise CorruptData(
                f"{name} has an earlier checkpoint than this consumer has committed: it lost commits, as in a failover "
                "to a server that lacks them. Start the consumer again: it continues from the store's checkpoint, and "
                "publishes its later messages again"
            )
        self._committing = None


@dataclass(slots=True)
class Owner:
    """The holder of a consumer's fence in this process."""

    name: str
    shard: str
    """The key of the fence and the checkpoint in the store."""
    outputs: Callable[[DataFrame], Outputs]
    store: OutputStore[Any]
    misfits: MisfitPolicy | DeadLetters
    identity: IdentityCheck
    hooks: Hooks
    fence: int = 0
    ids: ReleasedIds = field(default_factory=ReleasedIds)
    commits: RunCommits = field(default_factory=RunCommits)
    is_compared: bool = False
    """True if this instance has compared its outputs with their tables."""
    _stale_below: int = 0
    """Staged rows with lower fences belong to earlier instances or attempts."""

    @property
    def has_fence(self) -> bool:
        """True if this run has raised the fence, so that `raise_fence` only continues under it."""
        return self.commits.report is not None

    @property
    def progress(self) -> ConsumeReport:
        """The progress of the run as of its last commit."""
        return self.commits.report or NOTHING

    def raise_fence(self) -> Checkpoint:
        """Raise the fence, or continue under it after a failure. Return the committed checkpoint. Raises Fenced."""
        if not self.has_fence:
            self.fence, checkpoint = self.store.raise_fence(self.shard)
            self.commits.begin(checkpoint, replace(NOTHING, fence=self.fence))
            self.commits.complete()
            self._stale_below = self.fence
        else:
            checkpoint = self.store.resume(self.shard, self.fence)
            self.commits.check_restored(checkpoint, self.store.name)
            self._stale_below = self.fence + 1
        return checkpoint

    def compare(self, nothing: DataFrame) -> None:
        """Raise InvalidInput for outputs that do not fit their tables, or that the database role may not write.

        Calls `outputs` with `nothing`, an empty frame. If the application fails on it, nothing is compared, because
        consumers of journals call applications only with messages. Raises SqlStoreError.
        """
        try:
            outputs = self.outputs(nothing)
            tables, sql = list(outputs.tables), list(outputs.sql)
        except CorantoError:
            raise
        except Exception as error:  # noqa: BLE001 - the application may raise anything
            _log.info("consumer.tables_not_compared", consumer=self.name, error=type(error).__name__)
            return
        if isinstance(self.misfits, DeadLetters) and self.misfits.table is not None:
            kinds = zip(COLUMNS, ("STRING", "BIGINT", "BINARY"), strict=True)
            no_letters = nothing.selectExpr(*(f"CAST(NULL AS {kind}) AS {name}" for name, kind in kinds))
            tables += _dead_letter_outputs(self.misfits, no_letters).tables
        self.store.compare(Outputs(tables, (), sql))
        self.is_compared = True

    def recover(self, checkpoint: Checkpoint, connect: Connect) -> int:
        """Append the checkpoint's acknowledgements again, and delete stale rows. Return the number of journals."""
        self.ids.begin(self.fence)
        self.hooks.on_step(Step.FENCED)
        replayed = 0
        if checkpoint.ack_intents:
            with connect() as client:
                replayed, _ = acknowledge(client, checkpoint.ack_intents)
        self.store.sweep(self.shard, self._stale_below)
        self.hooks.on_step(Step.RECOVERED)
        return replayed

    def rejection(self, outputs: Outputs) -> RejectedRow | None:
        """Return the store's rejection of outputs, if any. The outputs are not committed."""
        return self.store.rejection(outputs, self.shard, self.fence)

    def commit(self, written: Sequence[Any], checkpoint: Checkpoint, report: ConsumeReport, merged: Merged) -> None:
        """Commit written rows and a checkpoint. `report` is the progress after it. Calls `merged` just before it."""
        self.identity.require_confirmed()
        checkpoint = replace(checkpoint, identity=self.identity.record)
        self.commits.begin(checkpoint, report)
        self.store.commit(self.shard, self.fence, written, checkpoint, merged)
        self.commits.complete()

    def record(self, sources: Sources, report: ConsumeReport) -> None:
        """Commit only the states of sources, without rows and acknowledgements. Raises as `commit` does."""
        self.commit([], Checkpoint(dict(sources), {}), report, lambda: None)


class ConsumerTransaction:
    """One transaction. `report` is its run's progress, which the transaction updates. `times` measures its phases."""

    def __init__(self, owner: Owner, report: ConsumeReport, connect: Connect, times: PhaseTimes | None = None) -> None:
        self.report = report
        self._owner = owner
        self._connect = connect
        self._times = times or PhaseTimes(owner.name)
        self._written: list[Any] = []
        self._is_expected = False
        self._published = Published()
        self._is_committing = False
        self._resources = ExitStack()
        self._connected: SyncJournalClient | None = None

    def write_expected(self, outputs: Outputs, rows: ExpectedRows) -> None:
        """Write outputs of messages that are not known to be committed yet. Then `run` their input, or discard this."""
        self._owner.identity.take(outputs.names)
        self._written = self._owner.store.write_all([outputs], self._owner.shard, self._owner.fence, rows)
        self._is_expected = True

    def run(self, read: Input, staged: Callable[[Input], None] = lambda read: None) -> Input:
        """Process an input, without the messages that the store rejects. Return the input that was processed.

        Calls `staged` before the commit. Raises the errors of the store, the client and the tasks. Raises RejectedRow,
        before anything is committed, for messages that `misfits` forbids; after `write_expected`, for any rejected row.
        """
        with self._times.trace() as span, self._resources:
            self._times.end_phase("reading")
            try:
                self._run(read, staged)
            except RejectedRow as rejected:
                if self._is_expected:
                    raise
                owner = self._owner
                rejections = Rejections(owner.name, owner.outputs, owner.misfits, owner.rejection)
                read = without_rejected(read, rejections, rejected)
                self._run(read, staged)
            if span is not None:
                span.note(messages=read.messages, published=self._published.messages)
        return read

    def _run(self, read: Input, staged: Callable[[Input], None]) -> None:
        hooks = self._owner.hooks
        with errors_of_tasks():
            self._stage(read)
        self._times.end_phase("writing")
        try:
            staged(read)
            self._commit(read)
        except CorantoError as error:
            if not self._is_committing:  # Otherwise the outcome may be unknown.
                self._roll_back(error)
            raise
        self._times.end_phase("committing")
        hooks.on_step(Step.COMMITTED)
        if self._published.intents:
            _, may_repeat = acknowledge(self._client(), self._published.intents)
            if not may_repeat:
                self._owner.ids.release(self._published.uses)
        self._times.end_phase("acknowledging")
        hooks.on_step(Step.ACKNOWLEDGED)
        self.report = replace(self.report, seconds=self._times.plus(self.report.seconds))
        self._owner.commits.report = self.report

    def _stage(self, read: Input) -> None:
        owner = self._owner
        self._published = Published()
        if not self._is_expected:
            all_outputs = [] if read.is_empty else [checked_outputs(owner.outputs(read.committed))]
            for outputs in all_outputs:
                owner.identity.take(outputs.names)
            if read.dead is not None and isinstance(owner.misfits, DeadLetters):
                all_outputs.append(_dead_letter_outputs(owner.misfits, read.dead))
            self._written = owner.store.write_all(all_outputs, owner.shard, owner.fence) if all_outputs else []
            if not all_outputs:
                return
        owner.hooks.on_step(Step.STAGED)
        if not self._is_expected and (journals := [output for outputs in all_outputs for output in outputs.journals]):
            self._published = publish_journal_outputs(journals, self._client(), owner.ids)
        owner.hooks.on_step(Step.PUBLISHED)

    def _commit(self, read: Input) -> None:
        before = self.report
        done = replace(
            before,
            transactions=before.transactions + 1,
            messages=before.messages + read.messages,
            misfits=before.misfits + read.misfits,
            records_read=before.records_read + read.rows,
            published=before.published + self._published.messages,
            offsets=offsets_of(before.offsets, read.sources),
        )

        def merged() -> None:
            self._owner.hooks.on_step(Step.MERGED)
            self._is_committing = True

        checkpoint = Checkpoint(read.sources, self._published.intents, batch=read.record)
        self._owner.commit(self._written, checkpoint, done, merged)
        self.report = done

    def _roll_back(self, error: CorantoError) -> None:
        """Append rollbacks, so that readers drop published messages and need not keep their producers' states."""
        for journal, content in sorted(self._published.rollbacks.items()):
            try:
                self._client().append(journal, content, retry_unknown=True, retry_timeout=_ROLLBACK_TIMEOUT)
            except CorantoError as failure:
                error.add_note(f"{failure}: readers keep the failed transaction's messages as pending")
                return

    def _client(self) -> SyncJournalClient:
        if self._connected is None:
            self._connected = self._resources.enter_context(self._connect())
        return self._connected


def output_store(store: str | OutputStore[Any], commit: Callable[[Connection], None]) -> OutputStore[Any]:
    """Return `store`, or the store at this URL. `commit` commits the transactions of a database."""
    if isinstance(store, str) and store.startswith(ICEBERG):
        from coranto_consumers.spark.outputs.iceberg import IcebergStore  # Needs the extra `lake`.

        return IcebergStore.at(store)
    return store if isinstance(store, OutputStore) else SqlOutputs(SqlStore(store, commit=commit))


def _dead_letter_outputs(letters: DeadLetters, dead: DataFrame) -> Outputs:
    if letters.table is not None:
        return Outputs(tables=[TableOutput(letters.table, dead.select(*COLUMNS))])
    value = F.struct("journal", "offset", F.base64("line").alias("line"))
    rows = dead.select(F.col("journal").alias("key"), value.alias("value"))
    return Outputs(journals=[JournalOutput(rows, letters.journals)])


def acknowledge(client: SyncJournalClient, intents: Mapping[str, bytes]) -> tuple[int, bool]:
    """Append acknowledgements to all journals. Return the number of appends, and True if one may be a duplicate.

    After an error, continues with the other journals, and then raises the first error.
    """
    appended, may_repeat = 0, False
    failure: CorantoError | None = None
    for journal, content in sorted(intents.items()):
        # If brokers are unavailable for long, all journals may fail: do not wait for the full timeout each time.
        retry_timeout = None if failure is None else min(_TIMEOUT_AFTER_FAILURE, client.config.retry_timeout)
        try:
            may_repeat |= client.append(journal, content, retry_unknown=True, retry_timeout=retry_timeout).may_repeat
        except JournalNotFound as error:
            if shows(client.config.auth, journal):
                _log.warning("source.pending_messages_gone", journal=journal)
            else:
                failure = failure or PermissionDenied(f"{error} Or the token does not cover it: use one that does.")
        except CorantoError as error:
            _log.warning("acknowledgement.failed", journal=journal, error=str(error))
            failure = failure or error
        else:
            appended += 1
    if failure is not None:
        raise failure
    return appended, may_repeat


def offsets_of(before: Mapping[str, int], sources: Sources) -> dict[str, int]:
    """Return the offsets through which the journals of `before` are processed, updated from `sources`."""
    return {journal: sources[journal].offset if journal in sources else offset for journal, offset in before.items()}


def _as_stored(checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint.from_bytes(checkpoint.to_bytes())
