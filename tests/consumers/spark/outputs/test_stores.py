"""A consumer's store is a URL or an object, and databases reject features of lakes."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import BigInteger, Column, Connection, MetaData, Table, select

from coranto.errors import Fenced, InvalidInput
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.spark.application.outputs import TableOutput
from coranto_consumers.spark.consumer.transaction import output_store
from coranto_consumers.spark.outputs.stores import SqlOutputs
from coranto_consumers.stores.sql import SqlStore

NUMBERS = Table("numbers", MetaData(), Column("n", BigInteger, nullable=False))


def test_rows_count_once_committed_and_an_earlier_owner_commits_none(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    old, new = output_store(url, Connection.commit), output_store(SqlOutputs(SqlStore(url)), Connection.commit)
    output = TableOutput(NUMBERS, spark.range(3).withColumnRenamed("id", "n"))
    first = old.raise_fence("me").fence
    written = old.write(output, "me", first)
    second = new.raise_fence("me").fence
    new.sweep("me", second)
    reached: list[str] = []
    with pytest.raises(Fenced):
        old.commit("me", first, [written], Checkpoint(), lambda: reached.append("old"))
    new.commit("me", second, [new.write(output, "me", second)], Checkpoint(), lambda: reached.append("new"))
    with SqlStore(url).engine.connect() as connection:
        assert sorted(connection.execute(select(NUMBERS.c.n)).scalars()) == [0, 1, 2]
    assert reached == ["new"]
    assert new.name == url.replace("sqlite:", "sqlite+pysqlite:")


def test_a_database_refuses_tables_by_name_and_partitions(spark: SparkSession, tmp_path: Path) -> None:
    store = output_store(f"sqlite:///{tmp_path}/store.db", Connection.commit)
    rows = spark.range(1).withColumnRenamed("id", "n")
    with pytest.raises(InvalidInput, match="table numbers: a table in SQL needs its definition"):
        store.write(TableOutput("numbers", rows), "me", 1)
    with pytest.raises(InvalidInput, match="tables in SQL have no partitions to overwrite"):
        store.write(TableOutput(NUMBERS, rows, overwrite=True), "me", 1)
