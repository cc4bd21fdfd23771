"""`exactly_once` in a real Spark: each batch counts once after any end of the query."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.types import StringType
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from sqlalchemy import BigInteger, Column, Connection, MetaData, String, Table, Text, create_engine, select
from structlog.testing import capture_logs

from coranto.errors import BatchChanged, Fenced, InvalidInput
from coranto.messages.framing import JsonLines, iter_messages
from coranto.messages.publisher import SyncPublisher
from coranto.messages.sequencer import Sequencer, read_committed
from coranto.messages.uuids import ProducerClock, new_producer_id
from coranto_consumers.spark import (
    Add,
    Hooks,
    IcebergStore,
    JournalOutput,
    Outputs,
    Step,
    TableOutput,
    error_of_task,
    exactly_once,
)
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.consumer.transaction import output_store
from coranto_consumers.stores.iceberg.tables import find_or_create
from coranto_consumers.stores.sql import SqlStore

COUNTS = Table(
    "counts", MetaData(), Column("key", String, primary_key=True), Column("n", BigInteger), Column("total", BigInteger)
)
OUT = "out/messages"


def outputs(batch) -> Outputs:
    rows = batch.groupBy("key").agg(F.count("*").alias("n"), F.sum("n").alias("total"))
    messages = batch.select("key", F.struct("n").alias("value"))
    return Outputs([TableOutput(COUNTS, rows, ["key"], {"n": Add(), "total": Add()})], [JournalOutput(messages, [OUT])])


class Dying(Hooks):
    """End the query right after a step."""

    def __init__(self, step: Step | None) -> None:
        self.step = step

    def on_step(self, step: Step) -> None:
        if step is self.step:
            raise RuntimeError(f"died: {step.name}")


class World:
    """A folder of rows, a store, a journal and a checkpoint."""

    def __init__(self, spark: SparkSession, broker, folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.store_url = f"sqlite:///{folder}/store.db"
        self.rows = 0
        broker.create(OUT)
        (folder / "rows").mkdir()

    def add(self, count: int) -> None:
        lines = [json.dumps({"n": n, "key": f"k{n % 3}"}) + "\n" for n in range(self.rows, self.rows + count)]
        (self.folder / "partial").write_text("".join(lines))
        (self.folder / "partial").rename(self.folder / "rows" / f"{self.rows:06}.json")
        self.rows += count

    def start(self, function, checkpoint: str = "checkpoint", **trigger):
        frame = self.spark.readStream.schema("n BIGINT, key STRING").option("maxFilesPerTrigger", 1)
        writer = frame.json(str(self.folder / "rows")).writeStream.foreachBatch(function)
        writer = writer.option("checkpointLocation", str(self.folder / checkpoint))
        return writer.trigger(**trigger or {"availableNow": True}).start()

    def run(self, function, checkpoint: str = "checkpoint") -> None:
        query = self.start(function, checkpoint)
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def run_until_idle(self, function) -> None:
        """Run an endless query until it has processed the present content."""
        query = self.start(function, processingTime="0 seconds")
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    def function(self, hooks=None, on_progress=None, **options):
        return exactly_once(
            self.store(),
            outputs,
            name="counts",
            client=self.broker.config,
            options=ConsumerOptions(**options),
            hooks=hooks,
            on_progress=on_progress,
        )

    def store(self):
        return self.store_url

    def add_column_without_value(self) -> None:
        engine = create_engine(self.store_url)
        with engine.begin() as connection:
            columns = [Column(each.name, each.type, primary_key=each.primary_key) for each in COUNTS.c]
            Table("counts", MetaData(), *columns, Column("shop", Text, nullable=False)).create(connection)
        engine.dispose()

    def counts(self) -> dict:
        with SqlStore(self.store_url).engine.connect() as connection:
            return {row.key: (row.n, row.total) for row in connection.execute(select(COUNTS))}

    def check(self) -> None:
        """Check that each row counts once in the table and in the journal."""
        found = self.counts()
        numbers = range(self.rows)
        assert found == {f"k{key}": (len(numbers[key::3]), sum(numbers[key::3])) for key in range(3) if numbers[key::3]}
        framing, content = JsonLines(), self.broker.content(OUT)

        def replay(wanted):
            return iter_messages(framing, OUT, [content[wanted.begin : wanted.end]], wanted.begin)

        committed = read_committed(iter_messages(framing, OUT, [content], 0), Sequencer(), replay)
        assert sorted(envelope.message["n"] for envelope in committed) == list(numbers)


class LakeWorld(World):
    """A `World` with an Iceberg table."""

    def catalog(self) -> SqlCatalog:
        return SqlCatalog("lake", uri=self.store_url, warehouse=f"file://{self.folder}")

    def store(self):
        return IcebergStore(self.catalog(), COUNTS)

    def add_column_without_value(self) -> None:
        table = find_or_create(self.catalog(), "default.counts", COUNTS)
        with table.update_schema(allow_incompatible_changes=True) as change:
            change.add_column("shop", StringType(), required=True)

    def counts(self) -> dict:
        rows = self.catalog().load_table("default.counts").scan().to_arrow().to_pylist()
        return {row["key"]: (row["n"], row["total"]) for row in rows}


@pytest.fixture
def world(spark, broker, tmp_path) -> World:
    return World(spark, broker, tmp_path)


@pytest.mark.parametrize("kind", [World, LakeWorld])
def test_a_query_that_dies_at_any_step_continues_and_each_row_counts_once(kind, spark, broker, tmp_path):
    world = kind(spark, broker, tmp_path)
    steps = (Step.STAGED, Step.PUBLISHED, Step.MERGED, Step.COMMITTED, Step.ACKNOWLEDGED)
    for step in (Step.COMMITTED,) if kind is LakeWorld else steps:
        world.add(10)
        with pytest.raises(PySparkException, match=f"died: {step.name}"):
            world.run(world.function(hooks=Dying(step)))
    function = world.function()
    world.run(function)
    world.check()
    world.add(5)
    world.run(function)  # The same function in another run of the query.
    world.check()


@pytest.mark.parametrize("kind", [World, LakeWorld])
def test_a_table_that_cannot_take_the_rows_is_refused_before_the_fence(kind, spark, broker, tmp_path):
    world = kind(spark, broker, tmp_path)
    world.add_column_without_value()
    world.add(10)
    with pytest.raises(PySparkException, match=r"column 'shop' (is required|must not be null), and gets no value"):
        world.run(world.function())
    assert output_store(world.store(), Connection.commit).read("counts") is None


def test_a_zombie_is_fenced_and_another_checkpoint_or_store_is_refused(world):
    world.add(10)
    zombie = world.function()
    world.run(zombie)
    SqlStore(world.store_url).raise_fence("counts")
    world.add(10)
    with pytest.raises(PySparkException) as raised:
        world.run(zombie)
    assert isinstance(error_of_task(raised.value), Fenced)

    with pytest.raises(PySparkException, match="with another checkpoint") as raised:
        world.run(world.function(), checkpoint="other")
    assert isinstance(error_of_task(raised.value), InvalidInput)

    world.run(world.function())
    world.check()
    world.add(10)
    other = exactly_once(f"sqlite:///{world.folder}/other.db", outputs, name="counts", client=world.broker.config)
    with pytest.raises(PySparkException, match="has no batch of counts, but its next batch is 2"):
        world.run(other)


def drop_last_batch(checkpoint: Path) -> None:
    """Make a query's checkpoint one batch older, like a backup."""
    for kind in ("offsets", "commits", "sources/0"):
        last = max((path for path in (checkpoint / kind).iterdir() if path.name.isdigit()), key=lambda p: int(p.name))
        last.unlink()
        (last.parent / f".{last.name}.crc").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", [World, LakeWorld])
def test_the_error_about_an_old_checkpoint_names_the_content_it_would_lose(kind, spark, broker, tmp_path):
    world = kind(spark, broker, tmp_path)
    for _ in range(2):
        world.add(5)
        world.run(world.function())
    before = world.counts()
    drop_last_batch(tmp_path / "checkpoint")
    (tmp_path / "rows" / "000005.json").unlink()
    world.rows = 5
    world.add(7)  # The batch has the same number but other content.
    with pytest.raises(PySparkException) as raised:
        world.run(world.function())
    error = error_of_task(raised.value)
    assert isinstance(error, BatchChanged)
    assert "batch 1 of counts" in str(error)
    assert "rows/000005.json" in str(error)
    assert "fail_on_data_loss=False" in str(error)
    assert world.counts() == before

    with capture_logs() as logs:
        world.run(world.function(fail_on_data_loss=False))
    [lost] = [each for each in logs if each["event"] == "batch.content_lost"]
    assert lost["batch"] == 1
    assert [name for name in lost["lost"] if "000005.json" in name]
    assert world.counts() == before
    world.add(3)
    world.run(world.function())
    assert sum(n for n, _ in world.counts().values()) == 5 + 5 + 3


def test_a_query_continues_in_a_source_that_was_recovered_as_its_error_says(world):
    """The checkpoint and the name in the store are the same. The last batch was not marked as done."""
    source, sent = "in/rows", bytearray()
    world.broker.fake.has_ids = True

    def create(content: bytes) -> None:
        world.broker.create(source)
        world.broker.write(source, bytes(content))

    def add(count: int) -> None:
        def append(journal: str, content: bytes) -> None:
            sent.extend(content)
            world.broker.write(journal, content)

        producer, clock = new_producer_id(os.urandom), ProducerClock(time.time_ns)
        publisher = SyncPublisher(append, producer=producer, clock=clock, framing=JsonLines())
        for n in range(world.rows, world.rows + count):
            publisher.publish(source, {"n": n, "key": f"k{n % 3}"})
        publisher.flush()
        world.rows += count

    def run(function, **options: str) -> None:
        options = {"endpoint": world.broker.endpoint, "subscribe": source, "startingOffsets": "earliest", **options}
        frame = world.spark.readStream.format("journal").options(**options).schema("n BIGINT, key STRING").load()
        writer = frame.writeStream.foreachBatch(function).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(world.folder / "checkpoint")).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    world.broker.create(source)
    add(10)
    run(world.function())
    add(5)
    with pytest.raises(PySparkException, match="died"):
        run(world.function(hooks=Dying(Step.COMMITTED)))
    create(sent)
    add(4)
    with pytest.raises(PySparkException, match="was deleted and created again") as error:
        run(world.function())
    option, value = re.search(r"set the option (\w+)=(\S+) of the source", str(error.value)).groups()
    run(world.function(), **{option: value})
    world.check()
    add(3)
    run(world.function())
    world.check()


def test_a_batch_of_an_older_version_is_skipped_and_the_next_one_is_recorded(world):
    world.add(5)
    world.run(world.function())
    store = SqlStore(world.store_url)
    restored = store.raise_fence("counts")
    assert json.loads(restored.checkpoint.batch)["files"]
    with store.transaction("counts", restored.fence) as transaction:
        transaction.commit(replace(restored.checkpoint, batch=""))
    (world.folder / "checkpoint" / "commits" / "0").unlink()
    (world.folder / "checkpoint" / "commits" / ".0.crc").unlink()
    with capture_logs() as logs:
        world.run(world.function())
    assert [each["content"] for each in logs if each["event"] == "batch.committed_before"] == ["unknown"]
    world.add(5)
    world.run(world.function())
    world.check()
    assert json.loads(store.raise_fence("counts").checkpoint.batch)["files"]


def test_exactly_once_accepts_only_batches_of_queries(spark, tmp_path):
    function = exactly_once(f"sqlite:///{tmp_path}/store.db", outputs, name="counts")

    with pytest.raises(InvalidInput, match="from foreachBatch only"):
        function(spark.range(1), 0)
