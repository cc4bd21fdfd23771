"""All strategies produce the same rows and summaries of a plan."""

from contextlib import ExitStack

import pytest
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from coranto.messages.framing import JsonLines
from coranto_consumers.journals.ranges import WORTHWHILE_BYTES, Range, ReadPlan
from coranto_consumers.spark.inputs import strategies
from coranto_consumers.spark.inputs.frames import planned_rows, sequenced_layout
from coranto_consumers.spark.inputs.strategies import (
    ExpectedRows,
    chosen_columns,
    is_little,
    read_rows,
)

JOURNAL = "rows/source"
SCHEMA = StructType([StructField("n", LongType())])


@pytest.fixture
def plan(broker) -> ReadPlan:
    broker.create(JOURNAL)
    lines = [b'{"n":%d}\n' % n for n in range(100)]
    broker.write(JOURNAL, b"".join(lines))
    middle, head = len(b"".join(lines[:50])), broker.head(JOURNAL)
    return ReadPlan(((Range(JOURNAL, 0, middle, head),), (Range(JOURNAL, middle, head, head),)))


@pytest.fixture
def planned(broker, plan):
    return planned_rows(sequenced_layout(SCHEMA, JsonLines(), None), plan, broker.config, {})


def test_rows_and_summaries_are_the_same_for_every_strategy(spark, plan, planned, monkeypatch):
    found = []
    for is_read_here in (True, False):
        monkeypatch.setattr(strategies, "is_little", lambda plan, here=is_read_here: here)
        with ExitStack() as kept:
            rows, summaries = read_rows(spark, planned, kept)
            assert rows.storageLevel.useDisk is not is_read_here, "Spark's cache spills to disk"
            found.append((sorted(row.n for row in rows.collect() if row.n is not None), summaries))
        assert not rows.is_cached
    expected = ExpectedRows(spark, planned, SCHEMA)
    found.append((sorted(row.n for row in expected.committed.collect()), expected.summaries()))
    assert [rows for rows, _ in found] == [list(range(100))] * 3
    assert all(summaries == found[0][1] for _, summaries in found)
    assert found[0][1].keys() == plan.numbers.keys()


def test_only_little_content_is_read_by_the_driver(plan):
    assert not is_little(ReadPlan(((Range(JOURNAL, 0, WORTHWHILE_BYTES + 1, WORTHWHILE_BYTES + 1),),)))
    assert not is_little(plan), "it has two slices"
    assert is_little(ReadPlan(((Range(JOURNAL, 0, 10, 10),),)))


def test_selected_columns_are_distinguished_from_computed_rows(spark):
    source = spark.createDataFrame([(1, "a")], "id INT, name STRING").where("id > 0")
    assert chosen_columns(source, source) == {"id": "id", "name": "name"}
    renamed = source.select(F.col("name").alias("other"), "id").withColumnRenamed("id", "number")
    assert chosen_columns(renamed, source) == {"other": "name", "number": "id"}
    assert chosen_columns(source.select(F.col("id").alias("a"), F.col("id").alias("b")), source) == {
        "a": "id",
        "b": "id",
    }
    others = spark.createDataFrame([(1, "a")], "id INT, name STRING")
    for made in (
        source.where("id > 1"),
        source.limit(1),
        source.selectExpr("id + 1 AS id"),
        source.selectExpr("CAST(id AS BIGINT) AS id"),
        source.union(source),
        source.select("id", "id"),
        source.repartition(1),
        source.distinct(),
        others.select("id"),
    ):
        assert chosen_columns(made, source) is None
