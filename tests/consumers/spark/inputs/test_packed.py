"""Rows that are kept as whole Arrow batches: they are the same rows, and chosen columns are detected."""

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from coranto_consumers.spark.committed.sequencing import PieceLimit
from coranto_consumers.spark.inputs.packed import PackTask, UnpackTask, chosen_columns

SUMMARY = -3


def batch(pieces: list[int], clocks: list[int], texts: list[str | None] | None = None):
    names = [f"{piece}:{clock}" for piece, clock in zip(pieces, clocks, strict=True)]
    return pa.record_batch(
        {
            "piece": pa.array(pieces, pa.int64()),
            "clock": pa.array(clocks, pa.int64()),
            "text": pa.array(texts or [None] * len(pieces), pa.string()),
            "name": pa.array(names),
        }
    )


def packed(*batches):
    return list(PackTask(iter, "piece", SUMMARY, "text")(batches))


def test_packed_rows_come_back_as_they_were_and_summaries_stay_apart():
    found = packed(
        batch([1, 2], [5, 6]), batch([SUMMARY], [0], ["of range 1"]), batch([3, SUMMARY], [7, 0], [None, "2"])
    )
    assert [text for each in found for text in each.column("summary").to_pylist() if text] == ["of range 1", "2"]
    rows = [each for each in found if each.column("batch")[0].is_valid]
    assert list(UnpackTask()(rows)) == [batch([1, 2], [5, 6]), batch([3], [7])]


def test_long_batches_are_packed_in_parts():
    long = batch([1] * 40_000, list(range(40_000)))
    parts = packed(long)
    assert len(parts) == 3
    assert pa.Table.from_batches(UnpackTask()(parts)).combine_chunks() == pa.Table.from_batches([long])


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((), ["1:5", "2:6", "2:7", "2:8", "-1:9"]),
        ((PieceLimit(2, 6, 7),), ["1:5", "2:7", "-1:9"]),
        ((PieceLimit(2, 0, 0), PieceLimit(1, 0, 5)), ["1:5", "-1:9"]),
        ((PieceLimit(9, 0, 0), PieceLimit(-1, 9, 9), PieceLimit(0, 0, 0)), ["1:5", "2:6", "2:7", "2:8"]),
    ],
)
def test_only_rows_within_the_limits_of_their_pieces_are_unpacked(limits, expected):
    rows = packed(batch([1, 2, 2, 2, -1], [5, 6, 7, 8, 9]))
    task = UnpackTask("piece", "clock", {"message": "name"}, limits)
    [found] = task(rows)
    assert (found.schema.names, found.column("message").to_pylist()) == (["message"], expected)


def test_chosen_columns_are_told_from_rows_that_were_made(spark):
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
