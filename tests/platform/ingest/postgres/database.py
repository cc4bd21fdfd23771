"""A source database, and copies of its tables built from events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import psycopg

from coranto.client import JournalClient
from coranto.ingest.engine import Ingest
from coranto.ingest.postgres.options import PostgresOptions
from coranto.ingest.postgres.source import PostgresSource
from coranto.ingest.spec import IngestSpec
from tests.platform.ingest.lists import QUICK, spec
from tests.servers.sql import PostgresServer

SETTINGS = ("wal_level=logical", "max_replication_slots=20", "max_wal_senders=20", "max_prepared_transactions=5")
SLOT = "coranto_loads"
_DROP_SECONDS = 30.0


class Database:
    """An empty database of a server. Leaving the context drops its slots."""

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self.name = server.new_database().rpartition("/")[2].partition("?")[0]
        self.url = f"postgresql://postgres:secret@127.0.0.1:{server.port}/{self.name}"
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop_slots()
        self.reconnect()

    def drop_slots(self) -> None:
        """Drop all slots. The server releases a slot some time after its reader has disconnected."""
        deadline = time.monotonic() + _DROP_SECONDS
        while True:
            try:
                self.execute(
                    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s",
                    self.name,
                )
                return
            except psycopg.errors.ObjectInUse:
                assert time.monotonic() < deadline, "a slot stays in use"
                time.sleep(0.05)

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        connection: psycopg.Connection[tuple[Any, ...]] = psycopg.connect(self.url, autocommit=True)
        return connection

    def reconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Execute statements as an administrator. Return the rows of the only statement."""
        if self._connection is None or self._connection.closed:
            self._connection = self.connect()
        cursor = self._connection.execute(statement.encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def rows(self, table: str = "orders", key: str = "id") -> dict[Any, dict[str, Any]]:
        """Return the rows of a table by their keys."""
        if self._connection is None or self._connection.closed:
            self._connection = self.connect()
        with self._connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            return {row[key]: row for row in cursor.execute(f"SELECT * FROM {table}".encode()).fetchall()}

    def options(self, **changes: Any) -> PostgresOptions:
        return PostgresOptions(**{"url": self.url, "publication": "shop", "poll_seconds": 0.1} | changes)

    def spec(self, *, given: Mapping[str, Any] | None = None, **changes: Any) -> IngestSpec:
        return spec(**{"kind": "postgres", "options": self.options(**changes), **(given or {})})

    def ingest(self, client: JournalClient, **changes: Any) -> Ingest:
        given = self.spec(**changes)
        return Ingest(client, given, PostgresSource(given.options, given.name), policy=QUICK)


class Copies:
    """Tables built from events as by a consumer in upsert mode. With `exact`, no change may be missing or duplicated.

    That needs tables with the replica identity FULL, whose updates contain earlier values. Rows of a snapshot may come
    after changes that they include.
    """

    def __init__(self, events: Sequence[Mapping[str, Any]], key: str = "id", *, exact: bool = True) -> None:
        self.tables: dict[str, dict[Any, dict[str, Any]]] = {}
        for event in events:
            meta = event["_meta"]
            table = self.tables.setdefault(meta["table"], {})
            fields = {name: value for name, value in event.items() if name != "_meta"}
            op, at = meta["op"], fields.get(key)
            if op == "truncate":
                table.clear()
            elif op == "delete":
                gone = table.pop(at, None)
                assert not exact or gone is None or gone == fields, event
            elif op == "insert":
                assert not exact or at not in table, f"{event} appears twice"
                table[at] = fields
            elif op == "update":
                known = table.get(at)
                if exact and known is not None and not meta.get("key_changed"):
                    assert known == meta["before"], f"{event} does not follow {known}"
                table[at] = fields
            else:
                known = table.get(at)
                assert op == "read"
                assert not exact or known is None or known == fields, f"{event} is not {known}"
                table[at] = fields

    def __getitem__(self, table: str) -> dict[Any, dict[str, Any]]:
        return self.tables.get(table, {})


ORDERS = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer text, cents bigint, version int NOT NULL DEFAULT 0);
ALTER TABLE orders REPLICA IDENTITY FULL;
CREATE PUBLICATION shop FOR TABLE orders;
"""
