"""Whether a database keeps what it has committed.

Acknowledgements follow the commit of a checkpoint and cannot be taken back. A server that confirms commits before they
are on its disk may lose the checkpoint in a crash, and what was acknowledged is then consumed and published again.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, text

RELAXED: Final = "relaxed_durability"
"""The option of a store's URL that takes such a server all the same."""

_POSTGRESQL: Final = text("SELECT current_setting('fsync')")
_SYNCHRONOUS: Final = text(
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
_MYSQL: Final = text("SELECT @@GLOBAL.innodb_flush_log_at_trx_commit, @@GLOBAL.log_bin, @@GLOBAL.sync_binlog")


def commit_durably(connection: Connection) -> None:
    """Have the open transaction's commit wait for the disk, whatever the session's settings are.

    PostgreSQL can be told so for each transaction; for others see `risks`.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_SYNCHRONOUS)


def risks(connection: Connection) -> list[str]:
    """The server's settings by which it may lose what it has committed, each with its remedy."""
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
