"""Bytes that Spark fetches from a fragment store for each stored byte: the minimum is 1.

A journal of 64 MiB is stored in three large fragments, behind an HTTP server that counts bytes. A fake broker returns
the locations of fragments. Less is better here: a ratio of 2 means that Spark fetched everything twice.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from sqlalchemy import BigInteger, Column, MetaData, Table

from benchmarks.runner import Figure
from coranto.client import ClientConfig
from coranto.client.loop import LoopThread
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines, ProducerClock, TransactionBuilder, new_producer_id
from coranto.testing.fake_broker import FakeBroker
from coranto.testing.http_store import HttpStore
from coranto_consumers.spark import Outputs, SparkConsumer, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.inputs.locality import executors_of
from coranto_consumers.spark.session.sessions import new_session, warm_up

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOURNAL = "bench/fetching"
FRAGMENTS = 3
CLUSTERS = {
    "2 cores": "local[2]",
    "16 cores": "local[16]",
    "2 executors of 1 core": "local-cluster[2,1,1024]",
    "2 executors of 8 cores": "local-cluster[2,8,1024]",
}
SETTINGS = {
    "spark.executor.memory": "1g",
    # On a busy machine tasks take so long that Spark would move some of them away from their preferred executors.
    "spark.locality.wait": "120s",
}
MESSAGES = 180_000
SMALL = 4 << 20
TEXT = "abcdefghijklmnopqrstuvwxyz" * 8
COUNTS = Table("counts", MetaData(), Column("messages", BigInteger, nullable=False))


class Counts:
    """Counts the messages of each transaction."""

    sources = f"name={JOURNAL}"
    value_schema = "n BIGINT"

    def __init__(self, name: str) -> None:
        self.name = name

    def outputs(self, committed: DataFrame) -> Outputs:
        return Outputs(tables=[TableOutput(COUNTS, committed.selectExpr("count(*) AS messages"))])


def _content() -> bytes:
    builder = TransactionBuilder(new_producer_id(os.urandom), ProducerClock(time.time_ns), JsonLines())
    for n in range(MESSAGES):
        builder.add(JOURNAL, {"n": n, "random": os.urandom(30).hex(), "text": TEXT[n % 26 :]})
    content = builder.take(JOURNAL, 1 << 40)
    builder.ack_intents()
    return content + b"".join(builder.commit().values())


def _store(fake: FakeBroker, loop: LoopThread, store: HttpStore) -> None:
    fake.create(JOURNAL, labels=label_set([(CONTENT_TYPE, JSON_LINES)]))
    lines = _content().splitlines(keepends=True)
    for number in range(FRAGMENTS):
        part = lines[number * len(lines) // FRAGMENTS : (number + 1) * len(lines) // FRAGMENTS]
        loop.run(fake.write(JOURNAL, b"".join(part)))
        fake.journals[JOURNAL].roll_to(store)


def _measured(cluster: str, endpoint: str, store: HttpStore) -> list[Figure]:
    figures = []
    stored = float(sum(len(body) for body, _ in store.objects.values()))

    def measure(name: str, run: Callable[[SparkSession], None]) -> None:
        # Each measure has a new session, because sessions cache fetched content.
        spark = new_session("bench", master=CLUSTERS[cluster], settings=SETTINGS)
        try:
            warm_up(spark)
            while "executors" in cluster and not executors_of(spark):
                time.sleep(0.1)  # The second executor has not registered yet.
            store.fetched.clear()
            run(spark)
        finally:
            spark.stop()
        fetched = float(store.fetched_bytes)
        figures.append(Figure(f"{name}, {cluster}", "bytes", [fetched], [stored], "bytes stored"))

    def read(isolation: str) -> Callable[[SparkSession], None]:
        def run(spark: SparkSession) -> None:
            options = {"endpoint": endpoint, "subscribe": JOURNAL, "isolation": isolation}
            frame = spark.read.format("journal").options(**options, maxBytesPerPartition=str(SMALL)).load()
            assert frame.where("flags != 2").count() == MESSAGES

        return run

    def consume(name: str, transaction_bytes: int) -> Callable[[SparkSession], None]:
        def run(spark: SparkSession) -> None:
            with tempfile.TemporaryDirectory() as folder:
                consumer = SparkConsumer(
                    Counts(name),
                    ClientConfig(endpoint),
                    f"sqlite:///{folder}/store.db",
                    spark,
                    ConsumerOptions(max_transaction_bytes=transaction_bytes),
                )
                assert consumer.run_until_caught_up().messages == MESSAGES

        return run

    measure("source, uncommitted, 4 MiB a task", read("read_uncommitted"))
    measure("source, committed", read("read_committed"))
    measure("consumer, one transaction", consume("one", 1 << 30))
    measure("consumer, transactions of 4 MiB", consume("small", SMALL))
    return figures


@contextmanager
def _home() -> Iterator[None]:
    """Set Spark's home to a folder of links: the workers of `local-cluster` write into it."""
    before = os.environ.get("SPARK_HOME")
    with tempfile.TemporaryDirectory() as folder:
        for entry in Path(pyspark.__file__).parent.iterdir():
            (Path(folder) / entry.name).symlink_to(entry)
        os.environ["SPARK_HOME"] = folder
        try:
            yield
        finally:
            os.environ.pop("SPARK_HOME")
            os.environ |= {} if before is None else {"SPARK_HOME": before}


def run(rounds: int) -> list[Figure]:
    """Count once, regardless of `rounds`: the counts do not depend on the machine."""
    loop = LoopThread("fake-broker")
    fake = FakeBroker()
    try:
        loop.run(fake.__aenter__())
        with _home(), HttpStore() as store:
            _store(fake, loop, store)
            return [figure for cluster in CLUSTERS for figure in _measured(cluster, fake.endpoint, store)]
    finally:
        loop.run(fake.__aexit__(None, None, None))
        loop.stop()
