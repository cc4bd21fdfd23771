"""Outputs that only have columns of messages are recognized by their plans."""

from pyspark.sql import functions as F

from coranto_consumers.spark.inputs.packed import chosen_columns


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
