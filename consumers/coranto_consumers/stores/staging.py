"""Stage tables: where tasks put their output rows before the driver's transaction merges them.

A task attempt stages under an id of its own, so that the driver merges the rows of exactly those attempts that Spark
declared successful. Everything else in a stage table is waste: rows of lost attempts, of transactions that died, of
owners that were fenced. It is deleted by fence, by whoever owns the consumer next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from psycopg import Copy, sql
from sqlalchemy import Connection, Dialect, MetaData, Table, delete, insert
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coranto_consumers.stores.engines import is_denied
from coranto_consumers.stores.merge import STAGE_COLUMNS, MergePlan, stage_table
from coranto_consumers.stores.sql import SqlStore

PREFIX = "coranto_stage_"


def stage_of(store: SqlStore, plan: MergePlan) -> Table:
    """The stage table of a plan, created when absent. Raises SqlStoreError."""
    stage = stage_table(
        plan, stage_name(plan, store.engine.dialect if store.is_mysql else None), unlogged=store.is_postgresql
    )
    store.create_tables(plan.table, stage)
    return stage


def stage_name(plan: MergePlan, dialect: Dialect | None = None) -> str:
    """A name that changes with the columns' types, so that a table of an earlier layout is not taken for this one.

    Types are named as `dialect` does, or else PostgreSQL's.
    """
    named: Dialect = dialect or postgresql.dialect()  # type: ignore[no-untyped-call]
    layout = [plan.table.fullname] + [f"{name} {plan.table.c[name].type.compile(named)}" for name in plan.columns]
    digest = hashlib.sha256("\n".join(layout).encode()).hexdigest()[:10]
    return f"{PREFIX}{plan.table.name[:24]}_{digest}"


def stage_tables(store: SqlStore, connection: Connection) -> list[Table]:
    """Every stage table there is, of any consumer. What only has the name of one is left out."""
    found = (Table(name, MetaData(), autoload_with=connection) for name in store.table_names(connection, PREFIX))
    return [table for table in found if set(STAGE_COLUMNS) <= set(table.c.keys())]


def delete_staged(connection: Connection, stage: Table, shard: str, *, below_fence: int) -> None:
    """Delete what a consumer staged under fences below `below_fence`."""
    shard_column, fence_column, _ = STAGE_COLUMNS
    connection.execute(delete(stage).where(stage.c[shard_column] == shard, stage.c[fence_column] < below_fence))


def delete_stale(store: SqlStore, connection: Connection, shard: str, fence: int) -> None:
    """Delete what dead or fenced instances of a consumer staged. Nothing will ever merge it.

    Tables that this consumer may not touch are another's, and hold nothing of it.
    """
    for stage in stage_tables(store, connection):
        try:
            with connection.begin_nested():
                delete_staged(connection, stage, shard, below_fence=fence)
        except DBAPIError as error:
            if not is_denied(error):
                raise


class StageWriter:
    """Writes one task attempt's rows. Leaving the context without an error makes them visible to the merge.

    PostgreSQL takes the attempt in one COPY. The others take each batch in a short transaction: SQLite has one writer
    at a time, and MariaDB ends a session that waits long for the next batch. Rows that an attempt wrote before it
    failed stay behind, and no merge asks for them.
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
            names = [sql.Identifier(name) for name in (*STAGE_COLUMNS, *self._columns)]
            statement = sql.SQL("COPY {} ({}) FROM STDIN").format(
                sql.Identifier(self._stage.name), sql.SQL(", ").join(names)
            )
            self._copy = self._exit.enter_context(cursor.copy(statement))
        return self

    def write(self, rows: Sequence[Mapping[str, object]]) -> int:
        """Stage rows given by column name; how many. Raises SqlStoreError."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._exit.__exit__(kind, error, trace)
