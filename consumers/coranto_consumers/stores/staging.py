"""Stage tables. Tasks write their output rows to them, and the driver's transaction merges the rows.

Each task attempt stages rows under its own id, so that the driver merges exactly the rows of attempts that Spark
reports as successful. All other rows are garbage: rows of lost attempts, failed transactions and fenced owners. The
next owner of the consumer deletes them by fence.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Column, Connection, Dialect, MetaData, Table, delete, insert, inspect, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.schema import CreateTable

from coranto.errors import InvalidInput
from coranto_consumers.stores.binding import bound_rows, can_bind, replace_row_surrogates, require_times, rows_of
from coranto_consumers.stores.copying import can_copy, copy_text, copying
from coranto_consumers.stores.engines import is_denied
from coranto_consumers.stores.merge import STAGE_COLUMNS, MergePlan, Quotient, merge_staged, stage_table
from coranto_consumers.stores.rejections import described
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.targets import require_target

if TYPE_CHECKING:
    from psycopg import Copy

PREFIX = "coranto_stage_"
_MAY_STAGE = "SELECT has_database_privilege(current_database(), 'TEMPORARY')"
_TEXT_BYTES = 64 << 20
"""The maximum bytes of columns that are converted to text together: Arrow's strings are limited to 2 GiB."""


def stage_of(store: SqlStore, plan: MergePlan, tables: Sequence[Table] | None = None) -> Table:
    """Return the stage table of a plan. Create it, and `tables` (by default the plan's table), if absent.

    Raises SqlStoreError, and InvalidInput for tables that the store does not support.
    """
    name = stage_name(plan, store.engine.dialect if store.is_mysql else None)
    stage = stage_table(plan, name, prefixes=["UNLOGGED"] if store.is_postgresql else [])
    store.create_tables(*([plan.table] if tables is None else tables), stage)
    return stage


def compare_plan(store: SqlStore, plan: MergePlan, stage: Table) -> None:
    """Raise InvalidInput for a table that cannot store a plan's rows, or that the database role may not write.

    Runs the plan's statements without rows, in a transaction that is rolled back. Raises SqlStoreError.
    """
    computed = [name for name, rule in plan.rules.items() if isinstance(rule, Quotient)]
    try:
        with store.engine.connect() as connection:
            require_target(connection, plan.table, [*plan.columns, *computed])
            merge_staged(connection, plan, stage, ("",), 0)
            delete_staged(connection, stage, "", below_fence=0)
            if plan.keys and store.is_postgresql and not connection.execute(text(_MAY_STAGE)).scalar_one():
                raise InvalidInput(
                    f"{store.name}: {store.engine.url.username} may not create temporary tables, which stage few rows "
                    f"of a transaction: GRANT TEMPORARY ON DATABASE {store.engine.url.database} TO that user",
                    field="store_url",
                )
    except SQLAlchemyError as error:
        if isinstance(error, DBAPIError) and is_denied(error):
            raise InvalidInput(
                f"{store.name}: {store.engine.url.username} may not read and write it ({described(error)}): GRANT "
                f"SELECT, INSERT, UPDATE, DELETE ON {plan.table.fullname} TO that user, and on {stage.name}",
                field=f"table {plan.table.name}",
            ) from error
        raise store.failure(f"table {plan.table.name} could not be compared with its rows", error) from error


def stage_name(plan: MergePlan, dialect: Dialect | None = None) -> str:
    """Return the name of a plan's stage table. It depends on the columns and types, so each layout has its own table.

    The types have their names in `dialect`, by default in PostgreSQL.
    """
    named: Dialect = dialect or postgresql.dialect()  # type: ignore[no-untyped-call]
    layout = [plan.table.fullname] + [f"{name} {plan.table.c[name].type.compile(named)}" for name in plan.columns]
    layout += [f"delete {plan.delete}"] if plan.delete else []
    digest = hashlib.sha256("\n".join(layout).encode()).hexdigest()[:10]
    # Databases limit names by bytes, and this name becomes part of others.
    short = plan.table.name.encode()[:24].decode(errors="ignore")
    return f"{PREFIX}{short}_{digest}"


def stage_tables(store: SqlStore, connection: Connection) -> list[Table]:
    """Return the stage tables of all consumers. Other tables with the same prefix are left out."""
    if not (names := store.table_names(connection, PREFIX)):
        return []
    # Reflected together, because reflecting one table takes 10 ms.
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
    """Delete rows that earlier instances of a consumer staged, under fences below `fence`. They are never merged."""
    _in_stages(store, connection, lambda stage: delete_staged(connection, stage, shard, below_fence=fence))


def delete_shards(store: SqlStore, connection: Connection, gone: Callable[[str], bool]) -> None:
    """Delete all rows of consumers that `gone` accepts."""

    def work(stage: Table) -> None:
        column = stage.c[STAGE_COLUMNS[0]]
        for shard in connection.execute(select(column).distinct()).scalars().all():
            if gone(shard):
                connection.execute(delete(stage).where(column == shard))

    _in_stages(store, connection, work)


def _in_stages(store: SqlStore, connection: Connection, work: Callable[[Table], None]) -> None:
    """Call `work` for all stage tables.

    Skips tables that the database role may not access: they belong to other consumers, and have no rows of this one.
    """
    for stage in stage_tables(store, connection):
        try:
            with connection.begin_nested():
                work(stage)
        except DBAPIError as error:
            if not is_denied(error):
                raise


def write_in_transaction(connection: Connection, table: Table, batch: Any, owner: Sequence[object] = ()) -> None:
    """Write the rows of an Arrow record batch into a table, as part of a transaction.

    `owner` has the values of `STAGE_COLUMNS` if the table is a stage table. Raises the database's errors as SQLAlchemy
    does, InvalidInput for nested values in a column that cannot store them, and RejectedRow for values that a column's
    type cannot bind.
    """
    if not batch.num_rows:
        return
    names = batch.schema.names
    if (method := _method_of(connection.dialect, table, batch)) is not _Method.INSERTED:
        with copying(connection, table, (*STAGE_COLUMNS, *names) if owner else names) as copy:
            _copy_batch(copy, table, batch, owner, method, connection.dialect)
    else:
        owners = dict(zip(STAGE_COLUMNS, owner, strict=True)) if owner else {}
        connection.execute(insert(table), [{**owners, **row} for row in rows_of(batch, table, connection.dialect)])


class _Method(enum.Enum):
    """The method of writing a batch's rows to a table."""

    TEXT = "COPY, of text that is made of whole columns"
    BOUND = "COPY, of values that the columns' types have bound"
    INSERTED = "INSERT"


def _method_of(dialect: Dialect, table: Table, batch: Any) -> _Method:
    if dialect.name != "postgresql":
        return _Method.INSERTED
    fields = [(field.type, table.c[field.name]) for field in batch.schema]
    if all(can_copy(kind, column, dialect) for kind, column in fields):
        return _Method.TEXT
    return _Method.BOUND if all(can_bind(kind, column, dialect) for kind, column in fields) else _Method.INSERTED


def _copy_batch(
    copy: Copy, table: Table, batch: Any, owner: Sequence[object], method: _Method, dialect: Dialect
) -> None:
    if method is _Method.TEXT:
        require_times(batch, table)
        for part in _parts(batch):
            copy.write(memoryview(copy_text(owner, part.columns)))
        return
    columns = [table.c[name] for name in batch.schema.names]
    for row in bound_rows(rows_of(batch, table, dialect), columns, dialect):
        copy.write_row((*owner, *row))


def merge_in_transaction(connection: Connection, plan: MergePlan, *batches: Any) -> None:
    """Merge the rows of Arrow record batches, all with one schema, into a plan's table, as part of a transaction.

    The rows are staged in a temporary table. Raises as `merge_staged` does, and the database's errors as SQLAlchemy
    does.
    """
    batches = tuple(batch for batch in batches if batch.num_rows)
    if not batches:
        return
    stage = stage_table(plan, stage_name(plan) + "_own", prefixes=["TEMPORARY"], on_commit="DROP")
    connection.execute(CreateTable(stage, if_not_exists=True))
    connection.execute(delete(stage))  # Rows of an earlier merge in the transaction.
    owner = ("", 0, "")
    for batch in batches:
        write_in_transaction(connection, stage, batch, owner)
    merge_staged(connection, plan, stage, (owner[-1],), sum(batch.num_rows for batch in batches))


def _parts(batch: Any) -> Iterator[Any]:
    """Split a record batch into parts that are small enough for conversion to text."""
    if batch.nbytes > _TEXT_BYTES and batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half))
        yield from _parts(batch.slice(half))
    else:
        yield batch


class StageWriter:
    """Stages one task attempt's rows. Leaving the context without an error makes them visible to the merge.

    In PostgreSQL, all rows of an attempt are written by one COPY. In other databases, each batch is written in a short
    transaction: SQLite has one writer at a time, and MariaDB ends a session that waits too long for the next batch.
    Rows that an attempt wrote before it failed stay in the table, but are never merged.
    """

    def __init__(self, url: str, stage: Table, shard: str, fence: int, attempt: str) -> None:
        self._store = SqlStore(url)
        self._stage = stage
        self._owner = (shard, fence, attempt)
        self._exit = ExitStack()
        self._connection: Connection | None = None
        self._copy: tuple[Copy, _Method] | None = None

    def __enter__(self) -> Self:
        if self._store.is_postgresql:
            with self._failures():
                self._connection = self._exit.enter_context(self._store.engine.begin())
        return self

    def write(self, rows: Sequence[Mapping[str, object]]) -> int:
        """Stage rows, given by column name, and return their number. Raises SqlStoreError and RejectedRow."""
        owner = dict(zip(STAGE_COLUMNS, self._owner, strict=True))
        if rows:
            with self._failures(), self._writing() as connection:
                connection.execute(insert(self._stage), [{**owner, **replace_row_surrogates(row)} for row in rows])
        return len(rows)

    def write_batch(self, batch: Any) -> int:
        """Stage the rows of an Arrow record batch, and return their number.

        All batches have one schema. If COPY and the columns' types allow it, no Python object is created per value.
        Raises SqlStoreError, RejectedRow for a row that the database rejects, and InvalidInput for nested values in a
        column that cannot store them.
        """
        if not batch.num_rows:
            return 0
        dialect = self._store.engine.dialect
        with self._failures():
            if self._copy is None and (method := _method_of(dialect, self._stage, batch)) is not _Method.INSERTED:
                assert self._connection is not None
                names = (*STAGE_COLUMNS, *batch.schema.names)
                copy = self._exit.enter_context(copying(self._connection, self._stage, names))
                self._copy = copy, method
            if self._copy is not None:
                copy, method = self._copy
                _copy_batch(copy, self._stage, batch, self._owner, method, dialect)
            else:
                with self._writing() as connection:
                    write_in_transaction(connection, self._stage, batch, self._owner)
        return int(batch.num_rows)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with self._failures():
            return self._exit.__exit__(kind, error, trace)

    def _writing(self) -> AbstractContextManager[Connection]:
        return self._store.engine.begin() if self._connection is None else nullcontext(self._connection)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            what = f"rows for {self._stage.name} could not be staged"
            raise self._store.failure(what, error) from self._store.cause(error)
