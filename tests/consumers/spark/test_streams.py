"""The last write of each key wins while consumers read a stream that is split, merged and truncated."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, MetaData, String, Table, select

from coranto.errors import StreamTruncated
from coranto.streams import Merge, Split, StreamCut, SyncStreams, SyncStreamWriter, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto_consumers.spark import (
    ConsumeReport,
    Outputs,
    Replace,
    SparkConsumer,
    TableOutput,
    exactly_once,
    stream_selector,
)
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.stores import SqlStore

LATEST = Table("latest", MetaData(), Column("key", String(20), primary_key=True), Column("n", BigInteger))
COLUMNS = "key STRING, n BIGINT, _commit_offset BIGINT"
EVENT_BYTES = 90
"""The approximate bytes of an event in its segment."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Shop:
    """A stream of one segment, and the last number of each of its keys."""

    def __init__(self, cluster: SyncCluster) -> None:
        self.client = cluster.client()
        self.name = f"shop-{uuid.uuid4().hex[:8]}/orders"
        self.streams = SyncStreams(self.client)
        self.writer = SyncStreamWriter(self.client, self.name)
        self.latest: dict[str, int] = {}
        self._n = 0
        self.streams.create(self.name, template=default_template(stores=[STORE_URL]))

    def write(self, count: int) -> None:
        for _ in range(count):
            self._n += 1
            key = f"k{self._n % 10}"
            self.writer.write_event(key, {"key": key, "n": self._n})
            self.latest[key] = self._n
        self.writer.flush()

    def split(self) -> None:
        self.streams.scale(self.name, [Split(self.streams.describe(self.name).active()[0].number)])

    def merge(self) -> None:
        low, high = self.streams.describe(self.name).active()[:2]
        self.streams.scale(self.name, [Merge((low.number, high.number))])

    def cut(self) -> StreamCut:
        """Return the position where the current segments begin."""
        return {segment.number: 0 for segment in self.streams.describe(self.name).active()}

    def truncate(self) -> None:
        self.streams.truncate(self.name, self.cut())

    def segments(self) -> set[int]:
        return set(self.streams.describe(self.name).segments)


@pytest.fixture
def shop(cluster: SyncCluster) -> Iterator[Shop]:
    shop = Shop(cluster)
    with shop.streams, shop.writer:
        yield shop


def latest_of(rows: DataFrame) -> Outputs:
    last = F.max_by("n", F.struct("_commit_offset", "_offset")).alias("n")
    rows = rows.groupBy("key").agg(last)
    return Outputs(tables=[TableOutput(LATEST, rows, keys=["key"], merge={"n": Replace()})])


def stored(url: str) -> dict[str, int]:
    with SqlStore(url).engine.connect() as connection:
        return {row.key: row.n for row in connection.execute(select(LATEST))}


def test_a_query_over_a_stream_split_and_merged_while_it_runs(spark: SparkSession, shop: Shop, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.db"
    shop.write(60)
    shop.split()
    shop.write(20)

    frame = spark.readStream.format("journal").schema(f"{COLUMNS}, _offset BIGINT")
    frame = frame.options(endpoint=shop.client.config.endpoint, stream=shop.name, startingOffsets="earliest")
    writer = frame.option("maxBytesPerTrigger", 40 * EVENT_BYTES).load().writeStream
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.foreachBatch(exactly_once(url, latest_of, name="latest")).start()
    try:
        shop.merge()
        shop.write(20)
        query.processAllAvailable()
        assert stored(url) == shop.latest
        shop.truncate()  # The query has read everything.
        assert len(shop.segments()) == 1
        shop.write(10)
        query.processAllAvailable()
        assert stored(url) == shop.latest
    finally:
        query.stop()


class Latest:
    """Keep the last write of each key."""

    name = "latest"
    value_schema = COLUMNS

    def __init__(self, stream: str) -> None:
        self.sources = stream_selector(stream)

    def outputs(self, committed: DataFrame) -> Outputs:
        return latest_of(committed)


def test_a_consumer_of_a_stream_split_and_merged_while_it_runs(spark: SparkSession, shop: Shop, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.db"

    def consumer(
        on_progress: Callable[[ConsumeReport], None] = lambda report: None, *, fail_on_data_loss: bool = True
    ) -> SparkConsumer:
        return SparkConsumer(
            Latest(shop.name),
            shop.client.config,
            url,
            spark,
            ConsumerOptions(max_transaction_bytes=40 * EVENT_BYTES, fail_on_data_loss=fail_on_data_loss),
            on_progress=on_progress,
        )

    shop.write(60)
    shop.split()
    shop.write(20)
    assert consumer().run_until_caught_up(max_transactions=1).lag_bytes > 0
    changes = iter([shop.split, shop.merge, shop.truncate])
    seen = []

    def change(report: ConsumeReport) -> None:
        """Change the stream once it was read completely, and write to it."""
        if report.lag_bytes == 0 and (doing := next(changes, None)) is not None:
            seen.append(stored(url) == shop.latest)
            doing()
            shop.write(20)

    consumer(change).run_until_stopped(lambda: len(seen) == 3 and stored(url) == shop.latest, wait=lambda: None)
    assert seen == [True] * 3
    assert len(shop.segments()) == 2

    shop.split()
    consumer().run_until_caught_up()  # Nothing was written to the successors, but their beginning is recorded.
    shop.truncate()
    shop.write(10)
    consumer().run_until_caught_up()
    assert stored(url) == shop.latest

    shop.write(10)
    shop.split()
    shop.truncate()  # No query has read that.
    with pytest.raises(StreamTruncated, match="is gone"):
        consumer().run_until_caught_up()
    shop.write(10)
    report = consumer(fail_on_data_loss=False).run_until_caught_up()
    assert len(report.lost) == 1
    assert stored(url) == shop.latest
