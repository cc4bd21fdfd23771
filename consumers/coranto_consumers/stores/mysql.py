"""MariaDB and MySQL: engines with the guarantees that consumers need, and the classification of the servers' errors.

Some behaviour of these servers would silently break exactly-once semantics:

* DDL statements commit the open transaction. A store's transaction rejects them, and fails if it was ended in another
  way.
* A deadlock rolls back the whole transaction. The next statement would begin another transaction, which would commit
  without the earlier changes. Instead, the connection is closed, so that only a new transaction can continue.
* Text is compared without regard to case and trailing spaces, values are truncated or rounded to fit, and 0 in an
  AUTO_INCREMENT column means "the next number". Sessions are therefore strict, and tables are created with the
  collation and the sizes of the other databases.
* These are session settings, and a proxy may give its clients sessions with other settings. Each transaction reads the
  settings of its session, and fails if they differ.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pymysql
from pymysql.constants import ER, SERVER_STATUS
from pymysql.converters import conversions, escape_datetime
from pymysql.err import MySQLError
from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    Index,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    bindparam,
    create_engine,
    event,
    text,
)
from sqlalchemy.dialects.mysql import VARCHAR
from sqlalchemy.dialects.mysql.base import MySQLDDLCompiler, MySQLTypeCompiler
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool
from sqlalchemy.types import LargeBinary, Text

from coranto.errors import InvalidInput

IDLE_S: Final = 120
"""The time in seconds after which the server ends the session of an idle client, and releases its locks."""

NAME: Final = Text().with_variant(VARCHAR(512), "mysql")
"""The type of columns with names, such as the names of consumers. These servers limit the size of keys."""

GUARDED: Final = "coranto_guarded"
"""The execution option of a connection whose transaction may only be committed by the store."""

_ISOLATION: Final = "READ COMMITTED"
_CHARSET: Final = "utf8mb4"
_SESSION: Final = (
    f"SET SESSION sql_mode = 'TRADITIONAL,NO_AUTO_VALUE_ON_ZERO', time_zone = '+00:00', wait_timeout = {IDLE_S}, "
    "lc_messages = 'en_US'"  # Names of columns and keys are parsed from error messages.
)
_MODES: Final = frozenset(
    {
        *("STRICT_TRANS_TABLES", "STRICT_ALL_TABLES", "NO_ZERO_IN_DATE", "NO_ZERO_DATE", "ERROR_FOR_DIVISION_BY_ZERO"),
        *("NO_ENGINE_SUBSTITUTION", "NO_AUTO_VALUE_ON_ZERO"),
    }
)
"""The modes of `_SESSION`, as the server shows them."""
_NAMES_OF_MODES: Final = frozenset({"TRADITIONAL", "NO_AUTO_CREATE_USER", ""})
"""Other modes that some versions show: a name for a combination of modes, and a mode that affects only GRANT."""
_BEGIN: Final = "START TRANSACTION /* of a store */"
_ENDS_TRANSACTION: Final = re.compile(
    # Not possessive: early releases of Python 3.11 do not match a possessive group within another.
    r"(?:\s|/\*(?:[^*]|\*(?!/))*\*/)*(?:(?:CREATE|DROP)\b(?!\s+TEMPORARY\b)|(?:ALTER|TRUNCATE|RENAME|GRANT|REVOKE|LOCK|UNLOCK|BEGIN"
    r"|START|COMMIT|OPTIMIZE|REPAIR|FLUSH|INSTALL|UNINSTALL)\b|ANALYZE\b.*?\bTABLE\b"
    r"|ROLLBACK\b(?!\s+(?:WORK\s+)?TO\b))",
    re.IGNORECASE | re.DOTALL,
)

_RECORD_CHANGED: Final = 1020
_ROLLED_BACK: Final = frozenset({_RECORD_CHANGED, ER.LOCK_WAIT_TIMEOUT, ER.LOCK_TABLE_FULL, ER.LOCK_DEADLOCK})
"""Errors after which the transaction is, or may be, rolled back. Server settings decide if a timeout rolls back the
statement or the transaction."""

_UNAVAILABLE: Final = frozenset(
    {
        *(ER.CON_COUNT_ERROR, ER.SERVER_SHUTDOWN, ER.TOO_MANY_USER_CONNECTIONS, ER.QUERY_INTERRUPTED),
        *(
            1047,
            1290,
            1792,
            1836,
        ),  # A node of a cluster is not ready, or a server is read-only during a failover.
        *(1969, 3024),  # A statement timed out.
        *(1021, 1041, 1637),  # The server lacks disk space, memory or room for transactions.
        *(1077, 1152, 1158, 1159, 1160, 1161, 1927),  # The server closed the connection, or stops.
        *(3100, 3101, 3168),  # A replication group elects another primary.
    }
)
_WITHOUT_TRANSACTIONS: Final = text(
    "SELECT t.table_name, t.engine FROM information_schema.tables t "
    "JOIN information_schema.engines e ON e.engine = t.engine "
    "WHERE t.table_schema IN :schemas AND t.table_name IN :names AND e.transactions <> 'YES'"
).bindparams(bindparam("schemas", expanding=True), bindparam("names", expanding=True))
_EXISTS: Final = frozenset({ER.TABLE_EXISTS_ERROR, ER.DUP_KEYNAME})


def mysql_engine(url: URL, name: str) -> Engine:
    """Return an engine for a parsed store URL. Errors call the database `name`. It does not connect yet."""
    engine = create_engine(
        url,
        poolclass=NullPool,
        hide_parameters=True,
        # As in PostgreSQL: readers take no locks, and an update sees the last committed values. With these servers'
        # default, merging staged rows would lock rows that other tasks are staging.
        isolation_level=_ISOLATION,
        connect_args={
            "charset": _CHARSET,
            "autocommit": False,
            "connect_timeout": 10,
            "init_command": _SESSION,
            "conv": {**conversions, dt.datetime: _escape_datetime},
        },
    )
    dialect: Any = engine.dialect
    dialect.ddl_compiler = _TableCompiler
    dialect.type_compiler_instance = dialect.type_compiler = _TypeCompiler(dialect)
    event.listen(engine, "do_connect", lambda _dialect, _record, arguments, options: _Connection(*arguments, **options))
    event.listen(engine, "connect", _keep_alive)
    event.listen(engine, "begin", functools.partial(_begin, name))
    event.listen(engine, "before_cursor_execute", _reject_implicit_commit)
    event.listen(engine, "after_cursor_execute", _reject_ended_transaction)
    event.listen(engine, "handle_error", _disconnect_after_rollback)
    return engine


def create_tables(engine: Engine, tables: Sequence[Table]) -> None:
    """Create absent tables. Several processes may do so concurrently, and a later call completes an interrupted one.

    DDL is not transactional here, so each table and each missing index is created separately. Raises InvalidInput for a
    table that these servers do not support, or whose storage engine has no transactions, and SQLAlchemy's errors.
    """
    for table in tables:
        _check_keys(table, engine.dialect)
    with engine.connect() as connection:
        for table in tables:
            parts: list[Table | Index] = [table, *sorted(table.indexes, key=lambda index: str(index.name))]
            for part in parts:
                try:
                    part.create(connection, checkfirst=True)
                except DBAPIError as error:
                    if code_of(error) not in _EXISTS:
                        raise
        _check_engines(connection, tables)


def code_of(error: BaseException | None) -> int:
    """Return the server's or driver's error code. 0 if there is none."""
    original = error.orig if isinstance(error, DBAPIError) else error
    number = original.args[0] if original is not None and original.args else None
    return number if isinstance(number, int) else 0


def is_mysql(error: BaseException) -> bool:
    """Return True if an error, or the error that SQLAlchemy wraps in it, comes from the driver of these servers."""
    return is_error(error.orig if isinstance(error, DBAPIError) else error)


def is_error(original: BaseException | None) -> bool:
    """Return True for an unwrapped error of the driver of these servers."""
    return isinstance(original, MySQLError)


def was_rolled_back(error: BaseException) -> bool:
    """Return True if a transaction was, or may have been, rolled back because of a conflict. It can be retried."""
    original = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(original, "sqlstate", None) or ""
    return code_of(error) in _ROLLED_BACK or state.startswith("40")


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed, as after a conflict, a lost connection or an unavailable server."""
    code, lost = code_of(error), isinstance(error, DBAPIError) and error.connection_invalidated
    return lost or was_rolled_back(error) or code in _UNAVAILABLE or 2000 <= code < 3000


class _Connection(pymysql.Connection):
    """A connection that uses TLS if the server supports it, as PostgreSQL's client does. TLS options override this."""

    def _create_ssl_ctx(self, sslp: dict[str, Any]) -> ssl.SSLContext:
        # The driver would load the system's certificates for each connection, although it does not verify them.
        made: ssl.SSLContext = super()._create_ssl_ctx(sslp) if sslp else _unverified()  # type: ignore[misc]
        return made


@functools.cache
def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _keep_alive(connection: Any, _record: object) -> None:
    """Set TCP keep-alive, so that the loss of the server's machine is detected within half a minute."""
    if isinstance(connection._sock, socket.socket) and connection._sock.family != socket.AF_UNIX:
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection._sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _is_guarded(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(GUARDED, False))


def _begin(name: str, connection: Connection) -> None:
    connection.exec_driver_sql(_BEGIN)  # Responses now report if it is open, and a proxy keeps the session.
    _require_settings(name, connection)


def _require_settings(name: str, connection: Connection) -> None:
    """Raise InvalidInput if the session's settings differ from the settings of this module."""
    settings = (
        f"@@sql_mode, @@time_zone, @@character_set_client, @@character_set_connection, @@{_isolation(connection)}"
    )
    modes, zone, *found = (str(each) for each in connection.exec_driver_sql(f"SELECT {settings}").one())
    differ = []
    if set(modes.upper().split(",")) - _NAMES_OF_MODES != _MODES:
        differ.append(f"sql_mode is {modes!r}")
    if zone not in ("+00:00", "UTC"):
        differ.append(f"time_zone is {zone}")
    isolation: str = connection.get_execution_options().get("isolation_level", _ISOLATION)  # Some readers set it.
    wanted = (_CHARSET, _CHARSET, isolation.replace(" ", "-"))
    names = ("character_set_client", "character_set_connection", "the isolation level")
    differ += [f"{what} is {value}" for what, value, want in zip(names, found, wanted, strict=True) if value != want]
    if differ:
        raise InvalidInput(
            f"{name}: {' and '.join(differ)} in a session that was set up otherwise: a proxy there gives its clients "
            "sessions of other clients, with other settings. Let the proxy keep a session for each client (ProxySQL: "
            "multiplexing off), or name the server itself in the URL",
            field="store_url",
        )


def _isolation(connection: Connection) -> str:
    """Return the name of the variable with the isolation level."""
    dialect: Any = connection.dialect
    is_older = dialect.is_mariadb or dialect.server_version_info < (5, 7, 20)
    return "tx_isolation" if is_older else "transaction_isolation"


def _reject_implicit_commit(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
    if statement != _BEGIN and _is_guarded(connection) and _ENDS_TRANSACTION.match(statement):
        raise InvalidInput(
            f"{_brief(statement)!r} would commit the transaction without its checkpoint: MariaDB and MySQL do so "
            "before data definition. Create tables at the start, outside of transactions",
            field="SQL statement",
        )


def _reject_ended_transaction(connection: Connection, cursor: Any, statement: str, *_: object) -> None:
    if _is_guarded(connection) and not cursor.connection.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
        connection.invalidate()
        raise InvalidInput(
            f"{_brief(statement)!r} has ended the transaction. Earlier changes of this transaction may be "
            "committed without its checkpoint: check it before the shard restarts",
            field="SQL statement",
        )


def _disconnect_after_rollback(context: ExceptionContext) -> None:
    original = context.sqlalchemy_exception
    if isinstance(original, DBAPIError) and was_rolled_back(original):
        context.is_disconnect = True


def _brief(statement: str) -> str:
    return " ".join(statement.split())[:60]


def _escape_datetime(value: dt.datetime, mapping: Mapping[Any, Any] | None = None) -> str:
    """Escape a time, and convert one with a zone to UTC. The driver would drop the zone."""
    return escape_datetime(value if value.tzinfo is None else value.astimezone(dt.UTC), mapping)


def _check_keys(table: Table, dialect: Dialect) -> None:
    uniques = [found for found in table.constraints if isinstance(found, PrimaryKeyConstraint | UniqueConstraint)]
    for column in (column for found in uniques for column in found.columns):
        if isinstance(column.type.dialect_impl(dialect), Text | LargeBinary):
            raise InvalidInput(
                f"key {column.name!r} is of a type without bounds, which MariaDB and MySQL cannot index: give it one "
                "such as String(200)",
                field=f"table {table.name}",
            )


def _check_engines(connection: Connection, tables: Sequence[Table]) -> None:
    schemas = {table.schema or connection.engine.url.database for table in tables}
    found = connection.execute(
        _WITHOUT_TRANSACTIONS, {"schemas": sorted(map(str, schemas)), "names": sorted({each.name for each in tables})}
    ).first()
    if found is not None:
        name, engine = found
        raise InvalidInput(
            f"is kept by {engine}, which has no transactions: ALTER TABLE {name} ENGINE=InnoDB", field=f"table {name}"
        )


class _TableCompiler(MySQLDDLCompiler):
    """Creates transactional tables that compare text as other databases do, unless a table sets its own options."""

    def post_create_table(self, table: Table) -> str:
        said = {name.removeprefix("mysql_") for name in table.kwargs if name.startswith("mysql_")}
        options = "" if "engine" in said else " ENGINE=InnoDB"
        if not said & {"charset", "default_charset", "character_set", "default_character_set", "collate"}:
            # Compare by code points, including trailing spaces. The servers have different names for this collation.
            collation = "utf8mb4_nopad_bin" if self.dialect.is_mariadb else "utf8mb4_0900_bin"
            options += f" DEFAULT CHARSET=utf8mb4 COLLATE={collation}"
        return f"{options} {super().post_create_table(table)}"


class _TypeCompiler(MySQLTypeCompiler):
    """Compiles types without a size to the sizes of other databases, not to 64 KiB, whole seconds or 24 bits."""

    def visit_large_binary(self, type_: Any, **kw: Any) -> str:
        return "LONGBLOB" if type_.length is None else super().visit_large_binary(type_, **kw)

    def visit_text(self, type_: Any, **kw: Any) -> str:
        return "LONGTEXT" if type_.length is None and type_.collation is None else super().visit_text(type_, **kw)

    def visit_unicode_text(self, type_: Any, **kw: Any) -> str:
        return self.visit_text(type_, **kw)

    def visit_datetime(self, type_: Any, **kw: Any) -> str:
        return "DATETIME(6)"

    def visit_time(self, type_: Any, **kw: Any) -> str:
        return "TIME(6)"

    def visit_float(self, type_: Any, **kw: Any) -> str:
        return "DOUBLE" if type_.precision is None else super().visit_float(type_, **kw)
