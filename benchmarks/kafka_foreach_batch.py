"""Spark's Structured Streaming from Kafka to a table of PostgreSQL: `python -m benchmarks.kafka_foreach_batch REQUEST`.

REQUEST is a JSON object with the session's `settings`, the `server` and the `topic` of Kafka, the database's `url` for
psycopg and `jdbc` for Spark, and a `folder` for checkpoints. The program runs until it is terminated.

After a failure, `foreachBatch` may get a batch twice. So the rows of a batch are staged, and one transaction of the
database merges them and records the batch number, unless it is already recorded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import psycopg
from pyspark.sql import functions as F

from coranto_consumers.spark.session.sessions import new_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SCHEMA: Final = "id BIGINT, n BIGINT, customer STRING, cents BIGINT, at STRING, note STRING"
TABLES: Final = """
CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, n bigint, customer text, cents bigint, at text, note text);
CREATE UNLOGGED TABLE IF NOT EXISTS staged (LIKE orders);
CREATE TABLE IF NOT EXISTS batches (number bigint PRIMARY KEY);
"""
_MERGE: Final = """
INSERT INTO orders SELECT * FROM staged ON CONFLICT (id) DO UPDATE SET
n = EXCLUDED.n, customer = EXCLUDED.customer, cents = EXCLUDED.cents, at = EXCLUDED.at, note = EXCLUDED.note
"""


def stage(rows: DataFrame, request: Mapping[str, Any]) -> None:
    """Replace the staged rows by the last row of each key."""
    values = F.struct("n", "customer", "cents", "at", "note")
    last = rows.groupBy("id").agg(F.max_by(values, F.col("offset")).alias("v")).select("id", "v.*")
    writer = last.write.format("jdbc").mode("overwrite").options(**request["jdbc"])
    writer.option("dbtable", "staged").option("truncate", "true").option("batchsize", 10_000).save()


def merge(url: str, number: int) -> None:
    """Merge the staged rows of a batch, unless the batch is already merged."""
    with psycopg.connect(url) as connection:
        noted = connection.execute("INSERT INTO batches VALUES (%s) ON CONFLICT DO NOTHING", [number])
        if noted.rowcount:
            connection.execute(_MERGE.encode())


def main() -> None:
    request = json.loads(sys.argv[1])
    spark = new_session("bench", master="local[2]", settings=request["settings"])
    with psycopg.connect(request["url"]) as connection:
        connection.execute(TABLES.encode())

    def write(rows: DataFrame, number: int) -> None:
        stage(rows, request)
        merge(request["url"], number)

    options = {"kafka.bootstrap.servers": request["server"], "subscribe": request["topic"]}
    reader = spark.readStream.format("kafka").options(**options, startingOffsets="earliest")
    records = reader.option("kafka.isolation.level", "read_committed").load()
    rows = records.select("offset", F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")).select(
        "offset", "v.*"
    )
    query = rows.writeStream.foreachBatch(write).option("checkpointLocation", request["folder"]).start()
    query.awaitTermination()


if __name__ == "__main__":
    main()
