"""Uses each feature of Coranto on the installed PySpark, and prints the results as JSON.

`test_spark_versions.py` runs it with each version. A feature is true if it works, or else the PySpark version that the
error (VersionTooOld) requires. Any other error ends the program.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, String, Table

from coranto.errors import VersionTooOld
from coranto.testing import SyncCluster
from coranto_consumers.spark import (
    Add,
    Outputs,
    SparkConsumer,
    TableOutput,
    bytes_behind,
    error_of_task,
    exactly_once,
    new_session,
    register,
)

GOOD, BAD, COPIES = "shop/orders/0", "shop/odd/0", "shop/copies/0"
SCHEMA = "n BIGINT, _journal STRING, _offset BIGINT"
QUERY_SECONDS = 600
"""The longest wait for a query on a loaded machine."""
LIMITED = {"maxBytesPerTrigger": "6000", "trigger": "processingTime"}
MOST = 470
"""The maximum messages of such a batch."""
SUMS = Table("sums", MetaData(), Column("kind", String(10), primary_key=True), Column("n", BigInteger, nullable=False))


def line(n: int) -> bytes:
    """A message of 13 bytes."""
    return b'{"n":%6d}\n' % n


class Sums:
    """Adds up the messages by their parity."""

    name = "sums"
    sources = f"name={GOOD}"
    value_schema = "n BIGINT"

    def outputs(self, committed: DataFrame) -> Outputs:
        return outputs(committed)


def outputs(rows: DataFrame) -> Outputs:
    kind = F.when(F.col("n") % 2 == 0, "even").otherwise("odd").alias("kind")
    return Outputs(tables=[TableOutput(SUMS, rows.groupBy(kind).agg(F.sum("n").alias("n")), ["kind"], {"n": Add()})])


class Trial:
    """A session, and a broker with three journals: with 1000 messages, with a line that is not JSON, and empty."""

    def __init__(self, spark: SparkSession, cluster: SyncCluster, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.client = cluster.client()
        for journal in (GOOD, BAD, COPIES):
            cluster.create(journal)
        self.written = 0
        self.add(1000)
        self.client.append(BAD, b"no JSON\n")

    def add(self, count: int) -> None:
        self.client.append(GOOD, b"".join(map(line, range(self.written, self.written + count))))
        self.written += count

    @property
    def all(self) -> list[int]:
        return list(range(self.written))

    def endpoint(self, reader: Any, **options: str) -> Any:
        return reader.options(endpoint=self.client.config.endpoint, **options)

    def read(self, name: str = "journal", **options: str) -> DataFrame:
        frame = self.endpoint(self.spark.read.format(name), **options).schema(SCHEMA).load()
        assert isinstance(frame, DataFrame)
        return frame

    def stream(self, **options: str) -> DataFrame:
        return stream(self.spark, self.client.config.endpoint, **options)

    # -- Features ------------------------------------------------------------------------------------------------

    def registration(self) -> None:
        """`register`, of a source that Spark has discovered already"""
        register(self.spark)
        register(self.spark)
        assert numbers(self.read(subscribe=GOOD)) == self.all

    def batch_reads(self) -> None:
        """`spark.read`"""
        assert numbers(self.read(subscribe=GOOD, maxBytesPerPartition="5000")) == self.all

    def filters(self) -> None:
        """Filters on `_journal`, `_clock` and `_offset` leave out content"""
        odd = self.read(subscribe=f"{GOOD},{BAD}", mode="FAILFAST").where(F.col("_journal") == GOOD)
        try:
            assert numbers(odd) == self.all
        except PySparkException as error:
            if BAD not in str(error_of_task(error)):
                raise
            # The journal was read.
            raise VersionTooOld("filters", "PySpark", pyspark.__version__, "4.1") from error

    def batch_writes(self) -> None:
        """`DataFrame.write`, each row once"""
        before = self.copies()
        frame = self.read(subscribe=GOOD).select("n")
        for _ in range(2):
            writer = frame.write.format("journal").mode("append")
            self.endpoint(writer, subscribe=COPIES, ledger="shop/ledger", writerId="copies/1").save()
        assert self.copies() == sorted(before + self.all)

    def consumer(self) -> None:
        """`SparkConsumer`"""
        store = self.folder / "sums.db"
        for _ in range(2):
            SparkConsumer(Sums(), self.client.config, f"sqlite:///{store}", self.spark).run_until_caught_up()
            assert self.sums(store) == sum(self.all)
            self.add(500)

    def streaming(self) -> None:
        """`spark.readStream`, each message once over restarts, in batches of `maxBytesPerTrigger`"""
        batches: dict[int, list[int]] = {}
        for count in (0, 700):
            self.add(count)
            self.run(
                self.stream(**LIMITED),
                lambda frame, batch: batches.update({batch: numbers(frame)}),
                lambda: sum(map(len, batches.values())) >= self.written,
            )
        assert sorted(n for batch in batches.values() for n in batch) == self.all
        assert max(map(len, batches.values())) <= MOST

    def killed(self) -> None:
        """`spark.readStream`, each message once although drivers are killed within batches, while more is written"""
        folder = self.folder / "killed"
        folder.mkdir()
        for batch, count in ((0, 0), (2, 400), (3, 400)):
            self.add(count)
            words = [sys.executable, __file__, self.client.config.endpoint, str(folder), str(batch)]
            env = {
                "TMPDIR": f"{folder}",
                "SPARK_LOCAL_DIRS": f"{folder}",
                "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={folder}",
            }
            done = subprocess.run(words, start_new_session=True, env={**os.environ, **env}, check=False)
            assert done.returncode == -signal.SIGKILL
        self.add(400)
        self.run(
            self.stream(**LIMITED),
            kept_in(folder),
            lambda: len(read_batches(folder)) >= self.written,
            name="killed/checkpoint",
        )
        assert read_batches(folder) == self.all

    def stateful(self) -> None:
        """`exactly_once` in `foreachBatch`"""
        store = self.folder / "batches.db"
        for _ in range(2):
            self.add(100)
            handler = exactly_once(f"sqlite:///{store}", outputs, name="batches")
            self.run(self.stream(), handler, lambda: self.sums(store) == sum(self.all), name="stateful")

    def stream_writes(self) -> None:
        """`DataFrame.writeStream`, each row once over restarts"""
        before = self.copies()
        for _ in range(2):
            self.add(300)
            writer = self.stream(**LIMITED).select("n").writeStream.format("journal")
            writer = self.endpoint(writer, subscribe=COPIES, ledger="shop/ledger-of-queries")
            query = writer.option("checkpointLocation", str(self.folder / "copies")).start()
            wanted = sorted(before + self.all)
            self.until(query, lambda wanted=wanted: len(self.copies()) >= len(wanted))
            assert self.copies() == wanted

    def once(self) -> None:
        """`Trigger.Once` and `Trigger.AvailableNow` read all that there is, with a checkpoint of another trigger too"""
        for name, options, trigger in (
            ("once", LIMITED, {"once": True}),
            ("now", LIMITED, {"availableNow": True}),
            ("new", {}, {"availableNow": True}),
        ):
            begin = 0
            if options:
                self.run(self.stream(**options), lambda frame, _: None, lambda: True, name=name, settles=True)
                begin = self.written
            self.add(2 * MOST)
            assert self.read_now(self.stream(), name, trigger) == self.all[begin:], name

    def available_now(self) -> None:
        """`Trigger.AvailableNow` in batches of `maxBytesPerTrigger`"""
        assert self.read_now(self.stream(maxBytesPerTrigger="6000"), "limited", {"availableNow": True}) == self.all

    def lag(self) -> None:
        """`bytes_behind`"""
        query = self.stream().writeStream.foreachBatch(lambda frame, _: frame.count()).start()
        try:
            waited(lambda: query.lastProgress is not None and query.lastProgress["numInputRows"] > 0, query)
            assert bytes_behind(query.lastProgress) == {GOOD: 0}
        finally:
            query.stop()

    # -- Shared steps --------------------------------------------------------------------------------------------

    def read_now(self, frame: DataFrame, name: str, trigger: dict[str, Any]) -> list[int]:
        """Run a query that ends by itself, and return the numbers it read."""
        rows: list[int] = []
        writer = frame.writeStream.foreachBatch(lambda batch, _: rows.extend(numbers(batch)))
        self.ended(writer.option("checkpointLocation", str(self.folder / name)).trigger(**trigger).start())
        return sorted(rows)

    def copies(self) -> list[int]:
        return numbers(self.read(subscribe=COPIES))

    def sums(self, store: Path) -> int:
        if not store.exists():
            return -1
        with sqlite3.connect(store) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sums'").fetchall():
                return -1
            return int(connection.execute("SELECT sum(n) FROM sums").fetchone()[0] or 0)

    def run(
        self,
        frame: DataFrame,
        handler: Callable[[DataFrame, int], Any],
        done: Callable[[], bool],
        *,
        name: str = "run",
        settles: bool = False,
    ) -> None:
        """Run a query until `done`. If it `settles`, it has also committed all content."""
        query = (
            frame.writeStream.foreachBatch(handler)
            .option("checkpointLocation", str(self.folder / name))
            .trigger(processingTime="0 seconds")
            .start()
        )
        self.until(query, done, settles=settles)

    def until(self, query: Any, done: Callable[[], bool], *, settles: bool = False) -> None:
        try:
            waited(done, query)
            if settles:
                query.processAllAvailable()
        finally:
            query.stop()

    def ended(self, query: Any) -> None:
        """Wait for the end of a query. Raises the error of Coranto that ended it."""
        try:
            assert query.awaitTermination(QUERY_SECONDS)
        except PySparkException as error:
            raise error_of_task(error) or error from error
        finally:
            query.stop()


FEATURES = (
    Trial.batch_reads,
    Trial.registration,
    Trial.filters,
    Trial.batch_writes,
    Trial.consumer,
    Trial.streaming,
    Trial.killed,
    Trial.stateful,
    Trial.stream_writes,
    Trial.lag,
    Trial.once,
    Trial.available_now,
)


def numbers(frame: DataFrame) -> list[int]:
    return sorted(row.n for row in frame.select("n").collect())


def stream(spark: SparkSession, endpoint: str, **options: str) -> DataFrame:
    wanted = {"endpoint": endpoint, "subscribe": GOOD, "startingOffsets": "earliest", **options}
    frame = spark.readStream.format("journal").options(**wanted).schema(SCHEMA).load()
    assert isinstance(frame, DataFrame)
    return frame


def kept_in(folder: Path, killed_in: int = -1) -> Callable[[DataFrame, int], None]:
    """Return a handler that keeps each batch in a file, and then ends all processes of this driver in one batch."""

    def handler(frame: DataFrame, batch: int) -> None:
        (folder / "partial").write_text(json.dumps(numbers(frame)))
        (folder / "partial").rename(folder / f"{batch}.json")
        if batch == killed_in:
            os.killpg(0, signal.SIGKILL)

    return handler


def read_batches(folder: Path) -> list[int]:
    return sorted(n for path in folder.glob("*.json") for n in json.loads(path.read_text()))


def run_until_killed(endpoint: str, folder: str, batch: str) -> None:
    """Run a query with its checkpoint until it ends itself in a batch."""
    writer = stream(new_session("killed", master="local[1]", short=True), endpoint, **LIMITED).writeStream
    writer = writer.foreachBatch(kept_in(Path(folder), int(batch)))
    writer.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()


def waited(done: Callable[[], bool], query: Any) -> None:
    deadline = time.monotonic() + QUERY_SECONDS
    while not done():
        if (error := query.exception()) is not None:
            raise error_of_task(error) or error
        assert query.isActive, "the query has ended"
        assert time.monotonic() < deadline, "the query did not reach the expected state"
        time.sleep(0.2)


def tried(trial: Trial) -> Iterator[tuple[str, bool | str]]:
    for feature in FEATURES:
        name = (feature.__doc__ or "").strip()
        try:
            feature(trial)
        except VersionTooOld as error:
            yield name, error.needed
        else:
            yield name, True
        sys.stderr.write(f"tried {name}\n")


def main() -> None:
    """Try all features, and print the results."""
    with tempfile.TemporaryDirectory() as folder, SyncCluster(brokers=1) as cluster:
        spark = new_session("features", master="local[2]", short=True)
        try:
            found = dict(tried(Trial(spark, cluster, Path(folder))))
        finally:
            spark.stop()
    sys.stdout.write(json.dumps({"pyspark": pyspark.__version__, "features": found}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        run_until_killed(*sys.argv[1:])
    else:
        main()
