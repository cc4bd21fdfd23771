"""The SQL store of a shard: the application's changes and the checkpoint are in one SQL transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Table, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coranto.errors import InvalidInput, RejectedRow, SqlStoreError
from coranto.messages.checkpoints import Checkpoint, Identity
from coranto_consumers.stores.base import Store
from coranto_consumers.stores.binding import Row, replace_surrogates
from coranto_consumers.stores.engines import is_transient
from coranto_consumers.stores.merge import MergePlan, MergeRule, plan_merge
from coranto_consumers.stores.rejections import rejection_of
from coranto_consumers.stores.row_buffer import RowBuffer
from coranto_consumers.stores.sql import SqlStore, StoreTransaction

if TYPE_CHECKING:
    import pyarrow as pa


class SqlShardStore(Store):
    """Tables of a SQL database, with the shard's checkpoint in the database's table `gazette_checkpoints`.

    `connection` belongs to the current transaction. The application must not commit it. Several shards may share the
    tables. A transaction sees all changes of the shard's earlier transactions: its SQL waits for their commits.
    Messages are read and sequenced in the meantime.

    `insert` is the fast way to add rows: they are buffered and written many at a time, and each statement of the
    transaction sees the rows that were inserted before it. `insert_batch` and `merge_batch` do the same for Arrow
    batches.

    If the outcome of a commit is unknown, it is determined from the stored fence and checkpoint. Conflicts of
    transactions and lost connections are transient: the shard restarts from its checkpoint.
    """

    def __init__(self, database: SqlStore | str, *tables: Table) -> None:
        """`tables` are created if they are absent."""
        self.database = SqlStore(database) if isinstance(database, str) else database
        self._tables = tables
        self._shard = ""
        self._fence = 0
        self._exits = ExitStack()
        self._open: StoreTransaction | None = None
        self._rows = RowBuffer()
        self._plans: dict[object, MergePlan] = {}
        self._commit: asyncio.Future[None] | None = None
        self._settled = threading.Event()
        self._settled.set()
        self._failure: Exception | None = None

    @property
    def connection(self) -> Connection:
        """The connection of the current transaction. Begins the transaction if necessary.

        For synchronous methods of an application. `async` methods call `await store.begin()` first. Raises Fenced when
        a later owner has fenced off this one, and SqlStoreError.
        """
        if self._open is None:
            if not self._settled.is_set():
                if _on_event_loop():
                    raise InvalidInput("call `await store.begin()` before using store.connection in an async method")
                self._settled.wait()
            self._begin()
            assert self._open is not None
        self._rows.flush(self._open.connection)
        return self._open.connection

    def insert(self, table: Table, row: Row) -> None:
        """Insert a row, given by column name, in the current transaction.

        Rows are buffered, and written before another statement of the transaction, at the commit, or when the buffer is
        full. Only then does the database check them, and raise its errors. Raises InvalidInput for a column that
        `table` lacks.
        """
        self._rows.add(table, row)
        self._write_many()

    def _write_many(self) -> None:
        """Write the buffered rows if the buffer is full."""
        if self._rows.is_full and (self._open is not None or not _on_event_loop()):
            _ = self.connection

    def insert_batch(self, table: Table, rows: pa.RecordBatch) -> None:
        """Insert the rows of an Arrow record batch as `insert` does. Its columns are columns of the table by name.

        In PostgreSQL, rows are written by COPY if that has the same result, if possible without a Python object per
        value.
        """
        self._rows.add_batch(table, rows)
        self._write_many()

    def merge_batch(
        self,
        table: Table,
        rows: pa.RecordBatch,
        keys: Sequence[str],
        merge: Mapping[str, MergeRule],
        delete: str = "",
    ) -> None:
        """Merge rows into a table by `keys`, which are unique in the table; `merge` has a rule for each other column.

        The rows are buffered like inserted rows, and merged in order with these: at the latest at the commit, while the
        shard consumes the next transaction.

        The rules come from `coranto_consumers.stores.merge`, as for Spark consumers: `Add`, `Max`, `Min`,
        `Replace`, `Quotient`. With `Replace`, a key may be in the rows only once. `delete` names an additional column
        of the rows: if it is true, the table's row with the same keys is deleted. Raises InvalidInput.
        """
        place = (table, tuple(rows.schema.names), tuple(keys), tuple(merge.items()), delete)
        plan = self._plans.get(place)
        if plan is None:
            plan = self._plans[place] = plan_merge(table, rows.schema.names, keys, merge, delete)
        self._rows.add_merge(plan, rows)
        self._write_many()

    async def begin(self) -> Connection:
        """Begin the current transaction if necessary, and return its connection.

        After a cancelled call the transaction may have begun; `destroy` rolls it back.
        """
        if self._open is None:
            if self._commit is not None:
                await asyncio.wait([self._commit])
            await asyncio.to_thread(self._begin)
        return self.connection

    async def restore_checkpoint(self, shard: str) -> Checkpoint:
        def restore() -> Checkpoint:
            self.database.create_tables(*self._tables)
            self.database.compare(*self._tables)
            self._fence, checkpoint = self.database.raise_fence(shard)
            return checkpoint

        self._shard = shard
        return await asyncio.to_thread(restore)

    async def start_commit(
        self, shard: str, checkpoint: Checkpoint, wait_for: Sequence[Awaitable[object]]
    ) -> Awaitable[None]:
        transaction, exits, rows = self._open, self._exits, self._rows
        self._open, self._exits, self._rows = None, ExitStack(), RowBuffer()
        self._settled.clear()
        self._commit = asyncio.ensure_future(self._complete(transaction, exits, rows, checkpoint, wait_for))
        return self._commit

    async def require_fence(self) -> None:
        await asyncio.to_thread(self.database.require_fence, self._shard, self._fence)

    async def destroy(self) -> None:
        if self._commit is not None:
            await asyncio.wait([self._commit])
        exits, self._open, self._exits, self._rows = self._exits, None, ExitStack(), RowBuffer()
        await asyncio.to_thread(_roll_back, exits)

    def rejection_of(self, error: BaseException) -> RejectedRow | None:
        if isinstance(error, SQLAlchemyError) and rejection_of(error) is not None:
            failure = self.database.failure("", error)
            assert isinstance(failure, RejectedRow)
            return failure
        return super().rejection_of(error)

    def identity(self) -> Identity:
        return Identity(
            outputs=frozenset(f"table {table.fullname}" for table in self._tables), store=self.database.location
        )

    def is_transient(self, error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return is_transient(error)
        return super().is_transient(error)

    def _begin(self) -> None:
        if self._failure is not None:
            # The failure of the last commit may not have been raised yet.
            raise self._failure
        exits, rows = ExitStack(), self._rows
        self._open = exits.enter_context(self.database.transaction(self._shard, self._fence))
        self._exits = exits

        def written_first(
            connection: Connection, _cursor: object, statement: str, parameters: Any, *_: object
        ) -> tuple[str, Any]:
            rows.flush(connection)  # The application's statement may read the buffered rows.
            return statement, replace_surrogates(parameters)

        event.listen(self._open.connection, "before_cursor_execute", written_first, retval=True)

    async def _complete(
        self,
        transaction: StoreTransaction | None,
        exits: ExitStack,
        rows: RowBuffer,
        checkpoint: Checkpoint,
        wait_for: Sequence[Awaitable[object]],
    ) -> None:
        def commit() -> None:
            with exits:
                begun = transaction
                if begun is None:
                    begun = exits.enter_context(self.database.transaction(self._shard, self._fence))
                rows.flush(begun.connection)
                begun.commit(checkpoint)

        try:
            for awaited in wait_for:
                await awaited
            # Work in a thread cannot be cancelled, so a cancelled caller waits for its end.
            working = asyncio.ensure_future(asyncio.to_thread(commit))
            try:
                await asyncio.shield(working)
            except asyncio.CancelledError:
                await asyncio.wait([working])
                raise
        except BaseException as error:
            given_up = SqlStoreError(f"the last commit of {self._shard} was abandoned; the shard has to restart")
            self._failure = error if isinstance(error, Exception) else given_up
            await asyncio.to_thread(_roll_back, exits)
            raise
        finally:
            self._settled.set()


def _roll_back(exits: ExitStack) -> None:
    try:
        exits.close()
    except (SQLAlchemyError, SqlStoreError):
        return  # The connection is broken, and the transaction with it.


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
