"""A driver: reads journals, copies them, and consumes them into a table and journals.

It reads its task from a JSON file and writes its results to another. `spark-submit` and plain Python run it, for
`test_cluster.py`.
"""

import json
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, Table

from coranto.client import ClientConfig
from coranto.errors import CorantoError
from coranto.security.tokens import Keys
from coranto_consumers.spark import Add, JournalOutput, Outputs, SparkConsumer, TableOutput, errors_of_tasks, register
from coranto_consumers.spark.application.consumer_options import ConsumerOptions

TOTALS = Table(
    "totals",
    MetaData(),
    Column("bucket", BigInteger, primary_key=True),
    Column("messages", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
)


class Buckets:
    """Count and sum numbers by their last digit, and publish numbers that end in 7."""

    name = "buckets"
    sources = "name:prefix=numbers/in/"
    value_schema = "n BIGINT"

    def __init__(self, straggles: bool) -> None:
        self._straggles = straggles

    def outputs(self, committed):
        totals = committed.groupBy((F.col("n") % 10).alias("bucket")).agg(
            F.count("*").alias("messages"), F.sum("n").alias("total")
        )
        passed = committed.where("n % 10 = 7").selectExpr("CAST(n AS STRING) AS key", "struct(n) AS value")
        if self._straggles:
            totals, passed = _straggling(totals), _straggling(passed)
        merge = {"messages": Add(), "total": Add()}
        return Outputs(
            tables=[TableOutput(TOTALS, totals, keys=["bucket"], merge=merge)],
            journals=[JournalOutput(passed, "name:prefix=numbers/out/")],
        )


def _straggling(rows):
    """Return the same rows, but delay the last rows of the first attempt at the first partition."""

    def late(batches):
        context = TaskContext.get()
        yield from batches
        if (context.partitionId(), context.attemptNumber()) == (0, 0):
            time.sleep(4)

    # With fewer than two tasks there is none to overtake.
    return rows.repartition(2).mapInArrow(late, rows.schema)


def source(reader, asked: dict):
    """Return all input, read by the source."""
    return (
        reader.format("journal")
        .options(endpoint=asked["endpoint"], selector=Buckets.sources, authSecret=asked["key"])
        .option("maxBytesPerPartition", "4000")
        .schema("n BIGINT, _journal STRING")
        .load()
    )


def sink(writer, asked: dict, into: str):
    """Return a writer to the journals of a folder."""
    return writer.format("journal").options(
        endpoint=asked["endpoint"],
        selector=f"name:prefix=numbers/{into}/",
        ledger="numbers/ledger",
        authSecret=asked["key"],
    )


def copy(spark: SparkSession, asked: dict) -> None:
    """Copy all input by a repeated batch write and by a streaming query."""
    rows = source(spark.read, asked).selectExpr("CAST(n AS STRING) AS key", "struct(n) AS value")
    if asked["straggles"]:
        rows = _straggling(rows)
    for _ in range(2):
        sink(rows.write, asked, "copied").option("writerId", "copies").mode("append").save()
    if asked["checkpoint"]:
        changes = source(spark.readStream.option("startingOffsets", "earliest"), asked)
        messages = changes.selectExpr("CAST(n AS STRING) AS key", "struct(n) AS value")
        query = sink(messages.writeStream, asked, "streamed").option("checkpointLocation", asked["checkpoint"])
        query.trigger(availableNow=True).start().awaitTermination()


def read_source(spark: SparkSession, asked: dict) -> dict:
    """Read all input by the source, and return its totals and Spark's plan."""
    rows = source(spark.read, asked)
    shown = StringIO()
    with redirect_stdout(shown):
        rows.explain("extended")
    with errors_of_tasks():
        read = rows.agg(F.count("*").alias("count"), F.sum("n").alias("sum")).collect()[0].asDict()
    return {"read": read, "plan": shown.getvalue()}


def run(spark: SparkSession, asked: dict) -> dict:
    register(spark)
    config = ClientConfig(asked["endpoint"], auth=Keys.parse(asked["key"]))
    found = read_source(spark, asked)
    copy(spark, asked)
    options = ConsumerOptions(max_partition_bytes=4000)
    consumer = SparkConsumer(Buckets(asked["straggles"]), config, asked["store"], spark, options)
    report = consumer.run_until_caught_up()
    return {**found, "messages": report.messages, "published": report.published}


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    builder = SparkSession.builder.remote(asked["remote"]) if asked["remote"] else SparkSession.builder
    for name, value in asked["settings"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        for archive in asked["artifacts"]:
            spark.addArtifacts(archive, pyfile=True)
        answer = run(spark, asked)
    except CorantoError as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    finally:
        spark.stop()
    Path(asked["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
