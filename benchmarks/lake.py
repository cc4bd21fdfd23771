"""Rows per second into an Iceberg table, exactly once, in a warm session: by a whole consumer, and by the store alone.

A consumer reads journals, selects committed messages, writes and commits. Its floor is Spark alone, without
exactly-once: it reads the same journals, uncommitted, and writes the same columns to Parquet files with the same codec.
The second figure measures the store alone: it writes rows in Spark's memory to files of a table, and commits them with
a checkpoint under the fence. Its floor is Spark's own Parquet writer, for the same rows.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pyiceberg.catalog.sql import SqlCatalog
from sqlalchemy import BigInteger, Column, Double, MetaData, Table, Text

from benchmarks.journals import create_journals
from benchmarks.messages import MESSAGES, message_content
from benchmarks.runner import Figure, measure_pairs
from coranto.client import ClientConfig
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.messages.checkpoints import Checkpoint
from coranto_consumers.spark import IcebergStore, Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.session.sessions import new_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOURNALS = tuple(f"bench/lake/{number}" for number in range(4))
CORES = 2
COLUMNS = "id BIGINT, carrier STRING, delay DOUBLE, origin STRING, at STRING"
_numbers = itertools.count()


class Rows:
    """Appends each message as a row."""

    sources = "name:prefix=bench/lake/"
    value_schema = COLUMNS

    def __init__(self) -> None:
        self.name = f"rows_{next(_numbers)}"
        self.table = Table(
            self.name,
            MetaData(),
            Column("id", BigInteger),
            Column("carrier", Text),
            Column("delay", Double),
            Column("origin", Text),
            Column("at", Text),
        )

    def outputs(self, committed: DataFrame) -> Outputs:
        return Outputs(tables=[TableOutput(self.table, committed.select(*self.table.columns.keys()))])


def _publish(config: ClientConfig, files: Path) -> int:
    """Append the messages to all journals, and write them to files. Return their number."""
    with SyncJournalClient.of(config) as client:
        create_journals(client, JOURNALS, fragment_bytes=8 << 20)
        for journal in JOURNALS:
            content = message_content().splitlines(keepends=True)
            for begin in range(0, len(content), 20_000):
                client.append(journal, b"".join(content[begin : begin + 20_000]))
            messages = [line for line in content if b'"carrier"' in line]  # Without acknowledgements.
            (files / f"{journal.rpartition('/')[2]}.json").write_bytes(b"".join(messages))
    return MESSAGES * len(JOURNALS)


def run(rounds: int) -> list[Figure]:
    with tempfile.TemporaryDirectory() as name, EmbeddedCluster(Path(name) / "cluster") as cluster:
        folder = Path(name)
        (folder / "json").mkdir()
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root)
        rows = _publish(config, folder / "json")
        spark = new_session("bench", master=f"local[{CORES}]")
        try:
            (folder / "lake").mkdir()
            catalog = SqlCatalog("lake", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/lake")
            figures = [
                _appended(spark, config, catalog, folder, rows, rounds),
                _written(spark, catalog, folder, rows, rounds),
            ]
            catalog.engine.dispose()
            return figures
        finally:
            spark.stop()


def _appended(
    spark: SparkSession, config: ClientConfig, catalog: SqlCatalog, folder: Path, rows: int, rounds: int
) -> Figure:
    def consumed() -> float:
        application = Rows()
        store = IcebergStore(catalog, application.table)
        consumer = SparkConsumer(application, config, store, spark, ConsumerOptions(max_transaction_bytes=1 << 30))
        begun = time.perf_counter()
        report = consumer.run_until_caught_up()
        seconds = time.perf_counter() - begun
        assert (report.transactions, report.messages) == (1, rows), report
        table = catalog.load_table(f"default.{application.name}")
        assert table.scan().count() == rows
        catalog.purge_table(f"default.{application.name}")
        return rows / seconds

    def copied() -> float:
        place = folder / "parquet"
        begun = time.perf_counter()
        options = {"endpoint": config.endpoint, "fileRoot": str(config.file_root), "selector": Rows.sources}
        read = spark.read.format("journal").options(**options).option("isolation", "read_uncommitted")
        frame = read.schema(f"{COLUMNS}, _flags INT").load().where("_flags != 2").drop("_flags")
        _write_parquet(frame, place)
        seconds = time.perf_counter() - begun
        return _checked(spark, place, rows) / seconds

    subjects, floors = measure_pairs(rounds, copied, consumed)
    floor = "Spark copying the same journals to Parquet files, without exactly-once"
    return Figure("Spark consumer into Iceberg, appended", "rows/s", subjects, floors, floor)


def _written(spark: SparkSession, catalog: SqlCatalog, folder: Path, rows: int, rounds: int) -> Figure:
    frame = spark.read.schema(COLUMNS).json(str(folder / "json")).repartition(2 * CORES).cache()
    assert frame.count() == rows
    application = Rows()
    store = IcebergStore(catalog, application.table)
    fence = store.raise_fence("bench").fence
    output = TableOutput(application.table, frame)

    def committed() -> float:
        begun = time.perf_counter()
        store.commit("bench", fence, [store.write(output, "bench", fence)], Checkpoint(), lambda: None)
        return rows / (time.perf_counter() - begun)

    def written() -> float:
        place = folder / "parquet"
        begun = time.perf_counter()
        _write_parquet(frame, place)
        seconds = time.perf_counter() - begun
        return _checked(spark, place, rows) / seconds

    subjects, floors = measure_pairs(rounds, written, committed)
    table = catalog.load_table(f"default.{application.name}")
    assert table.scan().count() == rows * (rounds + 1)
    frame.unpersist()
    floor = "Spark writing the same rows to Parquet files"
    return Figure("Iceberg store, rows that Spark holds", "rows/s", subjects, floors, floor)


def _write_parquet(frame: DataFrame, place: Path) -> None:
    frame.write.option("compression", "zstd").parquet(str(place))


def _checked(spark: SparkSession, place: Path, rows: int) -> int:
    """Check the number of rows in a folder of Parquet files, remove the folder, and return the number."""
    assert spark.read.parquet(str(place)).count() == rows
    shutil.rmtree(place)
    return rows
