"""`write.format("journal")` and `writeStream` on real brokers: atomic, and exactly once with any number of retries."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from coranto.client.committed import committed_messages
from coranto.errors import BatchChanged, InvalidInput
from coranto.messages import JsonLines
from coranto.messages.mapping import rendezvous
from coranto.streams import Split, SyncStreams, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto_consumers.spark import error_of_task
from tests.consumers.conftest import Broker
from tests.consumers.spark.streaming.test_query import ONE, TWO, committed, stream, write


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


class Sink:
    """A test's three journals and ledger."""

    def __init__(self, cluster: SyncCluster) -> None:
        self.client = cluster.client()
        self.endpoint = self.client.config.endpoint
        self.folder = f"sink/{uuid.uuid4().hex[:8]}"
        self.journals = [f"{self.folder}/part-{n}" for n in range(3)]
        self.ledger = f"ledgers/{self.folder.rpartition('/')[2]}"
        for journal in self.journals:
            cluster.create(journal)

    def write(self, frame, **options: str):
        writer = frame.write.format("journal").mode("append").option("ledger", self.ledger)
        return self.to(writer, **options).save()

    def to(self, writer, **options: str):
        selected = {} if {"assign", "subscribe"} & options.keys() else {"selector": f"name:prefix={self.folder}/"}
        return writer.options(endpoint=self.endpoint, **selected, **options)

    def producers(self) -> set[bytes]:
        return {
            envelope.producer
            for name in self.journals
            for envelope in committed_messages(self.client, name, JsonLines())
        }

    def messages(self, journal: str | None = None) -> list[dict]:
        """Return the committed messages of one journal or of all, without their UUIDs."""
        found = []
        for name in [journal] if journal else self.journals:
            found += [
                {key: value for key, value in envelope.message.items() if key != "_meta"}
                for envelope in committed_messages(self.client, name, JsonLines())
            ]
        return found


@pytest.fixture
def sink(cluster: SyncCluster) -> Sink:
    return Sink(cluster)


def numbers(messages: list[dict]) -> list[int]:
    return sorted(message["n"] for message in messages)


def test_rows_arrive_once_in_the_journals_of_their_keys(spark: SparkSession, sink: Sink):
    frame = spark.range(500).select(F.col("id").alias("n"), F.concat(F.lit("k"), F.col("id") % 20).alias("key"))

    sink.write(frame.repartition(4))

    assert numbers(sink.messages()) == list(range(500))
    for journal in sink.journals:
        of_journal = {key for n in range(20) if rendezvous((key := f"k{n}").encode(), sink.journals) == journal}
        found = sink.messages(journal)
        assert len(found) == 25 * len(of_journal)
        assert {each["key"] for each in found} == of_journal


def test_values_may_be_texts_or_structs_and_name_their_journals(spark: SparkSession, sink: Sink):
    one, two, _ = sink.journals
    texts = spark.createDataFrame(
        [(one, '{"n": 1, "big": 12345678901234567890.125}'), (two, '{"n":2}')], "journal STRING, value STRING"
    )
    structs = spark.createDataFrame([("k", (3, None))], "key STRING, value STRUCT<n: INT, nothing: STRING>")

    sink.write(texts)
    sink.write(structs, mapping="random")

    assert sink.messages(two)[0] == {"n": 2}
    assert numbers(sink.messages()) == [1, 2, 3]
    assert b"12345678901234567890.125" in sink.client.read_all(one, 0, sink.client.head(one))
    assert {"n": 3} in sink.messages()


def test_a_named_write_is_done_once_and_completed_by_the_next_writer(spark: SparkSession, sink: Sink):
    first, second = spark.range(10).withColumnRenamed("id", "n"), spark.range(100, 110).withColumnRenamed("id", "n")

    for frame in (first, first, second):
        sink.write(frame, writerId="nightly/2026-03-01", mapping="random")
    assert numbers(sink.messages()) == list(range(10))

    sink.write(second, writerId="nightly/2026-03-02", mapping="random")
    sink.write(second, mapping="random")
    assert numbers(sink.messages()) == sorted([*range(10), *range(100, 110), *range(100, 110)])


def test_a_task_that_fails_after_writing_shows_no_rows_and_its_retry_shows_them_once(
    spark: SparkSession, sink: Sink, tmp_path: Path
):
    def fail_late(rows, tries=str(tmp_path / "tries")):
        """Fail the first attempt at the last row, when others may be in their journals already."""
        yield from rows
        with open(tries, "a+") as file:
            file.write("x")
            file.seek(0)
            if len(file.read()) == 1:
                raise RuntimeError("the task fails")

    frame = spark.range(0, 3000, 1, 1).withColumnRenamed("id", "n").withColumn("pad", F.repeat(F.lit("x"), 2000))
    late = frame.mapInArrow(fail_late, frame.schema)

    with pytest.raises(PySparkException, match="the task fails"):
        sink.write(late, mapping="random")  # Tasks of a local session have one attempt.
    assert sink.messages() == []
    sink.write(late, mapping="random")
    assert numbers(sink.messages()) == list(range(3000))


@pytest.mark.parametrize(
    ("ddl", "options", "problem"),
    [
        ("n INT", {}, "there is no column key to map messages to 3 journals by"),
        ("n INT, key INT", {}, "the key key is int: cast it to STRING"),
        ("value INT, key STRING", {}, "the column value is int"),
        ("value MAP<STRING,INT>, key STRING", {}, "write to_json"),
        ("value STRING, key STRING, other INT", {}, "other has no place next to the column value"),
        ("n INTERVAL DAY, key STRING", {}, "n is interval day, which JSON cannot express"),
        ("n INT, key STRING", {"mapping": "round"}, "'round' is not one of rendezvous, modulo, random"),
        ("n INT, key STRING", {"ledgr": "a/b"}, "did you mean ledger"),
        ("n INT, key STRING", {"ledger": ""}, "option ledger: is required"),
        ("n INT, key STRING", {"acceptLoss": "perhaps"}, "neither true nor false"),
    ],
)
def test_invalid_writes_are_refused(spark: SparkSession, sink: Sink, ddl, options, problem):
    with pytest.raises(PySparkException, match=problem) as raised:
        sink.write(spark.createDataFrame([], ddl), **options)
    assert isinstance(error_of_task(raised.value), InvalidInput)
    assert sink.messages() == []


def test_a_folder_has_its_own_ledger(spark: SparkSession, sink: Sink):
    for _ in range(2):
        writer = spark.createDataFrame([(1, "a"), (2, "b")], "n INT, key STRING").write.format("coranto").mode("append")
        writer.options(endpoint=sink.endpoint, prefix=f"{sink.folder}/", writerId="two").save()
    assert sorted(message["n"] for message in sink.messages()) == [1, 2]
    assert sink.client.head(f"ledgers/{sink.folder}") > 0


def test_invalid_messages_are_refused_and_nothing_is_shown(spark: SparkSession, sink: Sink):
    for value in ("[1]", "{", None):
        rows = spark.createDataFrame([('{"n":1}', "a"), (value, "b")], "value STRING, key STRING")
        with pytest.raises(PySparkException) as raised:
            sink.write(rows)
        assert isinstance(error_of_task(raised.value), InvalidInput)
    writer = spark.createDataFrame([], "n INT, key STRING").write.format("journal").mode("overwrite")
    with pytest.raises(PySparkException, match="only appended to"):
        sink.to(writer.option("ledger", sink.ledger)).save()
    assert sink.messages() == []


QUERY = """
import sys
from coranto_consumers.spark import new_session
source, endpoint, folder, ledger, checkpoint = sys.argv[1:]
settings = {"spark.sql.streaming.minBatchesToRetain": "1000"}
frame = new_session("killed", settings=settings, short=True).readStream.format("journal")
frame = frame.options(endpoint=source, selector="name:prefix=a/topic/", startingOffsets="earliest")
frame = frame.option("maxOffsetsPerTrigger", 40).schema("n INT, _journal STRING, _offset BIGINT").load()
writer = frame.selectExpr("n", "concat(_journal, ' ', _offset) AS key").writeStream.format("journal")
writer = writer.options(endpoint=endpoint, ledger=ledger, selector=f"name:prefix={folder}/")
writer.option("checkpointLocation", checkpoint).start().awaitTermination()
"""


class Source:
    """A folder of files. Each is a batch of a query."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, begin: int, end: int) -> None:
        rows = "".join(json.dumps({"n": n, "key": f"k{n % 20}"}) + "\n" for n in range(begin, end))
        partial = self.folder.parent / "partial"
        partial.write_text(rows)
        partial.rename(self.folder / f"{begin:06}.json")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "rows")


def run(spark: SparkSession, sink: Sink, source: Source, checkpoint: Path, **options: str) -> None:
    """Run a query until it has written all content."""
    frame = spark.readStream.schema("n BIGINT, key STRING").option("maxFilesPerTrigger", 1).json(str(source.folder))
    writer = sink.to(frame.writeStream.format("journal"), **{"ledger": sink.ledger, **options})
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()


def forget(checkpoint: Path, batch: int) -> None:
    """Reset a checkpoint to the state when a batch was planned and not yet marked as written."""
    for kind in ("commits", "offsets"):
        for path in (checkpoint / kind).iterdir():
            number = path.name.strip(".").split(".")[0]
            if number.isdigit() and int(number) >= batch + (kind == "offsets"):
                path.unlink()


def test_a_repeated_batch_adds_nothing_and_is_refused_with_other_data(
    spark: SparkSession, sink: Sink, source: Source, tmp_path: Path
):
    checkpoint = tmp_path / "checkpoint"
    source.add(0, 50)
    source.add(50, 100)
    run(spark, sink, source, checkpoint)
    assert numbers(sink.messages()) == list(range(100))

    forget(checkpoint, 1)
    run(spark, sink, source, checkpoint)
    assert numbers(sink.messages()) == list(range(100))

    forget(checkpoint, 1)
    written = (source.folder / "000050.json").read_text()
    (source.folder / "000050.json").write_text('{"n":999,"key":"k"}\n')
    with pytest.raises(PySparkException, match=r"batch 1 of .* is written already, with 50 messages") as raised:
        run(spark, sink, source, checkpoint)
    assert isinstance(error_of_task(raised.value), BatchChanged)
    run(spark, sink, source, checkpoint, failOnDataLoss="false")
    assert numbers(sink.messages()) == list(range(100))
    (source.folder / "000050.json").write_text(written)

    source.add(100, 120)
    run(spark, sink, source, checkpoint)
    assert numbers(sink.messages()) == list(range(120))

    # A checkpoint from a backup has an older position than the written content.
    forget(checkpoint, 1)
    with pytest.raises(PySparkException, match=r"batch 1 of .* is 2 batches older than the last written one") as raised:
        run(spark, sink, source, checkpoint)
    assert isinstance(error_of_task(raised.value), BatchChanged)
    assert numbers(sink.messages()) == list(range(120))


def test_a_query_needs_its_original_ledger(spark: SparkSession, sink: Sink, source: Source, tmp_path: Path):
    source.add(0, 10)
    run(spark, sink, source, tmp_path / "checkpoint")
    source.add(10, 20)

    with pytest.raises(PySparkException, match="has no batch of this query, but its next batch is 1"):
        run(spark, sink, source, tmp_path / "checkpoint", ledger=f"{sink.ledger}-other")
    run(spark, sink, source, tmp_path / "checkpoint", ledger=f"{sink.ledger}-other", acceptLoss="true")
    assert numbers(sink.messages()) == list(range(20))


def test_a_query_between_journals_killed_at_any_time_copies_each_message_once(
    spark: SparkSession, sink: Sink, broker: Broker, tmp_path: Path
):
    rng, checkpoint = random.Random(7), tmp_path / "checkpoint"
    broker.create(ONE, TWO)
    write(broker, rng, 240)
    arguments = [broker.endpoint, sink.endpoint, sink.folder, sink.ledger, str(checkpoint)]
    with subprocess.Popen([sys.executable, "-c", QUERY, *arguments], start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 400
            while not (checkpoint / "commits/1").exists():
                assert process.poll() is None, "the query has ended"
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # With Spark's JVM, which would run for a while.
    write(broker, rng, 80)

    frame = stream(spark, broker, startingOffsets="earliest").selectExpr("n", "concat(_journal, ' ', _offset) AS key")
    writer = sink.to(frame.writeStream.format("journal"), ledger=sink.ledger, checkpointLocation=str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    found = sorted((message["key"], message["n"]) for message in sink.messages())
    assert found == sorted((f"{journal} {offset}", n) for journal, offset, n in committed(spark, broker))
    assert len(found) > 200


def test_two_queries_with_one_checkpoint_write_each_batch_once(
    spark: SparkSession, sink: Sink, source: Source, tmp_path: Path
):
    """A zombie and its successor share the query's id. Spark itself refuses the second in one session."""
    for n in range(0, 60, 20):
        source.add(n, n + 20)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    metadata = json.dumps({"id": str(uuid.uuid4())})
    for checkpoint in (one, two):
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "metadata").write_text(metadata)

    run(spark, sink, source, one)
    assert numbers(sink.messages()) == list(range(60))
    assert len(sink.producers()) == 1, "the tasks of a run reuse their producer ids"
    with contextlib.suppress(PySparkException):
        run(spark, sink, source, two)
    assert numbers(sink.messages()) == list(range(60))


def test_batches_and_queries_write_once_to_a_stream_that_is_scaled(
    spark: SparkSession, sink: Sink, source: Source, tmp_path: Path
):
    name = f"{sink.folder}-shop/orders"
    with SyncStreams(sink.client) as streams:
        streams.create(name, 2, template=default_template(stores=[STORE_URL]))

        def run() -> None:
            frame = spark.readStream.schema("n BIGINT, key STRING").option("maxFilesPerTrigger", 1)
            writer = frame.json(str(source.folder)).writeStream.format("journal")
            writer = writer.options(
                endpoint=sink.endpoint, stream=name, checkpointLocation=str(tmp_path / "checkpoint")
            )
            writer.trigger(availableNow=True).start().awaitTermination()

        frame = spark.range(40).selectExpr("id AS n", "concat('k', id % 20) AS key")
        writer = frame.repartition(3).write.format("journal").mode("append")
        for _ in range(2):  # A repeated job adds nothing.
            writer.options(endpoint=sink.endpoint, stream=name, ledger=sink.ledger, writerId="first").save()
        source.add(40, 70)
        run()
        streams.scale(name, [Split(0)])
        source.add(70, 100)
        forget(tmp_path / "checkpoint", 0)  # The repeated first batch adds nothing.
        run()

    rows = spark.read.format("journal").options(endpoint=sink.endpoint, stream=name).schema("n BIGINT").load().collect()
    assert sorted(row.n for row in rows) == list(range(100))
