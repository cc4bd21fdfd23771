"""Streaming queries in a real Spark: `readStream.format("journal")` delivers committed messages continuously.

`tests/consumers/spark/sink/test_sink.py` kills one.
"""

import contextlib
import json
import os
import random
import time
from pathlib import Path

import pytest

from coranto.messages.framing import JsonLines
from coranto.messages.publisher import SyncPublisher
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark.streaming.offsets import bytes_behind

ONE, TWO = "a/topic/one", "a/topic/two"
SCHEMA = "n INT, _journal STRING, _offset BIGINT"


def stream(spark, broker, **options):
    reader = spark.readStream.format("journal").options(endpoint=broker.endpoint, selector="name:prefix=a/topic/")
    return reader.options(**options).schema(SCHEMA).load()


def write(broker, rng: random.Random, count: int) -> None:
    """Write overlapping transactions of a few producers, some repeated and some rolled back."""
    publishers = [
        SyncPublisher(
            broker.write,
            producer=new_producer_id(os.urandom),
            clock=ProducerClock(time.time_ns),
            framing=JsonLines(),
            max_batch_bytes=300,
        )
        for _ in range(4)
    ]
    for n in range(count):
        publisher = rng.choice(publishers)
        publisher.add(rng.choice((ONE, TWO)), {"n": n})
        if rng.random() < 0.1:
            publisher.commit() if rng.random() < 0.8 else publisher.rollback()
        if rng.random() < 0.05:  # An append that was repeated.
            broker.write(ONE, b"".join(broker.content(ONE).splitlines(keepends=True)[-3:]))
    for publisher in publishers[:-1]:
        publisher.commit()


def committed(spark, broker) -> list[tuple[str, int, int]]:
    frame = spark.read.format("journal").options(endpoint=broker.endpoint, selector="name:prefix=a/topic/")
    return sorted((row._journal, row._offset, row.n) for row in frame.schema(SCHEMA).load().collect())


def test_a_running_query_reports_its_lag_and_reads_new_journals(spark, broker, tmp_path):
    broker.create(ONE)
    write_one(broker, ONE, 25)
    frame = stream(spark, broker, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    query = frame.writeStream.format("memory").queryName("taken_up").option("checkpointLocation", f"{tmp_path}/c")
    with stopped(query.trigger(processingTime="100 milliseconds").start()) as query:
        query.processAllAvailable()
        broker.create(TWO)
        write_one(broker, TWO, 5)
        query.processAllAvailable()
        progress = [json.loads(each.json) for each in query.recentProgress]

    assert spark.table("taken_up").count() == 30
    behind = list(map(bytes_behind, progress))
    assert behind[-1] == {ONE: 0, TWO: 0}
    assert max(each[ONE] for each in behind) > 0


def write_one(broker, journal: str, count: int) -> None:
    publisher = SyncPublisher(
        broker.write, producer=new_producer_id(os.urandom), clock=ProducerClock(time.time_ns), framing=JsonLines()
    )
    for n in range(count):
        publisher.add(journal, {"n": n})
    publisher.commit()


@contextlib.contextmanager
def stopped(query):
    try:
        yield query
    finally:
        query.stop()


def test_a_bad_option_ends_the_query_with_its_name(spark, broker, tmp_path):
    broker.create(ONE)
    write_one(broker, ONE, 3)
    frame = stream(spark, broker, endingOffsets="latest")
    query = frame.writeStream.format("noop").option("checkpointLocation", str(Path(tmp_path) / "c")).start()
    with pytest.raises(Exception, match="endingOffsets: a streaming query has no end"):
        query.awaitTermination()
