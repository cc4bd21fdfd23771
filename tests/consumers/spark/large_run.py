"""Many messages in many journals, read by the source and by a consumer, compared with DuckDB's reading.

    python -m tests.consumers.spark.large_run --messages 10000000 --journals 64

The journals have transactions of many writers, duplicates, rollbacks and transactions that stay open. A consumer
appends each committed message to a table of PostgreSQL, sums them by key in a second table, and publishes every
hundredth. It crashes between a commit and its acknowledgements, and another instance continues. All three, and a read
by the source, must equal DuckDB's rows of the written lines. `test_large_run.py` runs it small.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, Double, MetaData, String, Table

from coranto.client import ClientConfig, SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages.uuids import clock_from_ns
from coranto.wire import protocol_pb2 as pb
from coranto_consumers.spark import Add, Hooks, JournalOutput, Outputs, SparkConsumer, Step, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.session.sessions import new_session
from coranto_consumers.stores import SqlStore
from tests.consumers.spark.large_history import History
from tests.consumers.spark.large_truth import Truth
from tests.servers.sql import PostgresServer

IN, OUT = "large/in/", "large/out/"
SINKS = tuple(f"{OUT}{n}" for n in range(4))
SCHEMA = "n BIGINT, k STRING, v DOUBLE"
COPIED = Table(
    "copied",
    MetaData(),
    Column("journal", String(40)),
    Column("begin", BigInteger),
    Column("n", BigInteger),
    Column("k", String(10)),
    Column("v", Double),
)
TOTALS = Table(
    "totals",
    MetaData(),
    Column("k", String(10), primary_key=True),
    Column("messages", BigInteger),
    Column("total", BigInteger),
    Column("sum", Double),
)
EVERY_HUNDREDTH = 100


class Copies:
    """Copy each message, sum messages by key, and publish every hundredth."""

    name = "large"
    sources = f"name:prefix={IN}"
    value_schema = SCHEMA

    def outputs(self, committed: DataFrame) -> Outputs:
        copied = committed.selectExpr("_journal AS journal", "_offset AS begin", "n", "k", "v")
        totals = committed.groupBy("k").agg(
            F.count("*").alias("messages"), F.sum("n").alias("total"), F.sum("v").alias("sum")
        )
        passed = committed.where(f"n % {EVERY_HUNDREDTH} = 0").selectExpr("k AS key", "struct(n, k, v) AS value")
        adds = {"messages": Add(), "total": Add(), "sum": Add()}
        return Outputs(
            tables=[TableOutput(COPIED, copied), TableOutput(TOTALS, totals, keys=["k"], merge=adds)],
            journals=[JournalOutput(passed, f"name:prefix={OUT}")],
        )


class _Crash(Exception):
    pass


class CrashAfterACommit(Hooks):
    """End a consumer after its first commit, before the acknowledgements, while the next input is read."""

    def on_step(self, step: Step) -> None:
        if step is Step.COMMITTED:
            raise _Crash


@dataclass
class LargeRun:
    """A run in `folder`, with journals of a cluster and a database at `store_url`. `say` receives its progress."""

    spark: SparkSession
    config: ClientConfig
    store_url: str
    folder: Path
    messages: int
    journals: int
    seed: int = 1
    fragment_bytes: int = 16 << 20
    say: Callable[[str], None] = lambda text: None
    written: dict[str, Path] = field(default_factory=dict)
    bytes: int = 0

    def write(self) -> None:
        """Write the journals' histories, and the same lines into files."""
        names = [f"{IN}{n:03}" for n in range(self.journals)]
        with SyncJournalClient.of(self.config) as client:
            client.apply([pb.ApplyRequest.Change(upsert=self._spec(name)) for name in (*names, *SINKS)])
            each, clock = self.messages // self.journals, clock_from_ns(time.time_ns())
            for number, name in enumerate(names):
                batch = min(400, max(5, each // 100))
                history = History(self.seed * 1000 + number, number * each, each, clock, batch)
                self.written[name] = self.folder / f"{number}.lines"
                with self.written[name].open("wb") as file:
                    held = bytearray()
                    for content in history.appends():
                        file.write(content)
                        held += content
                        if len(held) > 1 << 20:
                            client.append(name, bytes(held))
                            held.clear()
                    client.append(name, bytes(held))
                    self.bytes += file.tell()
        self.say(f"wrote {each * self.journals:,} messages, {self.bytes:,} bytes with duplicates and acknowledgements")

    def _spec(self, name: str) -> pb.JournalSpec:
        spec = pb.JournalSpec(name=name, replication=1, labels=label_set({CONTENT_TYPE: JSON_LINES}))
        spec.fragment.length = self.fragment_bytes
        spec.fragment.compression_codec = pb.ZSTANDARD
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.FromSeconds(1)
        return spec

    def read(self) -> int:
        """Read committed messages by the source into Parquet files, and return the number of tasks."""
        rows = self._committed(IN).selectExpr("_journal AS journal", "_offset AS begin", "n", "k", "v")
        rows.write.parquet(str(self.folder / "read"))
        return rows.rdd.getNumPartitions()

    def _committed(self, prefix: str) -> DataFrame:
        options = {"endpoint": self.config.endpoint, "selector": f"name:prefix={prefix}"}
        if self.config.file_root is not None:
            options["fileRoot"] = str(self.config.file_root)
        return (
            self.spark.read.format("journal")
            .options(**options)
            .schema(f"{SCHEMA}, _journal STRING, _offset BIGINT")
            .load()
        )

    def consume(self) -> int:
        """Consume the journals with a crash in between, and return the number of transactions."""
        options = ConsumerOptions(max_transaction_bytes=min(256 << 20, self.bytes // 2))
        crashing = SparkConsumer(Copies(), self.config, self.store_url, self.spark, options, hooks=CrashAfterACommit())
        try:
            crashing.run_until_caught_up()
        except _Crash:
            self.say("the consumer has crashed after its first commit, before the acknowledgements")
        else:
            raise AssertionError("the consumer should crash after its first commit")
        consumer = SparkConsumer(Copies(), self.config, self.store_url, self.spark, options, on_progress=self._progress)
        report = consumer.run_until_caught_up()
        assert report.replayed_intents, "the acknowledgements of the crashed instance are appended again"
        self._committed(OUT).select("n", "k", "v").write.parquet(str(self.folder / "published"))
        with SqlStore(self.store_url).engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            for table in (COPIED, TOTALS):
                with (
                    (self.folder / f"{table.name}.csv").open("wb") as file,
                    driver.cursor() as cursor,
                    cursor.copy(f"COPY {table.name} TO STDOUT (FORMAT csv)") as copy,
                ):
                    for block in copy:
                        file.write(block)
        return report.transactions + 1

    def _progress(self, report: Any) -> None:
        self.say(f"{report.transactions} transactions, {report.messages:,} messages, {report.lag_bytes:,} bytes behind")

    def compare(self) -> dict[str, int]:
        """Compare all read, written and published rows with DuckDB's, and return its counts.

        Raises AssertionError for a difference.
        """
        with Truth(self.written, self.folder / "spill") as truth:
            rows = ("journal", "begin", "n", "k", "v")
            copied = f"read_csv('{self.folder}/copied.csv', header = false, columns = {{{_types(COPIED)}}})"
            totals = f"read_csv('{self.folder}/totals.csv', header = false, columns = {{{_types(TOTALS)}}})"
            added = "(SELECT k, count(*) AS messages, sum(n) AS total, sum(v) AS sum FROM committed GROUP BY k)"
            passed = f"(SELECT * FROM committed WHERE n % {EVERY_HUNDREDTH} = 0)"
            for what, found, expected, columns in (
                ("read by the source", f"read_parquet('{self.folder}/read/*.parquet')", "committed", rows),
                ("appended by the consumer", copied, "committed", rows),
                ("added up by the consumer", totals, added, tuple(TOTALS.columns.keys())),
                ("published", f"read_parquet('{self.folder}/published/*.parquet')", passed, ("n", "k", "v")),
            ):
                differences = truth.differences(found, expected, columns)
                assert not differences, f"{what}: {differences}"
                self.say(f"{what}: {truth.count(found):,} rows, as DuckDB has them")
            counts = {
                "lines": truth.count("lines"),
                "messages": truth.count("lines WHERE n IS NOT NULL"),
                "committed": truth.count("committed"),
                "distinct": truth.count("(SELECT DISTINCT n FROM lines WHERE n IS NOT NULL)"),
            }
            self.say(", ".join(f"{count:,} {what}" for what, count in counts.items()))
            return counts


def _types(table: Table) -> str:
    kinds = {BigInteger: "BIGINT", Double: "DOUBLE", String: "VARCHAR"}
    return ", ".join(f"'{name}': '{kinds[type(column.type)]}'" for name, column in table.columns.items())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.consumers.spark.large_run", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--journals", type=int, default=64)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun = time.perf_counter()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.perf_counter() - begun:7.1f} s  {text}\n")
        sys.stdout.flush()

    with (
        tempfile.TemporaryDirectory(prefix="coranto-large-") as folder,
        EmbeddedCluster(Path(folder) / "cluster") as cluster,
        PostgresServer() as server,
    ):
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root)
        spark = new_session("large", master=f"local[{arguments.cores}]")
        try:
            run = LargeRun(
                spark,
                config,
                server.new_database(),
                Path(folder),
                arguments.messages,
                arguments.journals,
                arguments.seed,
                say=say,
            )
            run.write()
            tasks = run.read()
            say(f"read by the source in {tasks} tasks")
            transactions = run.consume()
            say(f"consumed in {transactions} transactions")
            run.compare()
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
