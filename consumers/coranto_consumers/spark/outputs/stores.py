"""Stores of outputs: the interface for a consumer's driver, and its implementation for SQL databases."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from sqlalchemy import Connection, Table, delete
from sqlalchemy.exc import SQLAlchemyError

from coranto.errors import InvalidInput, RejectedRow, SqlStoreError
from coranto.fragments.windows import Window
from coranto.messages.checkpoints import Checkpoint, Identity
from coranto_consumers.spark.application.outputs import Outputs, SqlOutput, TableOutput, column_named
from coranto_consumers.spark.inputs.strategies import ExpectedRows
from coranto_consumers.spark.outputs.staging import (
    CARRIED_TO_APPEND,
    CARRIED_TO_MERGE,
    Staged,
    can_carry,
    plan_of,
    table_of,
)
from coranto_consumers.spark.outputs.tasks import STAGED, StageTask
from coranto_consumers.spark.session.sessions import described
from coranto_consumers.spark.session.task_errors import errors_of_tasks
from coranto_consumers.stores.fencing import Restored, fenced_off
from coranto_consumers.stores.merge import MergePlan
from coranto_consumers.stores.sql import SqlStore, check_deferred
from coranto_consumers.stores.staged_sql import StagedSql
from coranto_consumers.stores.staging import compare_plan, delete_staged, delete_stale, stage_of
from coranto_consumers.stores.windows import WINDOW_COLUMN, WindowLog

W = TypeVar("W")
AllOutputs = Sequence[Outputs]
Merged = Callable[[], None]


class OutputStore(ABC, Generic[W]):
    """A store of outputs, used by one driver. `shard` is the consumer's name, and `W` the handle of written rows."""

    writes_optimistically = False
    """True if rows may be written before their messages are known to be committed. A commit removes unused rows."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The store's display name, without a password."""

    @property
    def location(self) -> str:
        """The location of the store. A checkpoint records it, to detect a copied checkpoint."""
        return self.name

    def require_fence(self, shard: str, fence: int) -> None:
        """Raise Fenced if a later owner has raised the fence. Does nothing if the store is temporarily unavailable."""
        try:
            found = self.read(shard)
        except SqlStoreError as error:
            if not error.retriable:
                raise
            return
        if found is not None and found.fence > fence:
            raise fenced_off(shard, fence, found)

    @abstractmethod
    def raise_fence(self, shard: str) -> Restored:
        """Raise the fence of a consumer, so that no earlier owner can commit. Raises InvalidInput and SqlStoreError."""

    @abstractmethod
    def resume(self, shard: str, fence: int) -> Checkpoint:
        """Return the last checkpoint of the owner of `fence` after a failure. Its pending commits can have no effect.

        Raises Fenced when a later owner has raised the fence, CorruptData when the store has a lower fence, and thus
        has lost commits, and SqlStoreError.
        """

    @abstractmethod
    def sweep(self, shard: str, fence: int) -> None:
        """Remove uncommitted rows of owners with lower fences. Raises SqlStoreError."""

    @abstractmethod
    def write(self, output: TableOutput, shard: str, fence: int, expected: ExpectedRows | None = None) -> W:
        """Let tasks write the rows of an output. `commit` makes them visible. Raises InvalidInput.

        `expected` has the messages of the rows if these are not known to be committed (`writes_optimistically`).
        """

    def prepare(self, sql: StagedSql) -> None:
        """Check an application's own SQL. Raises InvalidInput for SQL that the store rejects, and SqlStoreError."""
        raise InvalidInput(f"{self.name} runs no SQL: let the application return tables only", field="outputs")

    def write_sql(self, output: SqlOutput, shard: str, fence: int) -> W:
        """Let tasks write the rows of an output for SQL. Raises InvalidInput as `prepare`, and for wrong columns."""
        raise InvalidInput(f"{self.name} runs no SQL: let the application return tables only", field="outputs")

    def write_all(
        self, all_outputs: AllOutputs, shard: str, fence: int, expected: ExpectedRows | None = None
    ) -> list[W]:
        """Write the rows of outputs for tables, and then for SQL. Raises as `write` and `write_sql` do."""
        written = [self.write(output, shard, fence, expected) for outputs in all_outputs for output in outputs.tables]
        return written + [self.write_sql(output, shard, fence) for outputs in all_outputs for output in outputs.sql]

    @abstractmethod
    def read(self, shard: str) -> Restored | None:
        """Return a consumer's fence and checkpoint. None if it never started. Raises InvalidInput if it is retired."""

    @abstractmethod
    def compare(self, outputs: Outputs) -> None:
        """Raise InvalidInput for rows that do not fit tables, or for missing privileges. Creates absent tables."""

    def rejection(self, outputs: Outputs, shard: str, fence: int) -> RejectedRow | None:
        """Write the rows of outputs in a transaction that is rolled back. Return the store's rejection, if any."""
        raise InvalidInput(f"{self.name} rejects no rows", field="store")

    @abstractmethod
    def commit(self, shard: str, fence: int, written: Sequence[W], checkpoint: Checkpoint, merged: Merged) -> None:
        """Commit written rows together with the checkpoint. On return they are durable.

        `merged` is called once, just before the commit itself. Raises Fenced when a later owner has raised the fence
        and SqlStoreError when the store rejected the commit (nothing was committed), InvalidInput for rows that do not
        fit, and CommitOutcomeUnknown.
        """


class SqlOutputs(OutputStore[Staged]):
    """A SQL database as a store of outputs."""

    writes_optimistically = True

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def location(self) -> str:
        return self._store.location

    def raise_fence(self, shard: str) -> Restored:
        return self._store.raise_fence(shard)

    def resume(self, shard: str, fence: int) -> Checkpoint:
        return self._store.resume(shard, fence)

    def read(self, shard: str) -> Restored | None:
        return self._store.read(shard)

    def compare(self, outputs: Outputs) -> None:
        for output in outputs.sql:
            output.sql.prepare(self._store)
        for plan in map(plan_of, outputs.tables):
            compare_plan(self._store, plan, stage_of(self._store, plan))

    def sweep(self, shard: str, fence: int) -> None:
        try:
            with self._store.engine.begin() as connection:
                delete_stale(self._store, connection, shard, fence)
        except SQLAlchemyError as error:
            raise self._store.failure("stale staged rows could not be deleted", error) from error

    def write(self, output: TableOutput, shard: str, fence: int, expected: ExpectedRows | None = None) -> Staged:
        plan = plan_of(output)
        few = CARRIED_TO_MERGE if plan.keys and not self._store.is_postgresql else CARRIED_TO_APPEND
        most = few if can_carry(plan) else 0
        return self._staged(output.rows, plan, stage_of(self._store, plan), shard, fence, most, expected=expected)

    def prepare(self, sql: StagedSql) -> None:
        sql.prepare(self._store)

    def write_sql(self, output: SqlOutput, shard: str, fence: int) -> Staged:
        plan = output.sql.plan(output.rows.columns)
        rows = output.rows.select(*map(column_named, plan.columns))
        return self._staged(rows, plan, output.sql.prepare(self._store), shard, fence, CARRIED_TO_MERGE, output.sql)

    def _staged(
        self,
        rows: DataFrame,
        plan: MergePlan,
        stage: Table,
        shard: str,
        fence: int,
        most: int,
        sql: StagedSql | None = None,
        expected: ExpectedRows | None = None,
    ) -> Staged:
        """Let tasks stage rows, or carry at most `most` bytes each. With `expected`, the tasks also read messages."""
        read = None if expected is None else expected.batches_of(rows)
        given, choose = read or (rows, None)
        task = StageTask(self._store.url, stage, shard, fence, most, choose)
        with described(rows.sparkSession, f"{shard}: writes rows for table {plan.table.name}"):
            results = given.mapInArrow(task, STAGED).collect()
        if expected is not None and choose is not None:
            expected.add_summaries([row.summary for row in results if row.summary is not None])
        won = [row for row in results if row.summary is None]
        staged = [row for row in won if row.carried is None]
        return Staged(
            plan,
            stage,
            (shard, fence, uuid.uuid4().hex),
            tuple(row.attempt for row in staged),
            sum(row.rows for row in staged),
            tuple(bytes(row.carried) for row in won if row.carried is not None),
            sql,
        )

    def rejection(self, outputs: Outputs, shard: str, fence: int) -> RejectedRow | None:
        try:
            with errors_of_tasks():
                written = self.write_all([outputs], shard, fence)
            with self._store.transaction(shard, fence) as transaction:
                self._merge(transaction.connection, written)
                check_deferred(transaction.connection)
        except RejectedRow as rejected:
            return rejected
        return None

    def commit(self, shard: str, fence: int, written: Sequence[Staged], checkpoint: Checkpoint, merged: Merged) -> None:
        with self._store.transaction(shard, fence) as transaction:
            checkpoint = self._begin(transaction.connection, checkpoint)
            self._merge(transaction.connection, written)
            for stage in {each.stage.name: each.stage for each in written}.values():
                delete_staged(transaction.connection, stage, shard, below_fence=fence + 1)
            merged()
            transaction.commit(checkpoint)

    def _begin(self, connection: Connection, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def _merge(self, connection: Connection, written: Sequence[Staged]) -> None:
        for each in written:
            each.merge(connection)


class WindowRows(SqlOutputs):
    """The store of one window's outputs. Fills `coranto_window` with its number. `recorded` is the log's identity."""

    writes_optimistically = False

    def __init__(
        self, store: SqlStore, window: Window, log: WindowLog, recorded: Identity, letters: Table | None
    ) -> None:
        super().__init__(store)
        self._window = window
        self._log = log
        self._recorded = recorded
        self._letters = letters

    def write_all(
        self, all_outputs: AllOutputs, shard: str, fence: int, expected: ExpectedRows | None = None
    ) -> list[Staged]:
        for given, problem in (
            ([outputs.journals for outputs in all_outputs], "publish: messages in journals cannot be replaced"),
            ([outputs.sql for outputs in all_outputs], "write by SQL of its own: the rows to replace would be unknown"),
        ):
            if any(given):
                text = f"an application that runs by windows cannot {problem}; let it return tables only"
                raise InvalidInput(text, field="outputs")
        tables = [_of_window(output, self._window) for outputs in all_outputs for output in outputs.tables]
        return [self.write(output, shard, fence) for output in tables]

    def _begin(self, connection: Connection, checkpoint: Checkpoint) -> Checkpoint:
        after = replace(checkpoint, identity=Identity())  # The log records the identity for all windows.
        self._log.record(connection, checkpoint.identity, self._recorded)
        self._log.claim(connection, self._window, after, time.time())
        return after

    def _merge(self, connection: Connection, written: Sequence[Staged]) -> None:
        tables: dict[str, Table] = {each.plan.table.fullname: each.plan.table for each in written}
        if self._letters is not None:
            tables[self._letters.fullname] = self._letters  # Delete earlier dead letters even if there are none now.
        for table in tables.values():
            numbers = table.c[WINDOW_COLUMN]
            connection.execute(delete(table).where(numbers.between(self._window.first, self._window.last)))
        super()._merge(connection, written)


def _of_window(output: TableOutput, window: Window) -> TableOutput:
    """Add the column with the window's number to an output. Raises InvalidInput if the table lacks the column."""
    table = table_of(output)
    where = f"table {table.name}"
    if WINDOW_COLUMN not in table.c:
        raise InvalidInput(
            f"has no column {WINDOW_COLUMN}, which identifies a window's rows to replace; add "
            f'Column("{WINDOW_COLUMN}", BigInteger, nullable=False), and to its keys if it has any',
            field=where,
        )
    if WINDOW_COLUMN in output.rows.columns:
        raise InvalidInput(f"the rows have a column {WINDOW_COLUMN}; leave it out, it is filled in", field=where)
    rows = output.rows.withColumn(WINDOW_COLUMN, F.lit(window.first).cast("bigint"))
    return replace(output, rows=rows, keys=(*output.keys, WINDOW_COLUMN) if output.keys else ())
