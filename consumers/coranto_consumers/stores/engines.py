"""SQLAlchemy engines for stores, with transactions that begin and block as consumers need.

Engines do not pool: a consumer opens one connection per transaction, so it never gets a connection that broke between
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
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.pool import NullPool

from coranto_consumers.stores import mysql

BUSY_TIMEOUT_MS = 60_000
"""The time in milliseconds for which a SQLite connection waits for another connection's write."""

_WAL_PAUSE_S = 0.01
_INSUFFICIENT_PRIVILEGE = "42501"
_CARDINALITY_VIOLATION = "21000"

READS_ONLY = "coranto_reads_only"
"""The execution option of a connection that writes nothing, and so need not wait for writers."""

IDLE_IN_TRANSACTION_MS = 120_000
"""The time in milliseconds after which PostgreSQL ends the session of an idle transaction, and frees its locks."""


def open_engine(url: URL) -> Engine:
    """Return an engine for a parsed store URL. It does not connect yet."""
    match url.get_backend_name():
        case "sqlite":
            return _sqlite_engine(url)
        case "mysql":
            return mysql.mysql_engine(url)
        case _:
            return _postgresql_engine(url)


def was_rolled_back(error: DBAPIError) -> bool:
    """Return True if a transaction conflicted with another one. It was rolled back, and can be tried again."""
    return _state(error).startswith("40") or (mysql.is_mysql(error) and mysql.was_rolled_back(error))


def is_transient(error: DBAPIError) -> bool:
    """Return True if the next try may succeed, as after a conflict, a lost connection or an unavailable server."""
    if mysql.is_mysql(error):
        return mysql.is_transient(error)
    lost = isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated
    return lost or was_rolled_back(error)


def is_denied(error: DBAPIError) -> bool:
    """Return True if the database denies this role access to something that exists."""
    return _state(error) == _INSUFFICIENT_PRIVILEGE or mysql.code_of(error) == ER.TABLEACCESS_DENIED_ERROR


def is_repeated_row(error: DBAPIError) -> bool:
    """Return True if a statement of PostgreSQL would have changed one row twice."""
    return _state(error) == _CARDINALITY_VIOLATION


def _state(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""


def _postgresql_engine(url: URL) -> Engine:
    return create_engine(
        url,
        poolclass=NullPool,
        hide_parameters=True,
        connect_args={
            "connect_timeout": 10,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "client_encoding": "utf8",  # COPY's text is in it, whatever the database's own encoding.
            "options": f"-c idle_in_transaction_session_timeout={IDLE_IN_TRANSACTION_MS} -c timezone=UTC",
        },
    )


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
        # A committed checkpoint must survive power loss: acknowledgements that follow it cannot be taken back.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "handle_error")
    def as_error_of_the_driver(context: ExceptionContext) -> None:
        # The driver raises Python's own error for a number that SQLite does not keep.
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
    """Times in a file of SQLite, which knows no zones: one with a zone is converted to UTC, as in other databases."""

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        write = super().bind_processor(dialect)

        def bind(value: Any) -> Any:
            has_zone = isinstance(value, dt.datetime) and value.tzinfo is not None
            value = value.astimezone(dt.UTC) if has_zone else value
            return value if write is None else write(value)

        return bind


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """Switch a database file to WAL permanently. Waits while another connection writes to it in another mode.

    The wait is needed because SQLite's own time-out does not apply: SQLite must assume that the other connection waits
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
