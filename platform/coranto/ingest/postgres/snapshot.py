"""The rows of tables at one position in the log, in the order of their keys. All calls block.

A temporary slot exports a snapshot with exactly the transactions that were committed before the position where the slot
begins. PostgreSQL's own replication makes the first copy of a table in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from psycopg import sql

from coranto.errors import Unavailable
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.pgoutput import Tuple, parse_lsn
from coranto.ingest.postgres.replication import ReplicationConnection
from coranto.ingest.postgres.server import Connection, connect, failures
from coranto.ingest.postgres.tables import Table, tables_of

_FIRST_ROWS: Final = 20
_MAX_ROWS: Final = 10_000
_ROW_BYTES: Final = 100
"""The estimated bytes of a row in addition to its values."""


class TableSnapshot:
    """One snapshot. `lsn` is its position, after `is_ready` has returned True."""

    def __init__(self, options: PostgresOptions, role: str) -> None:
        self._options = options
        self._role = role
        self._slot: ReplicationConnection | None = ReplicationConnection(options.url)
        self._connection: Connection | None = None
        self._row_bytes = 0
        self.lsn = 0
        self.tables: dict[str, Table] = {}
        try:
            self._slot.create_slot(f"coranto_snapshot_{self._slot.pid}", temporary=True)
        except BaseException:
            self.close()
            raise

    def is_ready(self, seconds: float, names: Sequence[str], known: Mapping[str, Any]) -> bool:
        """Wait at most `seconds` for the snapshot, and lock the tables to be read. Returns True once it is ready.

        Raises the errors of `tables_of`, and Unavailable if a table was rewritten after the snapshot.
        """
        if self._slot is None:
            return True
        created = self._slot.created(seconds)
        if created is None:
            return False
        position, name = created
        connection = self._connection = connect(self._options.url)
        with failures():
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(name)))
        self._slot.close()  # The transaction has the snapshot now.
        self._slot = None
        tables = tables_of(connection, self._options, self._role, known)
        wanted = [tables[name] for name in names if name in tables]
        if wanted:
            with failures():
                connection.execute(f"LOCK TABLE {', '.join(each.sql for each in wanted)} IN ACCESS SHARE MODE".encode())
            tables = tables_of(connection, self._options, self._role, known)
        for each in wanted:
            now = tables.get(each.name)
            if now is None or now.files != now.files_now:
                # A snapshot from before a rewrite finds the table empty.
                raise Unavailable(f"table {each.name} was changed while its snapshot began")
        self.tables, self.lsn = tables, parse_lsn(position)
        return True

    def rows(self, table: Table, after: Sequence[str] | None, max_bytes: int) -> tuple[list[Tuple], bool]:
        """Return rows after a key, and True if there may be more."""
        assert self._connection is not None
        count = max_bytes // self._row_bytes if self._row_bytes else _FIRST_ROWS
        count = max(1, min(count, _MAX_ROWS))
        key = sql.SQL(", ").join(map(sql.Identifier, table.key))
        conditions = []
        if after is not None:
            conditions.append(sql.SQL("ROW({}) > ROW({})").format(key, sql.SQL(", ").join(map(sql.Literal, after))))
        if table.row_filter:
            conditions.append(sql.SQL("({})").format(sql.SQL(table.row_filter)))
        query = sql.SQL("SELECT {} FROM {} {} ORDER BY {} LIMIT {}").format(
            sql.SQL(", ").join(sql.Identifier(each.name) for each in table.columns),
            sql.SQL("" if table.is_partitioned else "ONLY ") + sql.Identifier(table.schema, table.table),
            sql.SQL("WHERE ") + sql.SQL(" AND ").join(conditions) if conditions else sql.SQL(""),
            key,
            sql.Literal(count),
        )
        with failures():
            result = self._connection.execute(query).pgresult
        assert result is not None
        found: list[Tuple] = [
            [result.get_value(row, column) for column in range(result.nfields)] for row in range(result.ntuples)
        ]
        size = sum(_ROW_BYTES + sum(len(value) for value in row if value is not None) for row in found)
        if found:
            self._row_bytes = max(1, size // len(found))
        return found, len(found) == count

    def close(self) -> None:
        for each in (self._slot, self._connection):
            if each is not None:
                each.close()
        self._slot = self._connection = None
