"""SQLAlchemy engines for stores, with transactions that begin and block as consumers need.

Engines do not pool connections: a consumer opens one per transaction, so it never gets a connection that broke between
transactions.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pymysql.constants import ER
from sqlalchemy import URL, Connection, DateTime, Dialect, Engine, create_engine, event
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DataError, DBAPIError, PendingRollbackError
from sqlalchemy.pool import NullPool

from coranto.errors import InvalidInput
from coranto_consumers.stores import mysql
from coranto_consumers.stores.connection_errors import explain_connection_errors
from coranto_consumers.stores.urls import display_url

BUSY_TIMEOUT_MS = 60_000
"""Time in milliseconds that a SQLite connection waits for another connection's write."""

_WAL_PAUSE_S = 0.01
_UNAVAILABLE_CLASSES = frozenset({"08", "40", "53"})
"""Classes of SQLSTATE: connection errors, conflicts of transactions, and a lack of resources."""
_UNAVAILABLE = frozenset(
    {
        *("25006", "25P03", "25P04"),  # The server is read-only, as after a failover; a transaction timed out.
        "55P03",  # Another session holds a lock.
        *("57000", "57014", "57P01", "57P02", "57P03", "57P05"),  # A statement timed out; the server stops or starts.
        *("58000", "58030"),  # The server's disk fails.
    }
)
_SQLITE_UNAVAILABLE = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_PROTOCOL),
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM),
    }
)
_STANDBY = frozenset({"0A000", "55000"})
"""SQLSTATEs for actions that a standby cannot do before its promotion, such as reading an unlogged table. On a primary,
they have other meanings."""
_IN_RECOVERY = "coranto_in_recovery"
"""The key in a connection's `info` whose value is True if the server of its transaction is a standby."""
_INSUFFICIENT_PRIVILEGE = "42501"
_CARDINALITY_VIOLATION = "21000"

READS_ONLY = "coranto_reads_only"
"""The execution option of a read-only connection, which does not have to wait for writers."""

IDLE_IN_TRANSACTION_MS = 120_000
"""The time in milliseconds after which PostgreSQL ends the session of an idle transaction, and releases its locks."""

_LOCAL_SETTINGS = (
    "SELECT set_config('timezone', 'UTC', true), "
    f"set_config('idle_in_transaction_session_timeout', '{IDLE_IN_TRANSACTION_MS}', true), pg_is_in_recovery()"
)
"""Settings of one transaction. Connection poolers do not pass on session settings or connection options."""
_STATEMENT_POOLING = "statement pooling"
"""A part of PgBouncer's message, which is never translated. Its SQLSTATE has other meanings, too."""


def open_engine(url: URL) -> Engine:
    """Return an engine for a parsed store URL. It does not connect yet."""
    match url.get_backend_name():
        case "sqlite":
            return _sqlite_engine(url)
        case "mysql":
            return mysql.mysql_engine(url, display_url(url))
        case _:
            return _postgresql_engine(url)


def adapt(engine: Engine) -> None:
    """Make an existing PostgreSQL engine explain refused connections, and turn off its prepared statements.

    Connection poolers do not support prepared statements.
    """
    if engine.dialect.name != "postgresql":
        return

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.prepare_threshold = None

    explain_connection_errors(engine)
    engine.dispose()  # Existing connections still prepare statements.


def was_rolled_back(error: DBAPIError) -> bool:
    """Return True if a transaction was rolled back because of a conflict with another one. It can be retried."""
    return _state(error).startswith("40") or (mysql.is_mysql(error) and mysql.was_rolled_back(error))


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed, as after a conflict, a lost connection or an unavailable server.

    The error was raised by SQLAlchemy, or by a driver that an application uses itself.
    """
    if isinstance(error, PendingRollbackError):
        return True  # The application continued after it had lost its connection.
    original = error.orig if isinstance(error, DBAPIError) else error
    if mysql.is_mysql(error):
        return mysql.is_transient(error)
    if isinstance(original, sqlite3.Error):
        return getattr(original, "sqlite_errorcode", 0) & 0xFF in _SQLITE_UNAVAILABLE
    if state := _state(error):
        if state in _STANDBY:
            return isinstance(error, DBAPIError) and error.connection_invalidated
        return state[:2] in _UNAVAILABLE_CLASSES or state in _UNAVAILABLE
    names = {kind.__name__ for kind in type(error).__mro__}
    is_driver_error = isinstance(error, DBAPIError) or type(error).__module__.partition(".")[0] == "psycopg"
    is_lost = bool(names & {"OperationalError", "InterfaceError"}) or getattr(error, "connection_invalidated", False)
    lacks_password = getattr(getattr(original, "pgconn", None), "needs_password", False)
    return is_driver_error and is_lost and not lacks_password


def is_denied(error: DBAPIError) -> bool:
    """Return True if the database denies this role access to an existing object."""
    return _state(error) == _INSUFFICIENT_PRIVILEGE or mysql.code_of(error) == ER.TABLEACCESS_DENIED_ERROR


def is_repeated_row(error: DBAPIError) -> bool:
    """Return True if PostgreSQL rejected a statement because it would have changed one row twice."""
    return _state(error) == _CARDINALITY_VIOLATION


def _state(error: BaseException) -> str:
    original = error.orig if isinstance(error, DBAPIError) else error
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or ""


def _postgresql_engine(url: URL) -> Engine:
    """Return an engine whose transactions do not depend on session settings: connection poolers share sessions."""
    engine = create_engine(
        url,
        poolclass=NullPool,
        hide_parameters=True,
        isolation_level="READ COMMITTED",  # The driver sends it in each BEGIN.
        connect_args={
            "connect_timeout": 10,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "client_encoding": "utf8",  # The encoding of COPY's text, whatever the database's encoding is.
            "prepare_threshold": None,  # Prepared statements would outlive their client, in the pooler's session.
        },
    )

    explain_connection_errors(engine)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        *_, connection.info[_IN_RECOVERY] = connection.exec_driver_sql(_LOCAL_SETTINGS).one()

    @event.listens_for(engine, "handle_error")
    def refuse(context: ExceptionContext) -> None:
        if context.connection is not None and _state(context.original_exception) in _STANDBY:
            # The standby may be promoted, or a new connection may reach another server.
            context.is_disconnect = bool(context.connection.info.get(_IN_RECOVERY))
        if _STATEMENT_POOLING in str(context.original_exception):
            raise InvalidInput(
                f"{display_url(url)}: the connection pooler there runs each statement by itself, and consumers need "
                "transactions: set its pool_mode to transaction or session",
                field="store_url",
            ) from context.original_exception

    return engine


def _sqlite_engine(url: URL) -> Engine:
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(
        url,
        poolclass=NullPool,
        hide_parameters=True,
        connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False},
    )
    engine.dialect.colspecs = {**engine.dialect.colspecs, DateTime: _UtcDateTime}

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: Any) -> None:
        # SQLAlchemy sends BEGIN itself (below). The driver would send it late, which would defeat the fence.
        connection.isolation_level = None
        cursor = connection.cursor()
        _use_wal(cursor)
        # A committed checkpoint must survive power loss: the acknowledgements after it cannot be undone.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "handle_error")
    def as_error_of_the_driver(context: ExceptionContext) -> None:
        # The driver raises Python's OverflowError for a number that SQLite cannot store.
        if isinstance(original := context.original_exception, OverflowError):
            raise DataError(context.statement, None, original, hide_parameters=True)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later could find the file changed in between and fail. A transaction
        # that takes the write lock first waits instead.
        reads = connection.get_execution_options().get(READS_ONLY, False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


class _UtcDateTime(sqlite.DATETIME):
    """The type of times in SQLite, which lacks time zones. Times with a zone become UTC, as in other databases."""

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        write = super().bind_processor(dialect)

        def bind(value: Any) -> Any:
            has_zone = isinstance(value, dt.datetime) and value.tzinfo is not None
            value = value.astimezone(dt.UTC) if has_zone else value
            return value if write is None else write(value)

        return bind


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Switch a database file to WAL permanently. Waits while another connection writes to it in another mode.

    SQLite's own timeout does not apply here: to avoid a deadlock, SQLite must assume that the other connection waits
    for this one.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(_WAL_PAUSE_S)
        else:
            return
