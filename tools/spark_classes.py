"""Write an archive of the classes that Spark loads: a Java that maps it starts Spark for half the processor time.

`python tools/spark_classes.py FILE`. Java ignores the archive if Spark or Java has changed since. `tests/conftest.py`
has Java use it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from coranto_consumers.spark.session import new_session


def main(path: Path) -> None:
    """Run a few queries, and have Java write the archive when it ends."""
    made = path.with_name(f"{path.name}.{os.getpid()}")
    os.environ["JDK_JAVA_OPTIONS"] = (
        f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -Xlog:all=error:stderr -XX:ArchiveClassesAtExit={made}"
    )
    session = new_session("spark-classes", short=True)
    query(session)
    session.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # Java ends when its driver does.
    gateway.proc.wait()
    made.replace(path)


def query(session: SparkSession) -> None:
    """Have Spark load what consumers use: JSON, aggregates, joins, and Python's workers."""
    numbers = session.range(100).selectExpr("to_json(struct(id, id % 10 AS bucket)) AS value")
    rows = numbers.select(sf.from_json("value", "id BIGINT, bucket BIGINT").alias("row")).select("row.*")
    sums = rows.groupBy("bucket").agg(sf.sum("id").alias("sum"), sf.count("*").alias("count"))
    joined = rows.join(sf.broadcast(sums), "bucket").mapInArrow(lambda batches: batches, "bucket BIGINT, id BIGINT")
    joined.where("id > 3").orderBy("id").collect()
    session.createDataFrame([(1, "a")], "n BIGINT, s STRING").collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
