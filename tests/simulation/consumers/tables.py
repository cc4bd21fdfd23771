"""`SqlShardStore` itself in the simulation, over SQLite files.

Its statements take no virtual time. So the possible database faults are dead clients, whose transactions are rolled
back, locks that paused clients keep, and commits whose answer is lost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, Table, Text, event, select
from sqlalchemy.exc import OperationalError

from coranto.testing.sim.timeline import Process
from coranto_consumers.stores import SqlShardStore, SqlStore

from .database import DatabaseFaults
from .history import Book, Entry

_METADATA = MetaData()
SUMS = Table(
    "sums",
    _METADATA,
    Column("key", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
)
ENTRIES = Table(
    "entries",
    _METADATA,
    Column("n", Integer, primary_key=True),
    *(Column(name, BigInteger if name == "amount" else Text) for name in Entry._fields),  # A clock is unsigned.
)
TOKENS = Table("tokens", _METADATA, Column("n", Integer, primary_key=True), Column("token", Text))


def open_store(
    path: Path, process: Process, faults: Callable[[], DatabaseFaults], chance: Callable[[], float], reached: Any
) -> SqlShardStore:
    """Return the store of a process. `reached` is called before each commit."""

    def commit(connection: Connection) -> None:
        reached("commit")
        process.check_alive()
        if chance() < faults().refuse:
            raise OperationalError("COMMIT", None, sqlite3.OperationalError("the commit did not get there"))
        connection.commit()
        if chance() < faults().lose_answer:
            raise OperationalError("COMMIT", None, sqlite3.OperationalError("the connection broke"))

    database = _ProcessDatabase(f"sqlite:///{path}", commit=commit, sleep=lambda _: None)
    process.on_death.append(database.died)

    @event.listens_for(database.engine, "connect")
    def connected(connection: sqlite3.Connection, _record: Any) -> None:
        process.check_alive()
        # Waiting for a lock would block its holder, too. And the files need not survive the machine.
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA synchronous=OFF")

    return SqlShardStore(database, SUMS, ENTRIES, TOKENS)


class _ProcessDatabase(SqlStore):
    """A database whose transactions end with their process."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._open: list[Any] = []

    def transaction(self, shard: str, fence: int) -> Any:
        manager: Any = super().transaction(shard, fence)
        self._open.append(manager.gen)
        return manager

    def died(self) -> None:
        for generator in self._open:
            generator.close()


def record(store: SqlShardStore, entry: Entry) -> int:
    """Count a message, and return the sum of its key."""
    connection, by_key = store.connection, SUMS.c.key == entry.key
    found = connection.execute(select(SUMS).where(by_key)).one_or_none()
    _, count, total = found if found is not None else (entry.key, 0, 0)
    count, total = count + 1, total + entry.amount
    if found is None:
        store.insert(SUMS, {"key": entry.key, "count": count, "total": total})
    else:
        connection.execute(SUMS.update().where(by_key).values(count=count, total=total))
    store.insert(ENTRIES, entry._asdict() | {"clock": str(entry.clock)})
    return int(total)


def end_transaction(store: SqlShardStore, token: str) -> None:
    store.insert(TOKENS, {"token": token})


def read(path: Path) -> Book:
    engine = SqlStore(f"sqlite:///{path}").engine
    with engine.connect() as connection:
        sums = {key: [count, total] for key, count, total in connection.execute(select(SUMS).order_by(SUMS.c.key))}
        rows = connection.execute(select(*(ENTRIES.c[name] for name in Entry._fields)).order_by(ENTRIES.c.n))
        entries = [Entry(*row)._replace(clock=int(row.clock)) for row in rows]
        tokens = list(connection.execute(select(TOKENS.c.token).order_by(TOKENS.c.n)).scalars())
    return Book(sums, entries, tokens)
