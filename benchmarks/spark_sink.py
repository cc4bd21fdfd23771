"""Rows per second of `write.format("journal")` against plain appends of the same bytes.

Rows are the flights with their columns, from Spark's cache. Two tasks write them to four journals by a key. The floor
appends the same number of bytes in two threads, in chunks of 1 MiB, without encoding and routing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.journals import create_journals
from benchmarks.runner import Figure, measure_pairs
from benchmarks.spark_reads import SCHEMA
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto_consumers.spark.session.sessions import new_session
from coranto_flights.data import iter_flights, load_flights

JOURNALS = [f"bench/sink/part-{i:03d}" for i in range(4)]
COPIES = 3
_PIECE = 1 << 20


def frames(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Return the cached flights with a key, as columns and as texts of JSON."""
    names, kinds = zip(*(part.split() for part in SCHEMA.split(", ")), strict=True)
    records = [tuple(record.get(name) for name in names) for record in iter_flights(load_flights())]
    types = [{"string": pa.string(), "int": pa.int32(), "double": pa.float64()}[kind] for kind in kinds]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*records, strict=True), types, strict=True)]
    flights = spark.createDataFrame(pa.table(dict(zip(names, columns, strict=True))))
    cached = flights.crossJoin(spark.range(COPIES)).drop("id").repartition(2).cache()
    structs = cached.withColumn("key", F.col("tailnum")).na.fill("none", ["key"])
    return structs, structs.select("key", F.to_json(F.struct(*names)).alias("value"))


def write(rows: DataFrame, endpoint: str) -> None:
    """Write rows to the journals."""
    writer = rows.write.format("journal").mode("append").option("endpoint", endpoint)
    writer.options(selector="name:prefix=bench/sink/", ledger="bench-sink-ledger", keyColumn="key").save()


def run(rounds: int) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder) / "cluster") as cluster:
        info = cluster.info
        spark = new_session("bench", master="local[2]")
        try:
            with SyncJournalClient(info.endpoint, file_root=info.file_root) as client:
                create_journals(client, JOURNALS, fragment_bytes=64 << 20)
                structs, texts = frames(spark)
                rows = structs.count()

                def written(rows_to_write: DataFrame) -> Callable[[], float]:
                    def once() -> float:
                        begun = time.perf_counter()
                        write(rows_to_write, info.endpoint)
                        return rows / (time.perf_counter() - begun)

                    return once

                for name, subject in (("columns", structs), ("texts of to_json", texts)):
                    before = sum(map(client.head, JOURNALS))
                    written(subject)()
                    size = sum(map(client.head, JOURNALS)) - before
                    floor_name = f"plain appends of the same {size >> 20} MiB by two threads"

                    def append(size: int = size) -> float:
                        content = b"x" * (_PIECE - 1) + b"\n"
                        begun = time.perf_counter()
                        with ThreadPoolExecutor(2) as threads:
                            for _ in threads.map(
                                lambda number: client.append(JOURNALS[number % len(JOURNALS)], content),
                                range(size // _PIECE),
                            ):
                                pass
                        return rows / (time.perf_counter() - begun)

                    subjects, floors = measure_pairs(rounds, append, written(subject))
                    figures.append(Figure(f"Spark sink, {name}", "rows/s", subjects, floors, floor_name))
        finally:
            spark.stop()
    return figures
