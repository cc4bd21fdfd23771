"""Rows per second of `format("journal")` against Spark reading the same records from JSON files.

Both sides parse the flights' columns from JSON with the same schema, and aggregate over some of them so that Spark does
not prune these. The journal side reads persisted fragments and sequences messages by UUID. Its workers parse the
columns, or Spark does with `from_json`. The floor reads plain files with the same lines. Further figures compare reads
of one large journal by several tasks with its read by one task.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.journals import create_journals
from benchmarks.runner import Figure, measure_pairs
from benchmarks.spark_reads import SCHEMA, TimedRead
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.messages import JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto_consumers.spark.session.sessions import new_session
from coranto_flights.data import iter_flights, load_flights

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

JOURNALS = [f"bench/flights/part-{i:03d}" for i in range(4)]
LARGE = "bench/large"
COPIES = 3
TASKS = (1, 2, 4, 8)


def publish_flights(client: SyncJournalClient, files: Path) -> int:
    """Write the flights, COPIES times, to journals, to one large journal, and to files. Return the number of rows."""
    create_journals(client, (*JOURNALS, LARGE), fragment_bytes=8 << 20)
    builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
    large = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
    rows = 0
    files.mkdir()
    records = list(iter_flights(load_flights()))
    for _ in range(COPIES):
        for index, record in enumerate(records):
            builder.add(JOURNALS[index % len(JOURNALS)], record)
            rows += 1
        for journal, content in builder.take_batches(4 << 20):
            client.append(journal, content)
            with (files / f"{journal.rsplit('/', 1)[1]}.json").open("ab") as file:
                file.write(content)
        builder.ack_intents()
        for journal, content in builder.commit().items():
            client.append(journal, content)
        builder.finish()
        for record in records:
            large.add(LARGE, record)
        for journal, content in large.take_batches(4 << 20):
            client.append(journal, content)
        large.ack_intents()
        for journal, content in large.commit().items():
            client.append(journal, content)
        large.finish()
    return rows


def run(rounds: int) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedCluster(Path(folder) / "cluster") as cluster:
        info = cluster.info
        with SyncJournalClient(info.endpoint, file_root=info.file_root) as client:
            rows = publish_flights(client, Path(folder) / "json")
        spark = new_session("bench", master="local[2]")
        try:
            from pyspark.sql import functions as F

            def from_files() -> DataFrame:
                return spark.read.schema(SCHEMA).json(str(Path(folder) / "json"))

            def from_journals(isolation: str, *, parsed_by_workers: bool) -> Callable[[], DataFrame]:
                def frame() -> DataFrame:
                    read = (
                        spark.read.format("journal")
                        .option("endpoint", info.endpoint)
                        .option("fileRoot", str(info.file_root))
                        .option("selector", "name:prefix=bench/flights/")
                        .option("isolation", isolation)
                    )
                    if parsed_by_workers:
                        return read.schema(f"{SCHEMA}, _flags INT").load().where("_flags != 2")
                    parsed = F.from_json(F.col("value").cast("string"), SCHEMA)
                    return read.load().where("flags != 2").select(parsed.alias("v")).select("v.*")

                return frame

            def of_large(tasks: int) -> Callable[[], DataFrame]:
                options = {"endpoint": info.endpoint, "fileRoot": str(info.file_root), "subscribe": LARGE}
                if tasks == 1:
                    options["maxBytesPerPartition"] = str(1 << 40)
                else:
                    options |= {"minPartitions": str(tasks), "maxBytesPerPartition": str(1 << 40)}

                def frame() -> DataFrame:
                    return spark.read.format("journal").options(**options).schema(SCHEMA).load()

                return frame

            floor_name = "Spark reading the same lines from JSON files"
            for isolation, by_workers, name in (
                ("read_uncommitted", True, "uncommitted"),
                ("read_committed", True, "committed"),
                ("read_committed", False, "committed, with from_json"),
            ):
                floor, subject = (
                    TimedRead(rows, from_files),
                    TimedRead(rows, from_journals(isolation, parsed_by_workers=by_workers)),
                )
                subjects, floors = measure_pairs(rounds, floor, subject)
                figures.append(Figure(f"Spark source, {name}", "rows/s", subjects, floors, floor_name))
                spent = subject.by_processor_time[1:], floor.by_processor_time[1:]  # Without the warm-up.
                unit = "rows per s of processor time"
                figures.append(Figure(f"Spark source, {name}, by processor time", unit, *spent, floor_name))
            one_task = f"the same read with {TASKS[0]} task"
            for tasks in TASKS[1:]:
                rates = measure_pairs(rounds, TimedRead(rows, of_large(TASKS[0])), TimedRead(rows, of_large(tasks)))
                figures.append(
                    Figure(f"Spark source, committed, one journal, {tasks} tasks", "rows/s", *rates, one_task)
                )
        finally:
            spark.stop()
    return figures
