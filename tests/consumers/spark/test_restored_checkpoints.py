"""Checkpoints of streaming queries, restored one and two batches older than the query's output.

A query writes exactly once in four ways: by `exactly_once` into a database and into Iceberg, by the sink for journals,
and by the sink for streams.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import BigInteger, Column, MetaData, Table, select
from structlog.testing import capture_logs

from coranto.client.committed import committed_messages
from coranto.errors import BatchChanged
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import JsonLines
from coranto.streams import SyncStreamReader, SyncStreams, default_template
from coranto.testing import SyncCluster
from coranto.testing.cluster import STORE_URL
from coranto_consumers.spark import IcebergStore, Outputs, TableOutput, error_of_task, exactly_once
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.stores.sql import SqlStore
from tests.sampling import sampled

NUMBERS = Table("numbers", MetaData(), Column("n", BigInteger))
BATCHES = 3
ROWS = 5


def outputs(batch: DataFrame) -> Outputs:
    return Outputs([TableOutput(NUMBERS, batch.select("n"))])


class Database:
    """A table in a database."""

    def __init__(self, url: str) -> None:
        self.url = url

    def store(self) -> Any:
        return self.url

    def writer(self, frame: DataFrame, *, accept_loss: bool) -> Any:
        options = ConsumerOptions(fail_on_data_loss=not accept_loss)
        write = exactly_once(self.store(), outputs, name="numbers", options=options)
        return frame.writeStream.foreachBatch(write)

    def numbers(self) -> list[int]:
        with SqlStore(self.url).engine.connect() as connection:
            return sorted(connection.execute(select(NUMBERS.c.n)).scalars())


class Lake(Database):
    """An Iceberg table."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"sqlite:///{folder}/lake.db")
        self.folder = folder

    def store(self) -> IcebergStore:
        return IcebergStore(SqlCatalog("lake", uri=self.url, warehouse=f"file://{self.folder}"), NUMBERS)

    def numbers(self) -> list[int]:
        table = self.store().load("numbers")
        assert table is not None
        return sorted(table.scan().to_arrow().column("n").to_pylist())


class Journals:
    """Two journals, and a ledger."""

    def __init__(self, cluster: SyncCluster, folder: str) -> None:
        self.client = cluster.client()
        self.journals = [f"{folder}/out/{n}" for n in range(2)]
        for journal in self.journals:
            cluster.create(journal)
        self.options = {"selector": f"name:prefix={folder}/out/", "ledger": f"{folder}/ledger"}

    def writer(self, frame: DataFrame, *, accept_loss: bool) -> Any:
        writer = frame.writeStream.format("journal").option("endpoint", self.client.config.endpoint)
        return writer.options(**self.options, failOnDataLoss=str(not accept_loss).lower())

    def numbers(self) -> list[int]:
        found = [committed_messages(self.client, journal, JsonLines()) for journal in self.journals]
        return sorted(each.message["n"] for messages in found for each in messages)


class Stream(Journals):
    """A stream of two segments."""

    def __init__(self, cluster: SyncCluster, folder: str) -> None:
        self.client = cluster.client()
        self.name = f"{folder.rpartition('/')[2]}/shop"
        with SyncStreams(self.client) as streams:
            streams.create(self.name, 2, template=default_template(stores=[STORE_URL]))
        self.options = {"stream": self.name}

    def numbers(self) -> list[int]:
        with SyncStreamReader(self.client, self.name) as reader:
            return sorted(event.data["n"] for event in reader)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as cluster:
        yield cluster


@pytest.fixture(params=sampled(["database", "lake", "stream", "journals"], 4))
def target(
    request: pytest.FixtureRequest, cluster: SyncCluster, new_store: Callable[[str], str], tmp_path: Path
) -> Database | Journals:
    match request.param:
        case "database":
            return Database(new_store("postgresql"))
        case "lake":
            return Lake(tmp_path)
        case "journals":
            return Journals(cluster, f"restored/{uuid.uuid4().hex[:8]}")
        case _:
            return Stream(cluster, f"restored/{uuid.uuid4().hex[:8]}")


class Query:
    """A query from a journal. Each run has one batch. The checkpoint is copied after each batch."""

    def __init__(self, spark: SparkSession, cluster: SyncCluster, target: Database | Journals, folder: Path) -> None:
        self.spark, self.client, self.target, self.folder = spark, cluster.client(), target, folder
        self.source = f"restored/source-{uuid.uuid4().hex[:8]}"
        cluster.create(self.source, labels={CONTENT_TYPE: JSON_LINES})
        self.written = 0
        self.checkpoint = folder / "checkpoint"

    def add(self) -> list[int]:
        numbers = list(range(self.written, self.written + ROWS))
        self.client.append(self.source, b"".join(b'{"n":%d}\n' % n for n in numbers))
        self.written += ROWS
        return numbers

    def run(self, *, accept_loss: bool = False) -> None:
        reader = self.spark.readStream.format("journal").options(
            endpoint=self.client.config.endpoint, subscribe=self.source, startingOffsets="earliest"
        )
        frame = reader.schema("n BIGINT").load().selectExpr("n", "concat('k', n % 7) AS key").coalesce(1)
        writer = self.target.writer(frame, accept_loss=accept_loss)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def keep(self, batch: int) -> None:
        shutil.copytree(self.checkpoint, self.folder / f"after-{batch}")

    def restore(self, batch: int) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(self.folder / f"after-{batch}", self.checkpoint)


def test_the_error_about_an_older_checkpoint_says_how_to_fix_it(
    spark: SparkSession, cluster: SyncCluster, target: Database | Journals, tmp_path: Path
):
    query = Query(spark, cluster, target, tmp_path)
    for batch in range(BATCHES):
        query.add()
        query.run()
        query.keep(batch)
    committed, last = list(range(query.written)), BATCHES - 1
    assert target.numbers() == committed
    end = query.client.head(query.source)
    more = query.add()

    for older in range(1, BATCHES):
        query.restore(last - older)
        with pytest.raises(PySparkException) as raised:
            query.run()
        error, number = error_of_task(raised.value), BATCHES - older
        assert isinstance(error, BatchChanged), error
        assert error.batches == older
        assert f"batch {number} of " in str(error)
        if older > 1:
            assert f"{older} batches older than " in str(error)
            assert f"the batches {number} to {last}, as it plans them now," in str(error).lower()
            assert f"batch {BATCHES} or later" in str(error)
        if isinstance(target, Database):
            assert f"loses {query.source} [{end}, {query.client.head(query.source)})" in str(error)
            assert f"where the committed batches end ({query.source} {end})" in str(error)
        else:
            assert " for " in str(error).partition("were not written before (now: ")[2].partition(")")[0]
        assert target.numbers() == committed

    query.restore(last)  # As the error says.
    query.run()
    assert target.numbers() == committed + more

    query.restore(0)
    lost = query.add()
    for batch in range(1, BATCHES + 1):
        with capture_logs() as logs:
            query.run(accept_loss=True)
        if isinstance(target, Database):
            [about] = [each for each in logs if each["event"] == "batch.content_lost"]
            assert (about["batch"], len(about["lost"]), about["twice"]) == (batch, 1, [])
        assert target.numbers() == committed + more
        lost = query.add()
    query.run(accept_loss=True)
    assert target.numbers() == committed + more + lost
