"""Checks that a database makes its commits durable.

Acknowledgements are appended after the commit of a checkpoint, and cannot be undone. A server that confirms commits
before they are on its disk may lose the checkpoint in a crash. Messages that were consumed and acknowledged are then
consumed and published again.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

RELAXED: Final = "relaxed_durability"
"""The option of a store's URL that accepts a server that may lose commits."""

_POSTGRESQL: Final = text("SELECT current_setting('fsync')")
_SYNCHRONOUS: Final = text(
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
_MYSQL: Final = text("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.log_bin, @@GLOBAL.sync_binlog")


def commit_durably(connection: Connection) -> None:
    """Make the open transaction's commit wait for the disk, whatever the session's settings are.

    Only PostgreSQL has this setting per transaction. For other servers see `risks`.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_SYNCHRONOUS)


def risks(connection: Connection) -> list[str]:
    """Return the server's settings that risk the loss of committed transactions, each with its fix."""
    found = []
    if connection.dialect.name == "postgresql":
        if connection.execute(_POSTGRESQL).scalar_one() != "on":
            found.append("fsync is off: set it to on")
    elif connection.dialect.name == "mysql":
        flush, has_log, sync = (int(value) for value in connection.execute(_MYSQL).one())
        if flush != 1:
            found.append(f"innodb_flush_log_at_trx_commit is {flush}: set it to 1")
        if has_log and sync != 1:
            found.append(f"sync_binlog is {sync} while the binary log is on: set it to 1")
    return found
