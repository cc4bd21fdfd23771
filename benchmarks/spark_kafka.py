"""Spark reading and writing journals, compared with Spark reading and writing Kafka (`--kafka`).

The same lines are in four journals, four partitions of a topic, and four files, with the same number of transactions.
All readers return the flights' columns with one schema, and end in one aggregate. `fetched` in `kafka.py` downloads
Kafka. Both brokers run on this machine. Processor time includes Spark's JVM and its Python workers, and includes the
brokers only in figures that say so.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from benchmarks import kafka, spark_bare, spark_sink, spark_source
from benchmarks.journals import create_journals
from benchmarks.runner import Figure, measure_interleaved
from benchmarks.spark_reads import COLUMNS, SCHEMA, TimedJob, TimedRead, parsed_rows
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto_consumers.spark.session.sessions import new_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOPIC = "bench-flights"
PROCESSOR_RATE = "rows per s of processor time"
FILES = "Spark reading the same lines from JSON files"
_TEXTS = ("sum(length(value))",)
_COLD_SECONDS = 300


def run_source(rounds: int) -> list[Figure]:
    """Measure reads: committed, uncommitted, raw, and the first read of a session."""
    fetched = kafka.fetched()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder) / "cluster") as cluster,
        kafka.KafkaServer(fetched, partitions=len(spark_source.JOURNALS)) as server,
    ):
        info, files = cluster.info, Path(folder) / "json"
        with SyncJournalClient(info.endpoint, file_root=info.file_root) as client:
            rows = spark_source.publish_flights(client, files)
        server.write(TOPIC, sorted(files.iterdir()), transactions=spark_source.COPIES)
        sources = {
            "journal": {
                "endpoint": info.endpoint,
                "fileRoot": str(info.file_root),
                "selector": "name:prefix=bench/flights/",
            },
            "kafka": {
                "kafka.bootstrap.servers": server.address,
                "subscribe": TOPIC,
                "startingOffsets": "earliest",
            },
        }
        cold = {
            kind: _ColdRead(kind, _isolated(kind, options, "read_committed"), fetched.settings, rows)
            for kind, options in sources.items()
        }
        figures = _first_reads(rounds, cold, fetched.connector_version)
        spark = new_session("bench", master="local[2]", settings=fetched.settings)
        try:
            return figures + _warm_reads(rounds, spark, sources, files, rows)
        finally:
            spark.stop()


def _isolated(kind: str, options: Mapping[str, str], isolation: str) -> dict[str, str]:
    return {**options, ("isolation" if kind == "journal" else "kafka.isolation.level"): isolation}


class _ColdRead:
    """The first read of a session, in a separate process. A call returns rows per second."""

    def __init__(self, kind: str, options: Mapping[str, str], settings: Mapping[str, str], rows: int) -> None:
        # A session that only reads journals does not need Kafka's connector.
        settings = settings if kind == "kafka" else {}
        request = {"format": kind, "options": options, "settings": settings, "rows": rows}
        self._command = [sys.executable, "-m", "benchmarks.spark_cold", json.dumps(request)]
        self._rows = rows

    def __call__(self) -> float:
        done = subprocess.run(self._command, stdout=subprocess.PIPE, text=True, timeout=_COLD_SECONDS, check=True)
        return self._rows / float(done.stdout)


def _first_reads(rounds: int, cold: Mapping[str, Callable[[], float]], version: str) -> list[Figure]:
    found = measure_interleaved(rounds, cold, warm_up=False)
    note = f"Kafka's connector has version {version}"
    floor = "Spark's Kafka source, read_committed, in a new session"
    return [Figure("first read of a session, committed", "rows/s", found["journal"], found["kafka"], floor, note)]


def _warm_reads(
    rounds: int, spark: SparkSession, sources: Mapping[str, Mapping[str, str]], files: Path, rows: int
) -> list[Figure]:
    def parsed(kind: str, isolation: str) -> TimedRead:
        return TimedRead(rows, lambda: parsed_rows(spark, kind, _isolated(kind, sources[kind], isolation)))

    def raw(kind: str) -> TimedRead:
        def frame() -> DataFrame:
            reader = spark.read.format(kind).options(**_isolated(kind, sources[kind], "read_committed"))
            if kind == "journal":
                return reader.schema("value STRING, flags INT").load().where("flags != 2")
            return reader.load().select(F.col("value").cast("string"))

        return TimedRead(rows, frame, _TEXTS)

    lines = sorted(files.iterdir())
    bare = {"bare parsed": SCHEMA, "bare raw": "value string"}
    spark_bare.register(spark)
    for name, schema in bare.items():
        spark_bare.prepare(lines, schema, files.with_name(name))

    def prepared(name: str, aggregates: tuple[str, ...]) -> TimedRead:
        return TimedRead(rows, lambda: spark_bare.bare_rows(spark, bare[name], files.with_name(name)), aggregates)

    reads = {
        "bare parsed": prepared("bare parsed", COLUMNS),
        "bare raw": prepared("bare raw", _TEXTS),
        "files": TimedRead(rows, lambda: spark.read.schema(SCHEMA).json(str(files))),
        "texts": TimedRead(rows, lambda: spark.read.text(str(files)), _TEXTS),
        **{
            f"{kind} {isolation}": parsed(kind, f"read_{isolation}")
            for isolation, kind in itertools.product(("committed", "uncommitted"), sources)
        },
        **{f"{kind} raw": raw(kind) for kind in sources},
    }
    rates = measure_interleaved(rounds, reads)
    figures: list[Figure] = []

    def compare(name: str, subject: str, floor: str, floor_name: str) -> None:
        figures.extend(_compared(name, rates, reads, (subject, floor), floor_name))

    for isolation in ("committed", "uncommitted"):
        compare(
            isolation,
            f"journal {isolation}",
            f"kafka {isolation}",
            f"Spark's Kafka source, read_{isolation}, from_json",
        )
    compare("committed", "journal committed", "files", FILES)
    compare("raw values, committed", "journal raw", "kafka raw", "Spark's Kafka source, read_committed")
    compare("raw values, committed", "journal raw", "files", FILES)
    compare("raw values, committed", "journal raw", "texts", "Spark reading the same lines from files as texts")
    for name, kafkas, floor_name in (
        ("bare parsed", "kafka committed", "Spark's Kafka source, read_committed, from_json"),
        ("bare raw", "kafka raw", "Spark's Kafka source, read_committed"),
    ):
        compare(f"batches made beforehand, {name.removeprefix('bare ')}", name, kafkas, floor_name)
        compare(f"batches made beforehand, {name.removeprefix('bare ')}", name, "files", FILES)
    return figures


def _compared(
    name: str,
    rates: Mapping[str, list[float]],
    jobs: Mapping[str, TimedJob],
    pair: tuple[str, str],
    floor_name: str,
) -> list[Figure]:
    """Return the figures of a subject and a floor, by elapsed and by processor time."""
    subject, floor = pair
    spent = jobs[subject].by_processor_time[1:], jobs[floor].by_processor_time[1:]  # Without the warm-up.
    return [
        Figure(name, "rows/s", rates[subject], rates[floor], floor_name),
        Figure(f"{name}, by processor time", PROCESSOR_RATE, *spent, floor_name),
    ]


def run_sink(rounds: int) -> list[Figure]:
    """Measure writes of the same rows."""
    fetched = kafka.fetched()
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder) / "cluster") as cluster,
        kafka.KafkaServer(fetched, partitions=len(spark_sink.JOURNALS)) as server,
    ):
        info = cluster.info
        with SyncJournalClient(info.endpoint, file_root=info.file_root) as client:
            create_journals(client, spark_sink.JOURNALS, fragment_bytes=64 << 20)
        spark = new_session("bench", master="local[2]", settings=fetched.settings)
        try:
            structs, texts = spark_sink.frames(spark)
            rows = structs.count()

            def to_kafka() -> None:
                writer = texts.write.format("kafka").option("kafka.bootstrap.servers", server.address)
                writer.option("topic", TOPIC).save()

            writes = {
                "columns": TimedJob(rows, lambda: spark_sink.write(structs, info.endpoint)),
                "texts": TimedJob(rows, lambda: spark_sink.write(texts, info.endpoint)),
                "kafka": TimedJob(rows, to_kafka),
            }
            rates = measure_interleaved(rounds, writes)
            written = spark.read.format("kafka").option("kafka.bootstrap.servers", server.address)
            assert written.option("subscribe", TOPIC).load().count() == (rounds + 1) * rows
            figures: list[Figure] = []
            for name, subject in (("Spark sink, columns", "columns"), ("Spark sink, texts of to_json", "texts")):
                floor_name = "Spark's Kafka sink, texts of to_json"
                figures += _compared(name, rates, writes, (subject, "kafka"), floor_name)
                spent = writes[subject].with_brokers[1:], writes["kafka"].with_brokers[1:]  # Without the warm-up.
                figures.append(
                    Figure(f"{name}, by processor time with the brokers'", PROCESSOR_RATE, *spent, floor_name)
                )
            return figures
        finally:
            spark.stop()
