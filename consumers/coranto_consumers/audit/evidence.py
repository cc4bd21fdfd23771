"""Evidence in a store: checkpoints, fences, staged rows and query results, in one snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy import Connection, func, inspect, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coranto.errors import CorruptData
from coranto.messages import Checkpoint
from coranto_consumers.stores.engines import READS_ONLY, is_denied
from coranto_consumers.stores.merge import STAGE_COLUMNS
from coranto_consumers.stores.retired import Retired
from coranto_consumers.stores.sql import CHECKPOINTS, SqlStore
from coranto_consumers.stores.staging import stage_tables


@dataclass(frozen=True, slots=True)
class Row:
    """A shard's fence and checkpoint. `damage` is the reason why the checkpoint is unreadable; empty if it is readable.

    A `retired` shard has no checkpoint, and never runs again.
    """

    fence: int
    payload: bytes
    checkpoint: Checkpoint
    damage: str = ""
    retired: bool = False


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Rows that a shard staged under one fence."""

    table: str
    fence: int
    rows: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """A snapshot of a store's content for one consumer. Shards without a row are omitted."""

    rows: Mapping[str, Row] = field(default_factory=dict)
    staged: Mapping[str, Sequence[StagedRows]] = field(default_factory=dict)
    values: Sequence[object] = ()
    """The result of each query, or its error."""


class EvidenceSource(Protocol):
    """Source of the evidence about a consumer, such as its store."""

    @property
    def name(self) -> str:
        """The display name of the store."""
        ...

    def read(self, shards: Sequence[str], queries: Sequence[str]) -> Evidence:
        """Return the evidence about the shards, and the results of the queries. Blocks. Raises SqlStoreError."""
        ...


class SqlEvidence:
    """Evidence in a SQL store, read in one snapshot transaction."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    def names(self, prefix: str) -> list[str]:
        """Return the names of checkpoints that start with `prefix`, sorted. Raises SqlStoreError."""
        try:
            with self._snapshot() as connection:
                if not inspect(connection).has_table(CHECKPOINTS.name):
                    return []
                names = select(CHECKPOINTS.c.shard_fqn).where(
                    CHECKPOINTS.c.shard_fqn.startswith(prefix, autoescape=True)
                )
                return sorted(connection.execute(names).scalars())
        except SQLAlchemyError as error:
            raise self._store.failure("the audit could not read it", error) from error

    def read(self, shards: Sequence[str], queries: Sequence[str]) -> Evidence:
        try:
            with self._snapshot() as connection:
                if not inspect(connection).has_table(CHECKPOINTS.name):
                    return Evidence(values=[_value(connection, query) for query in queries])
                rows = connection.execute(
                    select(CHECKPOINTS.c.shard_fqn, CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint).where(
                        CHECKPOINTS.c.shard_fqn.in_(shards)
                    )
                ).all()
                found = {row.shard_fqn: _row(int(row.fence), bytes(row.checkpoint)) for row in rows}
                staged = self._staged(connection, shards)
                return Evidence(found, staged, [_value(connection, query) for query in queries])
        except SQLAlchemyError as error:
            raise self._store.failure("the audit could not read it", error) from error

    @contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        """Yield a connection in a snapshot transaction, which is rolled back."""
        options = {READS_ONLY: True}
        with self._store.engine.connect() as plain:
            if self._store.is_sqlite:
                connection = plain.execution_options(**options)
                connection.exec_driver_sql("PRAGMA query_only = ON")
            elif self._store.is_postgresql:
                connection = plain.execution_options(
                    **options, isolation_level="REPEATABLE READ", postgresql_readonly=True
                )
            else:
                connection = plain.execution_options(**options, isolation_level="REPEATABLE READ")
            yield connection
            connection.rollback()

    def _staged(self, connection: Connection, shards: Sequence[str]) -> dict[str, list[StagedRows]]:
        shard_column, fence_column, _ = STAGE_COLUMNS
        found: dict[str, list[StagedRows]] = {}
        for stage in stage_tables(self._store, connection):
            shard, fence = stage.c[shard_column], stage.c[fence_column]
            count = select(shard, fence, func.count()).where(shard.in_(shards)).group_by(shard, fence).order_by(fence)
            try:
                with connection.begin_nested():
                    rows = connection.execute(count).all()
            except DBAPIError as error:
                if not is_denied(error):
                    raise
                continue  # Only other consumers write to a table that this one may not read.
            for name, value, number in rows:
                found.setdefault(name, []).append(StagedRows(stage.name, int(value), int(number)))
        return found


def _row(fence: int, payload: bytes) -> Row:
    if Retired.from_bytes(payload) is not None:
        return Row(fence, payload, Checkpoint(), retired=True)
    try:
        return Row(fence, payload, Checkpoint.from_bytes(payload))
    except CorruptData as error:
        return Row(fence, payload, Checkpoint(), str(error))


def _value(connection: Connection, query: str) -> object:
    """Return the single value of a query, or an error."""
    try:
        with connection.begin_nested():
            result = connection.execute(text(query))
            if not result.returns_rows:
                return ValueError("it returns no rows")
            rows = result.fetchmany(2)
    except SQLAlchemyError as error:
        original = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        return ValueError(" ".join(str(original).split()))
    if len(rows) != 1 or len(rows[0]) != 1:
        return ValueError("it does not return exactly one row of one column")
    value: object = rows[0][0]
    return value
