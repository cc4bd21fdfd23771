"""`Upsert` keeps the last committed message of each key."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import BigInteger, Column, MetaData, String, Table, select

from coranto.errors import InvalidInput
from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark import Outputs, SparkConsumer, Upsert
from coranto_consumers.stores import SqlStore
from tests.consumers.conftest import Broker

JOURNAL = "shop/products/0"
PRODUCTS = Table(
    "products",
    MetaData(),
    Column("id", BigInteger, primary_key=True),
    Column("title", String(20)),
    Column("_offset", BigInteger, nullable=False),
)


class Products:
    name = "products"
    sources = f"name={JOURNAL}"
    value_schema = "id BIGINT, title STRING, gone BOOLEAN, _commit_offset BIGINT"

    def outputs(self, committed: DataFrame) -> Outputs:
        return Outputs(tables=[Upsert(key=["id"], order="commit", delete="gone").of(PRODUCTS, committed)])


def publisher(broker: Broker) -> SyncPublisher:
    producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
    return SyncPublisher(broker.write, producer=producer, clock=clock, framing=JsonLines())


def product(id: int, title: str | None, gone: bool = False) -> dict[str, Any]:
    return {"id": id, "title": title, "gone": gone}


@pytest.mark.integration
def test_the_last_committed_message_of_a_key_determines_its_row(
    spark: SparkSession, broker: Broker, new_store: Any
) -> None:
    broker.create(JOURNAL)
    url = new_store("sqlite")

    def rows() -> dict[int, str | None]:
        SparkConsumer(Products(), broker.config, url, spark).run_until_caught_up()
        with SqlStore(url).engine.connect() as connection:
            return {row.id: row.title for row in connection.execute(select(PRODUCTS))}

    early, late = publisher(broker), publisher(broker)
    early.add(JOURNAL, product(1, "begun first, committed last"))
    early.flush()
    late.add(JOURNAL, product(1, "a"))
    late.add(JOURNAL, product(1, "b"))
    late.add(JOURNAL, product(2, "kept"))
    late.add(JOURNAL, product(3, "c"))
    late.add(JOURNAL, product(3, None))
    late.commit()
    assert rows() == {1: "b", 2: "kept", 3: None}

    late.add(JOURNAL, product(1, "written later, committed earlier"))
    late.add(JOURNAL, product(3, "back", gone=True))
    late.commit()
    early.commit()
    assert rows() == {1: "begun first, committed last", 2: "kept"}

    late.add(JOURNAL, product(3, "gone", gone=True))
    late.add(JOURNAL, product(3, "again"))
    late.commit()
    assert rows() == {1: "begun first, committed last", 2: "kept", 3: "again"}


@pytest.mark.integration
def test_missing_columns_are_named(spark: SparkSession) -> None:
    rows = spark.sql("SELECT 1L AS id, 'a' AS title, 0L AS _offset")
    with pytest.raises(InvalidInput, match=r"rows: the rows have no column _commit_offset; add `_commit_offset BIG"):
        Upsert(key=["id"]).of(PRODUCTS, rows)
    with pytest.raises(InvalidInput, match=r"rows: the rows have no column number"):
        Upsert(key=["number"]).of(PRODUCTS, rows)
    with pytest.raises(InvalidInput, match=r"rows: the rows have no column gone"):
        Upsert(key=["id"], delete="gone").of(PRODUCTS, rows.selectExpr("*", "0L AS _commit_offset"))


@pytest.mark.integration
def test_unusual_names_and_a_table_of_only_keys_work(spark: SparkSession) -> None:
    rows = spark.sql("SELECT id % 2 AS `a.b`, id AS `last`, id AS _commit_offset, id AS _offset FROM range(4)")
    output = Upsert(key=["a.b"]).of("lake.products", rows)
    assert sorted(map(tuple, output.rows.collect())) == [(0, 2), (1, 3)]
    assert list(output.merge) == ["last"]
    output = Upsert(key=["a.b", "last"]).of("lake.products", rows)
    assert (output.rows.count(), dict(output.merge)) == (4, {})


def test_an_unknown_order_and_a_key_that_is_not_a_list_are_refused() -> None:
    wrong: Any = "time"
    with pytest.raises(InvalidInput, match="order: 'time' is not commit"):
        Upsert(key=["id"], order=wrong)
    with pytest.raises(InvalidInput, match="key: 'id' is not a list of columns"):
        Upsert(key="id")
    with pytest.raises(InvalidInput, match=r"key: \[\] is not a list of columns"):
        Upsert(key=[])
