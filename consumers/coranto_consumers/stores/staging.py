"""Stage tables. Tasks put their output rows there, and the driver's transaction merges them.

A task attempt stages rows under an id of its own, so that the driver merges exactly the rows of attempts that Spark
declared successful. All other rows are waste: rows of lost attempts, failed transactions and fenced owners. The next
owner of the consumer deletes them by fence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Column, Connection, Dialect, MetaData, Table, delete, insert, inspect, select
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import CreateTable

from coranto_consumers.stores.copying import can_copy, copy_into, copy_statement, copy_text
from coranto_consumers.stores.engines import is_denied
from coranto_consumers.stores.merge import STAGE_COLUMNS, MergePlan, merge_staged, stage_table
from coranto_consumers.stores.sql import SqlStore

if TYPE_CHECKING:
    from psycopg import Copy

PREFIX = "coranto_stage_"
_TEXT_BYTES = 64 << 20
"""The number of bytes of columns that are made text at once: Arrow's texts end at 2 GiB."""


def stage_of(store: SqlStore, plan: MergePlan, tables: Sequence[Table] | None = None) -> Table:
    """Return the stage table of a plan, and create it if absent, with `tables` or else the plan's table.

    Raises SqlStoreError, and InvalidInput for tables that the store cannot have.
    """
    name = stage_name(plan, store.engine.dialect if store.is_mysql else None)
    stage = stage_table(plan, name, prefixes=["UNLOGGED"] if store.is_postgresql else [])
    store.create_tables(*([plan.table] if tables is None else tables), stage)
    return stage


def stage_name(plan: MergePlan, dialect: Dialect | None = None) -> str:
    """Return the name of a plan's stage table. It depends on the columns' types, so a table of another layout differs.

    Types have the names of `dialect`, or PostgreSQL's without one.
    """
    named: Dialect = dialect or postgresql.dialect()  # type: ignore[no-untyped-call]
    layout = [plan.table.fullname] + [f"{name} {plan.table.c[name].type.compile(named)}" for name in plan.columns]
    layout += [f"delete {plan.delete}"] if plan.delete else []
    digest = hashlib.sha256("\n".join(layout).encode()).hexdigest()[:10]
    return f"{PREFIX}{plan.table.name[:24]}_{digest}"


def stage_tables(store: SqlStore, connection: Connection) -> list[Table]:
    """Return the stage tables of all consumers. Other tables with such a name are left out."""
    if not (names := store.table_names(connection, PREFIX)):
        return []
    # At once: to reflect them one by one takes 10 ms each.
    found = inspect(connection).get_multi_columns(filter_names=names)
    tables = [
        Table(name, MetaData(), *(Column(each["name"], each["type"]) for each in columns))
        for (_, name), columns in sorted(found.items())
    ]
    return [table for table in tables if set(STAGE_COLUMNS) <= set(table.c.keys())]


def delete_staged(connection: Connection, stage: Table, shard: str, *, below_fence: int) -> None:
    """Delete rows that a consumer staged under fences below `below_fence`."""
    shard_column, fence_column, _ = STAGE_COLUMNS
    connection.execute(delete(stage).where(stage.c[shard_column] == shard, stage.c[fence_column] < below_fence))


def delete_stale(store: SqlStore, connection: Connection, shard: str, fence: int) -> None:
    """Delete rows that dead or fenced instances of a consumer staged. Nothing will ever merge them."""
    _in_stages(store, connection, lambda stage: delete_staged(connection, stage, shard, below_fence=fence))


def delete_shards(store: SqlStore, connection: Connection, gone: Callable[[str], bool]) -> None:
    """Delete all rows of consumers that `gone` says no longer exist."""

    def work(stage: Table) -> None:
        column = stage.c[STAGE_COLUMNS[0]]
        for shard in connection.execute(select(column).distinct()).scalars().all():
            if gone(shard):
                connection.execute(delete(stage).where(column == shard))

    _in_stages(store, connection, work)


def _in_stages(store: SqlStore, connection: Connection, work: Callable[[Table], None]) -> None:
    """Do something in all stage tables.

    Tables that this consumer may not access belong to other consumers, and hold no rows of this one.
    """
    for stage in stage_tables(store, connection):
        try:
            with connection.begin_nested():
                work(stage)
        except DBAPIError as error:
            if not is_denied(error):
                raise


def can_copy_all(batch: Any, table: Table) -> bool:
    """Return True if all columns of an Arrow record batch can be copied into those of a table as text."""
    return all(can_copy(field.type, table.c[field.name]) for field in batch.schema)


def write_in_transaction(connection: Connection, table: Table, batch: Any, owner: Sequence[object] = ()) -> None:
    """Write the rows of an Arrow record batch into a table, as part of a transaction.

    `owner` has the values of `STAGE_COLUMNS` if the table is a stage. PostgreSQL has to be able to copy all columns
    (`can_copy_all`). Raises the database's errors as SQLAlchemy does.
    """
    if not batch.num_rows:
        return
    owners = dict(zip(STAGE_COLUMNS, owner, strict=True)) if owner else {}
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), [{**owners, **row} for row in batch.to_pylist()])
        return
    names = batch.schema.names
    for part in _parts(batch):
        columns = [part.column(name) for name in names]
        copy_into(connection, table, (*owners, *names), copy_text(owner, columns))


def merge_in_transaction(connection: Connection, plan: MergePlan, *batches: Any) -> None:
    """Merge the rows of Arrow record batches, all of one schema, into a plan's table, as part of a transaction.

    They are staged in a table of the session, which nobody else sees. Raises as `merge_staged` does, and the database's
    errors as SQLAlchemy does.
    """
    batches = tuple(batch for batch in batches if batch.num_rows)
    if not batches:
        return
    stage = stage_table(plan, stage_name(plan) + "_own", prefixes=["TEMPORARY"], on_commit="DROP")
    connection.execute(CreateTable(stage, if_not_exists=True))
    owner = ("", 0, "")
    for batch in batches:
        if connection.dialect.name != "postgresql" or can_copy_all(batch, stage):
            write_in_transaction(connection, stage, batch, owner)
        else:
            owners = dict(zip(STAGE_COLUMNS, owner, strict=True))
            connection.execute(insert(stage), [{**owners, **row} for row in batch.to_pylist()])
    merge_staged(connection, plan, stage, (owner[-1],), sum(batch.num_rows for batch in batches))
    connection.execute(delete(stage))


def _parts(batch: Any) -> Iterator[Any]:
    """Yield the rows of a record batch in parts that are not too large to be made text at once."""
    if batch.nbytes > _TEXT_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))
    else:
        yield batch


class StageWriter:
    """Writes one task attempt's rows. Leaving the context without an error makes them visible to the merge.

    PostgreSQL takes all rows of an attempt in one COPY. The other databases take each batch in a short transaction:
    SQLite has one writer at a time, and MariaDB ends a session that waits long for the next batch. Rows that an attempt
    wrote before it failed stay in the table, and no merge uses them.
    """

    def __init__(self, url: str, stage: Table, shard: str, fence: int, attempt: str) -> None:
        self._store = SqlStore(url)
        self._stage = stage
        self._owner = (shard, fence, attempt)
        self._columns = [name for name in stage.c.keys() if name not in STAGE_COLUMNS]  # noqa: SIM118
        self._exit = ExitStack()
        self._copy: Copy | None = None

    def __enter__(self) -> Self:
        if self._store.is_postgresql:
            connection = self._store.engine.raw_connection()
            self._exit.callback(connection.close)
            driver: Any = connection.driver_connection
            self._exit.enter_context(driver.transaction())
            cursor = self._exit.enter_context(driver.cursor())
            statement = copy_statement(self._stage, (*STAGE_COLUMNS, *self._columns))
            self._copy = self._exit.enter_context(cursor.copy(statement))
        return self

    def write(self, rows: Sequence[Mapping[str, object]]) -> int:
        """Stage rows, given by column name, and return their number. Raises SqlStoreError."""
        if self._copy is not None:
            for row in rows:
                self._copy.write_row((*self._owner, *(row[name] for name in self._columns)))
        elif rows:
            owner = dict(zip(STAGE_COLUMNS, self._owner, strict=True))
            try:
                with self._store.engine.begin() as connection:
                    connection.execute(insert(self._stage), [{**owner, **row} for row in rows])
            except SQLAlchemyError as error:
                raise self._store.failure(f"rows for {self._stage.name} could not be staged", error) from error
        return len(rows)

    def write_batch(self, batch: Any) -> int:
        """Stage the rows of an Arrow record batch, and return their number. Raises SqlStoreError.

        Where COPY and the columns' types allow it, no Python object is made of any value.
        """
        if not batch.num_rows:
            return 0
        if self._copy is None or not can_copy_all(batch, self._stage):
            return self.write(batch.to_pylist())
        for part in _parts(batch):
            self._copy.write(memoryview(copy_text(self._owner, [part.column(name) for name in self._columns])))
        return int(batch.num_rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._exit.__exit__(kind, error, trace)
