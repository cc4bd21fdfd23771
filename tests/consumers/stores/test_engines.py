"""Connections of stores that begin together."""

import datetime as dt
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from sqlalchemy import Column, DateTime, Integer, MetaData, Table, insert, inspect, select

from coranto.errors import SqlStoreError
from coranto_consumers.stores import SqlStore

NUMBERS = Table("numbers", MetaData(), Column("n", Integer, primary_key=True))


def test_a_new_file_of_sqlite_is_waited_for_while_another_writes_in_it(tmp_path: Path):
    errors: list[Exception] = []

    def create() -> None:
        try:
            SqlStore(f"sqlite:///{tmp_path}/store.db").create_tables(NUMBERS)
        except SqlStoreError as error:
            errors.append(error)

    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        creating = threading.Thread(target=create)
        creating.start()
        creating.join(0.1)
        other.execute("ROLLBACK")
    creating.join()

    assert errors == []
    assert inspect(SqlStore(f"sqlite:///{tmp_path}/store.db").engine).has_table("numbers")


def test_times_with_a_zone_are_in_utc_in_sqlite(tmp_path: Path):
    table = Table("times", MetaData(), Column("at", DateTime(timezone=True)))
    store = SqlStore(f"sqlite:///{tmp_path}/times.db")
    store.create_tables(table)
    there = dt.datetime(2024, 5, 6, 1, 30, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    with store.engine.begin() as connection:
        connection.execute(insert(table), [{"at": there}, {"at": dt.datetime(2024, 5, 6, 1, 30)}, {"at": None}])
        found = connection.execute(select(table.c.at)).scalars().all()
    assert found == [dt.datetime(2024, 5, 5, 23, 30), dt.datetime(2024, 5, 6, 1, 30), None]
