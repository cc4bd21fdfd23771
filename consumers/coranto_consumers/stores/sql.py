"""The SQL store: a consumer's tables and its checkpoint, committed together under a fence.

Every consumer owns one row of the table `gazette_checkpoints` (`shard_fqn`, `fence`, `checkpoint`), which has the
layout of Gazette's SQL store. Starting a consumer raises the row's fence. A commit updates the row only if the fence
still has the value that this owner raised it to. If a later owner has raised it again, nothing is updated, the
transaction rolls back, and the former owner stops (seed 002, "Store Fencing").

If a connection breaks during a commit, the outcome is unknown. The store determines it by reading the row back, after
it has waited for the lock of the broken transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import structlog
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    Table,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from coranto.client.retry import RetryPolicy
from coranto.errors import (
    CommitOutcomeUnknown,
    CorantoError,
    CorruptData,
    Fenced,
    InvalidInput,
    RejectedRow,
    SqlStoreError,
)
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.stores.durability import RELAXED, commit_durably, risks
from coranto_consumers.stores.engines import READS_ONLY, is_denied, is_transient, open_engine, was_rolled_back
from coranto_consumers.stores.fencing import Restored, fenced_off
from coranto_consumers.stores.mysql import GUARDED, NAME, create_tables
from coranto_consumers.stores.rejections import SHOW_VALUES, described, rejection_of
from coranto_consumers.stores.retired import checkpoint_of
from coranto_consumers.stores.targets import require_target
from coranto_consumers.stores.urls import display_url, location_of, parse_store_url

CHECKPOINTS = Table(
    "gazette_checkpoints",
    MetaData(),
    Column("shard_fqn", NAME, primary_key=True),
    Column("fence", Integer, nullable=False),
    Column("checkpoint", LargeBinary, nullable=False),
)

_log = structlog.get_logger(__name__)

_RESOLVING = RetryPolicy(timeout=20.0)
_CONFLICTS = RetryPolicy(timeout=2.0, scale=0.2)
_DDL_LOCK = 0x636F72616E746F  # An arbitrary number, the same in all processes: "coranto".


class StoreTransaction:
    """The open SQL transaction of a consumer transaction. Use `connection` for its effects, then `commit` once."""

    def __init__(self, store: SqlStore, connection: Connection, shard: str, fence: int) -> None:
        self._store = store
        self.connection = connection
        self._shard = shard
        self._fence = fence
        self.committed = False

    def commit(self, checkpoint: Checkpoint) -> None:
        """Commit all effects and `checkpoint`. On return they are durable.

        Raises Fenced when a later owner has raised the fence (nothing was committed), SqlStoreError when the database
        rejected the commit (nothing was committed), and CommitOutcomeUnknown when the outcome could not be determined.
        """
        payload = checkpoint.to_bytes()
        try:
            commit_durably(self.connection)
            updated = self.connection.execute(
                update(CHECKPOINTS)
                .where(CHECKPOINTS.c.shard_fqn == self._shard, CHECKPOINTS.c.fence == self._fence)
                .values(checkpoint=payload)
            )
        except SQLAlchemyError as error:
            raise self._store.failure("checkpoint could not be written", error) from error
        if updated.rowcount != 1:
            raise self._store.fenced(self.connection, self._shard, self._fence)
        try:
            self._store.do_commit(self.connection)
        except SQLAlchemyError as error:
            # Locks that the connection still holds must not block the lookup.
            with suppress(SQLAlchemyError):
                self.connection.invalidate()
            if rejection_of(error) is not None:  # A deferred constraint rejected the commit.
                raise self._store.failure("the commit failed", error) from self._store.cause(error)
            self._store.resolve_commit(self._shard, self._fence, payload, error)
        self.committed = True


class SqlStore:
    """Tables and checkpoints in a SQLite file, or a database of PostgreSQL, MariaDB or MySQL.

    `commit` and `sleep` are for tests, to break a commit and to avoid waiting.
    """

    def __init__(
        self,
        url: str,
        *,
        commit: Callable[[Connection], None] = Connection.commit,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parsed = parse_store_url(url)
        self._may_lose = RELAXED in parsed.query
        self.shows_values = SHOW_VALUES in parsed.query
        """True if errors quote values of rows."""
        self.url = parsed.render_as_string(hide_password=False)
        """The URL with its password, to pass to executors. Never print it."""
        self.name = display_url(parsed)
        """The URL without its password, for display."""
        self.location = location_of(parsed)
        """The location of the database. A checkpoint records it, to detect a copied checkpoint."""
        self.engine: Engine = open_engine(parsed.difference_update_query([RELAXED, SHOW_VALUES]))
        self.do_commit = commit
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"SqlStore({self.name})"

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @property
    def is_postgresql(self) -> bool:
        return self.engine.dialect.name == "postgresql"

    @property
    def is_mysql(self) -> bool:
        """True if the database is MariaDB or MySQL."""
        return self.engine.dialect.name == "mysql"

    def create_tables(self, *tables: Table) -> None:
        """Create the checkpoint table and `tables` if they are absent.

        Raises SqlStoreError, and InvalidInput for missing privileges and for tables that MariaDB or MySQL do not
        support.
        """
        try:
            if self.is_mysql:
                create_tables(self.engine, (CHECKPOINTS, *tables))
                return
            with self.engine.begin() as connection:
                if self.is_postgresql:
                    # If two sessions run CREATE TABLE IF NOT EXISTS concurrently, one of them fails.
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _DDL_LOCK})
                for table in (CHECKPOINTS, *tables):
                    table.create(connection, checkfirst=True)
        except SQLAlchemyError as error:
            if isinstance(error, DBAPIError) and is_denied(error):
                raise self._may_not_create(tables) from error
            raise self.failure("tables could not be created", error) from error

    def _may_not_create(self, tables: Sequence[Table]) -> InvalidInput:
        names = ", ".join(table.fullname for table in (CHECKPOINTS, *tables))
        grant = "CREATE ON SCHEMA public" if self.is_postgresql else f"CREATE, INDEX ON {self.engine.url.database}.*"
        return InvalidInput(
            f"{self.name}: {self.engine.url.username} may not create one of the tables {names}. A consumer needs its "
            f"checkpoint table, and a stage table for each table that it writes: GRANT {grant} TO that user, or create "
            "the tables as another user and grant access to them",
            field="store_url",
        )

    def compare(self, *tables: Table) -> None:
        """Raise InvalidInput for a table of the database that cannot store rows of its definition.

        Raises SqlStoreError.
        """
        try:
            with self.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                for table in tables:
                    require_target(connection, table)
        except SQLAlchemyError as error:
            raise self.failure("tables could not be compared", error) from error

    def table_names(self, connection: Connection, prefix: str) -> list[str]:
        """Return the names of tables in the default schema that start with `prefix`, sorted."""
        return sorted(name for name in inspect(connection).get_table_names() if name.startswith(prefix))

    def raise_fence(self, shard: str) -> Restored:
        """Raise the fence of a consumer. Return the fence and the last committed checkpoint.

        On return no earlier owner can commit. Raises SqlStoreError, and InvalidInput for a retired consumer, and when
        the server may lose committed transactions because of its settings, unless the URL allows that.
        """
        return self.raise_fence_with(shard, lambda connection, restored: None)

    def raise_fence_with(self, shard: str, work: Callable[[Connection, Restored], None]) -> Restored:
        """Raise the fence, and call `work` in the same transaction. Return the fence and the last committed checkpoint.

        `work` gets the transaction's connection, and the same fence and checkpoint. Raises as `raise_fence` does, and
        the errors of `work`; then nothing has changed.
        """
        if not shard:
            raise InvalidInput("a consumer needs a name; it is the identity that fences it; give one", field="shard")
        self._require_durability()
        self.create_tables()
        for wait in (*_CONFLICTS.waits(), None):
            try:
                with self.engine.begin() as connection:
                    restored = raise_fence_in(connection, shard)
                    work(connection, restored)
                    return restored
            except SQLAlchemyError as error:
                # Processes that raise the fence concurrently may conflict, in databases that detect conflicts late.
                if wait is None or not isinstance(error, DBAPIError) or not was_rolled_back(error):
                    raise self.failure(f"the fence of {shard} could not be raised", error) from error
                self._sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _require_durability(self) -> None:
        try:
            with self.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                found = risks(connection)
        except SQLAlchemyError as error:
            raise self.failure("the server's settings could not be read", error) from error
        if not found:
            return
        what = "a crash of the server's machine may lose committed checkpoints, and acknowledged messages come twice"
        if not self._may_lose:
            raise InvalidInput(
                f"{self.name}: {what}. {'; '.join(found)}. Add {RELAXED}=true to the URL to use the server as it is",
                field="store_url",
            )
        _log.warning("sql_store.not_durable", store=self.name, settings=found)

    def read(self, shard: str) -> Restored | None:
        """Return a consumer's fence and checkpoint without raising the fence. None if the consumer never started.

        Raises InvalidInput for a retired consumer, and SqlStoreError.
        """
        try:
            with self.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                if not inspect(connection).has_table(CHECKPOINTS.name):
                    return None
                return row_of(connection, shard)
        except SQLAlchemyError as error:
            raise self.failure(f"the checkpoint of {shard} could not be read", error) from error

    def names(self) -> list[str]:
        """Return the names of all consumers with a checkpoint, sorted. Raises SqlStoreError."""
        try:
            with self.engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                if not inspect(connection).has_table(CHECKPOINTS.name):
                    return []
                return sorted(connection.execute(select(CHECKPOINTS.c.shard_fqn)).scalars())
        except SQLAlchemyError as error:
            raise self.failure("the names of consumers could not be read", error) from error

    @contextmanager
    def transaction(self, shard: str, fence: int) -> Iterator[StoreTransaction]:
        """Begin a transaction of the owner of `fence`. Leaving the block without `commit` rolls it back.

        Raises Fenced if a later owner has raised the fence (`commit` checks again), InvalidInput for a retired
        consumer, and SqlStoreError for failures of the database in the block.
        """
        try:
            with self.engine.connect().execution_options(**{GUARDED: True}) as connection:
                found = row_of(connection, shard)
                if found is None or found.fence != fence:
                    raise fenced_off(shard, fence, found)
                yield StoreTransaction(self, connection, shard, fence)
        except SQLAlchemyError as error:
            raise self.failure(f"a transaction of {shard} failed", error) from self.cause(error)

    def resolve_commit(self, shard: str, fence: int, payload: bytes, cause: SQLAlchemyError) -> None:
        """Find out if `payload` was committed, and return if it was.

        Raises Fenced when a later owner has raised the fence, SqlStoreError when nothing was committed, and
        CommitOutcomeUnknown when the database does not answer.
        """
        for wait in (*_RESOLVING.waits(), None):
            try:
                with self.engine.begin() as connection:
                    row = connection.execute(_locked(shard)).one()
            except DBAPIError as error:
                if wait is None:
                    raise CommitOutcomeUnknown(
                        f"store {self.name}: the commit of {shard} broke ({described(cause)}) and the store has not "
                        f"answered since ({described(error)}). Start the consumer again: it continues after the last "
                        "commit."
                    ) from cause
                self._sleep(wait)
                continue
            if bytes(row.checkpoint) == payload:
                return
            if row.fence != fence:
                raise Fenced(
                    f"consumer {shard}: the commit broke ({described(cause)}) and fence {fence} was raised by a later "
                    "owner since; stop this one"
                ) from cause
            raise self.failure(f"the commit of {shard} was not applied", cause) from cause

    def resume(self, shard: str, fence: int) -> Checkpoint:
        """Return the last committed checkpoint of the owner of `fence`, once no commit of this owner is in progress.

        It does not raise the fence. Raises Fenced if a later owner has raised it, CorruptData if the database has a
        lower fence, and thus has lost commits, and SqlStoreError.
        """
        try:
            with self.engine.begin() as connection:
                row = connection.execute(_locked(shard)).one_or_none()
        except SQLAlchemyError as error:
            raise self.failure(f"the checkpoint of {shard} could not be read again", error) from error
        found = 0 if row is None else int(row.fence)
        if row is None or found < fence:
            raise CorruptData(
                f"store {self.name}: consumer {shard} has raised fence {fence}, and the database has {found}. It lost "
                "commits, as in a failover to a server that lacks them. Start the consumer again: it continues from "
                "the existing checkpoint, and later publications are repeated"
            )
        checkpoint = checkpoint_of(shard, bytes(row.checkpoint))
        if found > fence:
            raise fenced_off(shard, fence, Restored(found, checkpoint))
        return checkpoint

    def require_fence(self, shard: str, fence: int) -> None:
        """Raise Fenced if a later owner has raised the fence of a consumer above `fence`. Raises SqlStoreError."""
        found = self.read(shard)
        if found is not None and found.fence > fence:
            raise fenced_off(shard, fence, found)

    def fenced(self, connection: Connection, shard: str, fence: int) -> Fenced:
        """Return the error for an owner whose fence was raised by a later one, with the reason if known."""
        try:
            return fenced_off(shard, fence, row_of(connection, shard))
        except (CorantoError, SQLAlchemyError):
            return fenced_off(shard, fence, None)

    def failure(self, what: str, error: SQLAlchemyError) -> SqlStoreError:
        """Convert an error of the database: to RejectedRow if the database rejected a row, else to SqlStoreError.

        The result is retriable if the database's error is transient. It has no values of rows, unless the URL sets
        `show_row_values=true`.
        """
        if (rejected := rejection_of(error, shows_values=self.shows_values)) is not None:
            return RejectedRow(f"store {self.name}: {rejected.problem}")
        said = described(error, shows_values=self.shows_values)
        return SqlStoreError(f"store {self.name}: {what}: {said}", retriable=is_transient(error))

    def cause(self, error: BaseException) -> BaseException | None:
        """Return `error` as the cause of a `failure`, or None if tracebacks would then print values of rows."""
        return None if rejection_of(error) is not None and not self.shows_values else error


def _locked(shard: str) -> Select[tuple[int, bytes]]:
    """Return the locking query for a consumer's row. It waits until a broken transaction has ended."""
    found = select(CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint).where(CHECKPOINTS.c.shard_fqn == shard)
    return found.with_for_update()


def check_deferred(connection: Connection) -> None:
    """Make PostgreSQL check deferred constraints now. SQLite checks them only at the commit."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")


def raise_fence_in(connection: Connection, shard: str) -> Restored:
    """Raise the fence of a consumer in this transaction, and return its row, which stays locked."""
    commit_durably(connection)
    row = {"shard_fqn": shard, "fence": 1, "checkpoint": b""}
    higher = {"fence": CHECKPOINTS.c.fence + 1}
    if connection.dialect.name == "mysql":
        connection.execute(mysql.insert(CHECKPOINTS).values(row).on_duplicate_key_update(higher))
        restored = row_of(connection, shard)
        assert restored is not None  # This transaction has locked the row.
        return restored
    insert = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(CHECKPOINTS)
    found = connection.execute(
        insert.values(row)
        .on_conflict_do_update(index_elements=[CHECKPOINTS.c.shard_fqn], set_=higher)
        .returning(CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint)
    ).one()
    return Restored(int(found.fence), checkpoint_of(shard, bytes(found.checkpoint)))


def row_of(connection: Connection, shard: str) -> Restored | None:
    """Return a consumer's row as this transaction sees it. None if the row does not exist."""
    row = connection.execute(
        select(CHECKPOINTS.c.fence, CHECKPOINTS.c.checkpoint).where(CHECKPOINTS.c.shard_fqn == shard)
    ).one_or_none()
    return None if row is None else Restored(int(row.fence), checkpoint_of(shard, bytes(row.checkpoint)))
