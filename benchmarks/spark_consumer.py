"""Messages per second that a Spark consumer writes into PostgreSQL exactly once in a warm session.

The floor is COPY of the same rows, already converted to text, by one connection for each core. The note has the seconds
of the first transaction of a new session. The fixed cost of a transaction is measured with one message.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, Double, MetaData, Table, Text, func, select

from benchmarks.journals import create_journals
from benchmarks.messages import MESSAGES, message_content
from benchmarks.runner import Figure, measure_pairs
from coranto.client import ClientConfig
from coranto.client.sync import SyncJournalClient
from coranto.cluster import EmbeddedCluster
from coranto_consumers.spark import Outputs, Replace, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.session.sessions import new_session
from coranto_consumers.stores import SqlStore
from tests.servers.sql import PostgresServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOURNAL = "bench/consumer"
SMALL = "bench/small"
CORES = 2
_numbers = itertools.count()


def _new_table(keyed: bool) -> Table:
    return Table(
        f"rows_{next(_numbers)}",
        MetaData(),
        Column("id", BigInteger, primary_key=keyed, autoincrement=False),
        Column("carrier", Text),
        Column("delay", Double),
        Column("origin", Text),
        Column("at", Text),
    )


class Rows:
    """Writes each message as a row: appends it, or replaces the row of its key."""

    value_schema = "id BIGINT, carrier STRING, delay DOUBLE, origin STRING, at STRING"

    def __init__(self, table: Table, keyed: bool, journal: str = JOURNAL) -> None:
        self.name = table.name
        self.sources = f"name={journal}"
        self._table = table
        self._keyed = keyed

    def outputs(self, committed: DataFrame) -> Outputs:
        names = self._table.columns.keys()
        rows = committed.select(*names)
        if not self._keyed:
            return Outputs(tables=[TableOutput(self._table, rows)])
        merge = {name: Replace() for name in names if name != "id"}
        return Outputs(tables=[TableOutput(self._table, rows, keys=["id"], merge=merge)])


class Bench:
    """A journal of messages, and a database to write them to."""

    def __init__(self, config: ClientConfig, url: str) -> None:
        self._config = config
        self._store = SqlStore(url)
        self._texts: list[bytes] = []

    def consumed(self, spark: SparkSession, keyed: bool) -> float:
        """Consume the journal in one transaction, and return the messages per second."""
        table = _new_table(keyed)
        consumer = SparkConsumer(
            Rows(table, keyed), self._config, self._store.url, spark, ConsumerOptions(max_transaction_bytes=1 << 30)
        )
        begun = time.perf_counter()
        report = consumer.run_until_caught_up()
        seconds = time.perf_counter() - begun
        assert (report.transactions, report.messages) == (1, MESSAGES), report
        if not self._texts:
            self._texts = self._copied_out(table)
        self._drop(table)
        return MESSAGES / seconds

    def consumer_of_few(self, spark: SparkSession) -> Callable[[], float]:
        """Return a function that consumes one message in one transaction and returns the transactions per second."""
        consumer = SparkConsumer(
            Rows(_new_table(False), False, SMALL),
            self._config,
            self._store.url,
            spark,
            ConsumerOptions(max_transaction_bytes=1 << 30),
        )
        message = message_content().partition(b"\n")[0] + b"\n"

        def consumed() -> float:
            with SyncJournalClient.of(self._config) as client:
                client.append(SMALL, message)
            begun = time.perf_counter()
            report = consumer.run_until_caught_up()
            assert report.transactions == 1, report
            return 1 / (time.perf_counter() - begun)

        return consumed

    def copied(self, keyed: bool) -> float:
        """Copy the same rows, and return the rows per second."""
        table = _new_table(keyed)
        self._store.create_tables(table)
        begun = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(CORES) as pool:
            list(pool.map(self._copy_in, itertools.repeat(table), self._texts))
        seconds = time.perf_counter() - begun
        self._drop(table)
        return MESSAGES / seconds

    def _copied_out(self, table: Table) -> list[bytes]:
        """Return the output of COPY for a table, in one part for each core."""
        with self._store.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} TO STDOUT") as copy:
                lines = b"".join(map(bytes, copy)).splitlines(keepends=True)
        return [b"".join(lines[part::CORES]) for part in range(CORES)]

    def _copy_in(self, table: Table, text: bytes) -> None:
        with self._store.engine.begin() as connection:
            driver: Any = connection.connection.driver_connection
            with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} FROM STDIN") as copy:
                copy.write(text)

    def _drop(self, table: Table) -> None:
        """Drop a table. Raises AssertionError if it does not hold each message once."""
        with self._store.engine.begin() as connection:
            found = connection.execute(select(func.count(), func.count(table.c.id.distinct()))).one()
            assert tuple(found) == (MESSAGES, MESSAGES), found
            table.drop(connection)


def _bare_job(spark: SparkSession) -> float:
    """Run a job of one task in a Python worker, and return the jobs per second."""
    begun = time.perf_counter()
    assert spark.range(1, numPartitions=1).mapInArrow(lambda batches: batches, "id BIGINT").count() == 1
    return 1 / (time.perf_counter() - begun)


def run(rounds: int) -> list[Figure]:
    figures = []
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster(Path(folder) / "cluster") as cluster,
        PostgresServer() as server,
    ):
        config = ClientConfig(cluster.info.endpoint, cluster.info.file_root)
        with SyncJournalClient.of(config) as client:
            create_journals(client, (JOURNAL, SMALL), fragment_bytes=8 << 20)
            content = message_content().splitlines(keepends=True)
            for begin in range(0, len(content), 20_000):
                client.append(JOURNAL, b"".join(content[begin : begin + 20_000]))
        bench = Bench(config, server.new_database())
        spark = new_session("bench", master=f"local[{CORES}]")
        try:
            first = bench.consumed(spark, False)
            note = f"the session's first transaction took {MESSAGES / first:.1f} s"
            for keyed, name in ((False, "appended"), (True, "upserted by key")):
                subjects, floors = measure_pairs(
                    rounds,
                    lambda keyed=keyed: bench.copied(keyed),  # type: ignore[misc]
                    lambda keyed=keyed: bench.consumed(spark, keyed),  # type: ignore[misc]
                )
                floor = f"COPY of the same rows, made text beforehand, by {CORES} connections"
                figures.append(Figure(f"Spark consumer, {name}", "messages/s", subjects, floors, floor, note))
            few, jobs = measure_pairs(rounds, lambda: _bare_job(spark), bench.consumer_of_few(spark))
            note = f"a transaction of one message took {1 / statistics.median(few):.2f} s"
            floor = "jobs of one task in a Python worker that do nothing"
            figures.append(Figure("Spark consumer, transactions of one message", "1/s", few, jobs, floor, note))
        finally:
            spark.stop()
    return figures
