"""Tables of PostgreSQL as a source: first the rows of a snapshot, then the changes of their publication.

The split `log` has a position in the log. Everything that was committed before it is in the stream. Each table is a
split, too: its rows are read in the order of their keys, and its position has the last key that was read.

A snapshot has a position in the log. First the changes up to that position are read, and then the unread rows of
tables. So events of a row are in the order of its changes, and the last event has its current values. An ingest that is
interrupted during a snapshot begins another one, and continues with the rows after the last key.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import structlog

from coranto.errors import InvalidInput, SourceChanged, Unavailable
from coranto.ingest.postgres import server
from coranto.ingest.postgres.log import ChangeLog, LogPosition
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.pgoutput import Column, TableRelation, format_lsn
from coranto.ingest.postgres.replication import ReplicationConnection
from coranto.ingest.postgres.rows import Shape, TableRows
from coranto.ingest.postgres.snapshot import TableSnapshot
from coranto.ingest.postgres.tables import Table, load_types, must_be_read_again, position_of, tables_of
from coranto.ingest.postgres.values import ColumnTypes
from coranto.ingest.source import Positions, Read
from coranto.types.kinds import TypeField

LOG: Final = "log"
_WAIT_SECONDS: Final = 0.1
_FLUSH_SECONDS: Final = 5.0
_PAGE_HEAD: Final = 64
"""The end of the log may be this many bytes above the flushed end although everything is flushed: a page header."""
_ADVANCE_SECONDS: Final = 10.0
"""The minimum time between two records of the position while the publication has no changes."""

_log = structlog.get_logger(__name__)


class PostgresSource:
    """The tables of a publication. `ingest` is the name of the ingest."""

    def __init__(self, options: PostgresOptions, ingest: str) -> None:
        self._options = options
        self._slot = options.slot_of(ingest)
        self._types = ColumnTypes()
        self._rows = TableRows(options, self._types, self._load)
        self._role = ""
        self._connection: server.Connection | None = None
        self._replication: ReplicationConnection | None = None
        self._changes: ChangeLog | None = None
        self._snapshot: TableSnapshot | None = None
        self._tables: dict[str, Table] = {}
        self._positions: dict[str, dict[str, Any]] = {}
        self._first: list[Read] = []
        self._follow = False
        self._end = 0  # The end of the log when the source was opened. Not used with `follow`.
        self._checked_at = 0.0
        self._advanced = 0.0
        self._calls = threading.Lock()  # A call may continue after its task was cancelled.

    async def open(self, after: Positions, *, follow: bool) -> str:
        self._follow = follow
        return await asyncio.to_thread(self._open, after)

    async def read(self, max_bytes: int) -> Sequence[Read] | None:
        return await asyncio.to_thread(self._read, max_bytes)

    async def fields(self) -> tuple[TypeField, ...] | None:
        return await asyncio.to_thread(self._rows.fields)

    async def confirm(self) -> None:
        """Do nothing, because the log of a database does not change."""

    async def committed(self, positions: Positions) -> None:
        """Confirm the position. After the next report the server may remove the log before it."""
        if self._replication is not None and LOG in positions:
            self._replication.confirmed = LogPosition.parse(positions[LOG]).lsn

    async def lag(self, positions: Positions) -> Mapping[str, int]:
        """Return the bytes of log after the position, and the sizes of tables with unread rows."""
        return await asyncio.to_thread(self._lag, positions)

    async def retained(self) -> int | None:
        return await asyncio.to_thread(self._retained)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # -- Blocking parts ------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        with self._calls:
            replication, self._replication = self._replication, None
            if replication is not None:
                try:
                    if self._changes is not None:
                        replication.report()
                except Unavailable as error:
                    _log.info("ingest.not_reported", slot=self._slot, error=str(error))
                replication.close()
            for each in (self._snapshot, self._connection):
                if each is not None:
                    each.close()
            self._snapshot = self._connection = self._changes = None

    def _open(self, after: Positions) -> str:
        with self._calls:
            connection = self._connection = server.connect(self._options.url)
            self._role = server.require_settings(connection)
            self._first = []
            self._positions = {name: dict(position) for name, position in after.items() if name != LOG}
            self._check()
            position = LogPosition.parse(after[LOG]) if LOG in after else None
            has_slot = server.has_slot(connection, self._slot, None if position is None else position.lsn)
            flushed, end = server.flushed(connection)
            replication = self._replication = ReplicationConnection(self._options.url)
            identity = f"postgresql:{replication.identity()}"
            if position is not None:
                self._require_history(position, end)
            deadline = time.monotonic() + _FLUSH_SECONDS
            while not self._follow and flushed + _PAGE_HEAD < end and time.monotonic() < deadline:
                time.sleep(_WAIT_SECONDS / 2)  # Asynchronous commits are flushed soon.
                flushed, _ = server.flushed(connection)
            self._end = min(flushed, end)
            self._changes = None
            if has_slot:
                self._start(position)
            else:
                replication.create_slot(self._slot, temporary=False)
            return identity

    def _require_history(self, position: LogPosition, end: int) -> None:
        """Raise SourceChanged if the log of the server, which ends at `end`, lacks a part before the position."""
        assert self._replication is not None
        if position.timeline in (0, self._replication.timeline):
            where, found = end, f"ends at {format_lsn(end)}"
        else:
            where = self._replication.end_of_timeline(position.timeline)
            found = f"continues another history from {format_lsn(where)} on"
        if position.lsn > where:
            raise SourceChanged(
                f"the stream has changes to {position}, and the log of the server {found}: the server has lost "
                "transactions, as after a failover or a restored backup. Give the ingest another name and another "
                f"stream, and drop the slot {self._slot} if it is there"
            )

    def _start(self, position: LogPosition | None) -> None:
        """Start receiving changes. Only one process at a time can."""
        assert self._replication is not None
        self._replication.start(self._slot, position.lsn if position else 0, self._options.publication)
        self._changes = ChangeLog(self._replication, self._options, self._rows, position, self._key_of)
        self._advanced = time.monotonic()

    def _read(self, max_bytes: int) -> list[Read] | None:
        with self._calls:
            if self._connection is None or self._replication is None:
                return []  # It was closed.
            if self._changes is None:
                if self._replication.created(_WAIT_SECONDS) is None:
                    return []
                _log.info("ingest.slot_created", slot=self._slot)
                self._start(None)
            assert self._changes is not None
            if self._snapshot is None and self._follow and self._is_check_due():
                self._check()
            first, self._first = self._first, []
            if first:
                return first
            if unread := [name for name in self._tables if not self._positions[name]["done"]]:
                return self._read_snapshot(self._changes, unread, max_bytes)
            return self._read_log(self._changes, max_bytes)

    # -- Changes -------------------------------------------------------------------------------------------------------

    def _read_log(self, changes: ChangeLog, max_bytes: int) -> list[Read] | None:
        assert changes.position is not None
        if not self._follow and changes.position.lsn >= self._end and not changes.position.done:
            return None
        reads = changes.read(max_bytes, _WAIT_SECONDS)
        if reads:
            self._advanced = time.monotonic()
            return reads
        is_due = time.monotonic() - self._advanced >= _ADVANCE_SECONDS
        is_due = is_due or changes.is_asked
        if not self._follow:
            changes.ask()
            is_due = changes.reached >= self._end
        if is_due and (read := changes.advance()) is not None:
            self._advanced = time.monotonic()
            return [read]
        return []

    # -- Rows ----------------------------------------------------------------------------------------------------------

    def _read_snapshot(self, changes: ChangeLog, unread: Sequence[str], max_bytes: int) -> list[Read]:
        """Read the changes up to the position of a snapshot, and then the rows that are not read yet."""
        if self._snapshot is None:
            self._snapshot = TableSnapshot(self._options, self._role)
            _log.info("ingest.snapshot_begins", slot=self._slot, tables=len(unread))
        snapshot = self._snapshot
        if not snapshot.is_ready(_WAIT_SECONDS, unread, self._positions):
            changes.keep_alive()
            return []
        if changes.position is None:
            return [changes.begin(snapshot.lsn)]
        if changes.position.lsn < snapshot.lsn:
            reads = changes.read(max_bytes, _WAIT_SECONDS, until=snapshot.lsn)
            changes.ask()
            if not reads and (changes.is_at(snapshot.lsn)):
                return [changes.begin(snapshot.lsn)]
            return reads
        changes.keep_alive()
        name = unread[0]
        read = self._read_rows(snapshot, name, max_bytes)
        if len(unread) == 1 and read.position["done"]:
            snapshot.close()
            self._snapshot = None
            self._checked_at = time.monotonic() - self._options.poll_seconds  # Check now.
            _log.info("ingest.snapshot_ends", slot=self._slot, position=format_lsn(snapshot.lsn))
        return [read]

    def _read_rows(self, snapshot: TableSnapshot, name: str, max_bytes: int) -> Read:
        table = snapshot.tables.get(name)
        if table is None:
            raise Unavailable(f"table {name} left the publication while it was read")
        position = self._positions[name]
        if must_be_read_again(table, position):
            position = position_of(table, position)
        shape = self._shape(table)
        found, has_more = snapshot.rows(table, position.get("after"), max_bytes)
        rows = (self._rows.read(shape, values, snapshot.lsn) for values in found)
        after = {"after": [(found[-1][at] or b"").decode() for at in shape.key]} if has_more else {}
        position = self._positions[name] = {**position_of(table, position), **after, "done": not has_more}
        return Read(name, rows, position)

    def _shape(self, table: Table) -> Shape:
        columns = [Column(each.name, each.type, each.modifier, each.name in table.key) for each in table.columns]
        return self._rows.shape(table, columns, table.key)

    # -- Tables --------------------------------------------------------------------------------------------------------

    def _is_check_due(self) -> bool:
        return time.monotonic() - self._checked_at >= self._options.poll_seconds

    def _check(self) -> None:
        """Check for new tables and changed columns. Raises the errors of `tables_of`."""
        assert self._connection is not None
        self._tables = tables_of(self._connection, self._options, self._role, self._positions)
        self._checked_at = time.monotonic()
        for name, table in self._tables.items():
            known = self._positions.get(name)
            now = position_of(table, known)
            if known is None:
                self._positions[name] = now
            elif must_be_read_again(table, known):
                _log.warning("ingest.table_read_again", table=name, slot=self._slot)
                self._positions[name] = now
                self._first.append(Read(name, (), now))
            elif known["done"] and known["columns"] != now["columns"]:
                self._positions[name] = {**now, "done": True}
                self._first.append(Read(name, (), self._positions[name]))

    def _key_of(self, relation: TableRelation) -> tuple[str, ...]:
        """Return the key of a table with the replica identity FULL. Raises InvalidInput."""
        names = {each.name for each in relation.columns}
        tables = [table.key for table in self._tables.values() if table.oid == relation.oid]
        earlier = [key for each in self._positions.values() if each["oid"] == relation.oid for key in each["keys"]]
        for key in (*tables, *earlier):
            if names.issuperset(key):
                return tuple(key)
        raise InvalidInput(
            f"the log has changes of table {relation.name}, which has the replica identity FULL, and is not in the "
            "publication any more: its key is not known. Give the ingest another name and another stream"
        )

    def _load(self, numbers: Sequence[int]) -> None:
        assert self._connection is not None
        load_types(self._connection, self._types, numbers)

    # -- Measurements --------------------------------------------------------------------------------------------------

    def _lag(self, positions: Positions) -> dict[str, int]:
        connection = server.connect(self._options.url)
        try:
            flushed, _ = server.flushed(connection)
            tables = tables_of(connection, self._options, server.require_settings(connection), {})
        except (InvalidInput, SourceChanged) as error:
            raise Unavailable(str(error)) from error
        finally:
            connection.close()
        waiting = {
            name: table.size for name, table in tables.items() if not positions.get(name, {"done": False})["done"]
        }
        return {LOG: max(0, flushed - LogPosition.parse(positions[LOG]).lsn) if LOG in positions else 0, **waiting}

    def _retained(self) -> int:
        connection = server.connect(self._options.url)
        try:
            return server.retained(connection, self._slot)
        finally:
            connection.close()
