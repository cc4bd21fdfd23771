"""Connections to a PostgreSQL server, checks of its settings, and translation of its errors. All calls block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import errors, sql

from coranto.errors import CorantoError, InvalidInput, SourceChanged, Unavailable
from coranto.ingest.postgres.names import quoted
from coranto.ingest.postgres.pgoutput import format_lsn, parse_lsn
from coranto.ingest.postgres.values import SESSION

CONNECT_SECONDS: Final = 15
OLDEST: Final = 140000
_SETTINGS: Final = {
    **SESSION,
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "10s",
    "row_security": "off",  # Raise an error instead of hiding rows.
}
_REFUSED: Final = (
    *("password authentication failed", "no pg_hba.conf entry", "no password supplied", "permission denied"),
    *("authentication failed", "invalid connection option", "invalid URI", "certificate verify failed"),
)
_MISSING: Final = (("database", "does not exist"), ("role", "does not exist"))
_ROLE: Final = """
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('wal_level'),
    current_user::text, rolsuper OR rolreplication OR EXISTS (
        SELECT FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid
        WHERE m.member = r.oid AND g.rolname = 'rds_replication')
FROM pg_roles r WHERE rolname = current_user
"""
_SLOT: Final = """
SELECT plugin, database, active_pid, restart_lsn::text, confirmed_flush_lsn::text, to_jsonb(s) ->> 'wal_status',
    to_jsonb(s) ->> 'invalidation_reason', temporary, database = current_database()
FROM pg_replication_slots s WHERE slot_name = %s
"""

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(url: str, *, replicates: bool = False) -> Connection:
    """Connect for statements or, with `replicates`, for replication commands.

    Raises InvalidInput if the server refuses the user, and Unavailable.
    """
    more: dict[str, Any] = {"replication": "database"} if replicates else {}
    with failures():
        connection: Connection = psycopg.connect(
            url, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="coranto ingest", **more
        )
        try:
            _set(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def _set(connection: Connection) -> None:
    for name, value in _SETTINGS.items():
        connection.execute(sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))


def require_settings(connection: Connection) -> str:
    """Check the server's settings and the role's rights, and return the role. Raises InvalidInput and Unavailable."""
    with failures():
        row = connection.execute(_ROLE).fetchone()
    assert row is not None
    version, is_standby, level, role, may_replicate = row
    if version < OLDEST:
        raise InvalidInput(f"the server is PostgreSQL {version // 10000}; the oldest that is read is {OLDEST // 10000}")
    if is_standby:
        raise Unavailable(
            "the server is a standby: name the primary in the url, or several hosts and target_session_attrs=read-write"
        )
    if level != "logical":
        raise InvalidInput(
            f"the server's wal_level is {level}, which does not record rows: run ALTER SYSTEM SET wal_level = "
            "'logical', and restart the server"
        )
    if not may_replicate:
        raise InvalidInput(
            f"the role {role} may not replicate: run ALTER ROLE {quoted(role)} REPLICATION (on Amazon RDS: GRANT "
            f"rds_replication TO {quoted(role)})"
        )
    return str(role)


def has_slot(connection: Connection, name: str, position: int | None) -> bool:
    """Return True if the slot has all changes after a position, False if there is no slot and `position` is None.

    Raises SourceChanged if changes after the position are gone, Unavailable if another process reads the slot, and
    InvalidInput for a slot of another kind.
    """
    with failures():
        row = connection.execute(_SLOT, [name]).fetchone()
    if row is None:
        if position is None:
            return False
        raise SourceChanged(
            f"the replication slot {name} is gone, and with it the changes after {format_lsn(position)}: {_again()}"
        )
    plugin, database, pid, restart, confirmed, status, reason, temporary, is_here = row
    if plugin != "pgoutput" or not is_here or temporary:
        kind = f"{'a temporary slot' if temporary else 'a slot'} of {plugin or 'physical replication'}"
        raise InvalidInput(
            f"the replication slot {name} is {kind}{f' in database {database}' if database else ''}: name another one "
            "with `slot`",
            field="slot",
        )
    if pid is not None:
        raise Unavailable(f"the replication slot {name} is in use by process {pid} of the server; waiting for it")
    if status == "lost" or reason or restart is None:
        where = "its start" if position is None else format_lsn(position)
        raise SourceChanged(
            f"the server has invalidated the replication slot {name} ({reason or 'wal_removed'}; see "
            f"max_slot_wal_keep_size), and the changes after {where} "
            f"are gone: {_again(name)}"
        )
    if position is not None and parse_lsn(confirmed) > position:
        raise SourceChanged(
            f"the replication slot {name} begins at {confirmed}, and the stream has changes only to "
            f"{format_lsn(position)}: the slot was created again, or another program reads it, and the changes between "
            f"are gone: {_again(name)}"
        )
    return True


def _again(slot: str = "") -> str:
    """Return the advice after a loss of changes. A `slot` that still exists has to be dropped, because it keeps log."""
    drop = f"Run SELECT pg_drop_replication_slot('{slot}'). " if slot else ""
    return (
        f"a copy needs a new start. {drop}Give the ingest another name and another stream, and copies another table. "
        "`coranto ingest run` then reads all rows again"
    )


def flushed(connection: Connection) -> tuple[int, int]:
    """Return the end of the log on disk, and the end in memory."""
    with failures():
        row = connection.execute(
            "SELECT pg_current_wal_flush_lsn()::text, pg_current_wal_insert_lsn()::text"
        ).fetchone()
    assert row is not None
    return parse_lsn(row[0]), parse_lsn(row[1])


def retained(connection: Connection, slot: str) -> int:
    """Return the bytes of log that the server keeps for a slot."""
    with failures():
        row = connection.execute(
            "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::int8 FROM pg_replication_slots "
            "WHERE slot_name = %s",
            [slot],
        ).fetchone()
    return 0 if row is None or row[0] is None else max(0, int(row[0]))


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Turn errors of the driver into errors of ingests, with the server's message, which has no values of rows."""
    try:
        yield
    except psycopg.Error as error:
        raise problem_of(error) from error


def problem_of(error: psycopg.Error) -> CorantoError:
    """Return the error of an ingest for an error of the driver."""
    words = (error.diag.message_primary or str(error)).strip().replace("\n", " ")
    if isinstance(error, errors.InsufficientPrivilege):
        return InvalidInput(f"the server refuses: {words}")
    if isinstance(error, errors.ConfigurationLimitExceeded):
        return InvalidInput(
            f"the server refuses: {words}. Run ALTER SYSTEM SET max_replication_slots and max_wal_senders to more, and "
            "restart the server"
        )
    if isinstance(error, errors.UndefinedObject):
        return SourceChanged(
            f"the server refuses: {words}. A publication must be older than the changes that are read: {_again()}"
        )
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError | psycopg.ProgrammingError):
        is_missing = any(what in words and how in words for what, how in _MISSING)
        if is_missing or any(each in words for each in _REFUSED) or isinstance(error, psycopg.ProgrammingError):
            return InvalidInput(f"the server refuses: {words}", field="url")
    return Unavailable(f"a call to the server failed: {words}")
