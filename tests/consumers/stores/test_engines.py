"""Connections of stores that begin together."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from sqlalchemy import Column, Integer, MetaData, Table, inspect

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
