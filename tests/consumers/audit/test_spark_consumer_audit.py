"""The audit of a Spark consumer: it reports the state left by a crash until the restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from pyspark.sql import DataFrame, SparkSession
from sqlalchemy import BigInteger, Column, MetaData, Table

from coranto.audit import Depth, Kind, Report, Severity, run_checks
from coranto.client import ClientConfig, JournalClient
from coranto.client.publishing import sync_publisher
from coranto.labels import CONTENT_TYPE, JSON_LINES
from coranto.messages import JsonLines
from coranto.testing.sync_cluster import SyncCluster
from coranto_consumers.audit import ConsumerCheck, SqlEvidence, parse_expectation
from coranto_consumers.spark import Hooks, JournalOutput, Outputs, SparkConsumer, Step, TableOutput
from coranto_consumers.spark.application.consumer_options import ConsumerOptions
from coranto_consumers.spark.outputs import stores as outputs
from coranto_consumers.stores import SqlStore

SEEN = Table("seen", MetaData(), Column("n", BigInteger, primary_key=True, autoincrement=False))


class Copies:
    """An application that stores each number in a table and republishes it."""

    name = "copies"
    sources = "name:prefix=numbers/"
    value_schema = "n BIGINT"

    def outputs(self, committed: DataFrame) -> Outputs:
        return Outputs(
            tables=[TableOutput(SEEN, committed.select("n"))],
            journals=[
                JournalOutput(committed.selectExpr("CAST(n AS STRING) AS key", "struct(n) AS value"), ["copies/out"])
            ],
        )


class CrashAt(Hooks):
    def __init__(self, step: Step) -> None:
        self.step = step

    def on_step(self, step: Step) -> None:
        if step is self.step:
            raise KeyboardInterrupt


@pytest.fixture
def cluster() -> Iterator[SyncCluster]:
    with SyncCluster(brokers=1) as made:
        for name in ("numbers/one", "numbers/two", "copies/out"):
            made.create(name, labels={CONTENT_TYPE: JSON_LINES})
        yield made


def test_state_left_by_crashes_is_found_until_the_next_start(
    cluster: SyncCluster, spark: SparkSession, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "CARRIED_TO_APPEND", 0)  # Stage even few rows.
    url = f"sqlite:///{tmp_path}/store.db"
    client = cluster.client()
    numbers = iter(range(10_000))

    def publish(count: int) -> None:
        publisher = sync_publisher(client, JsonLines())
        for n in [next(numbers) for _ in range(count)]:
            publisher.add("numbers/one" if n % 2 else "numbers/two", {"n": n})
        publisher.commit()

    def consume(step: Step | None = None) -> None:
        hooks = CrashAt(step) if step else None
        config = ClientConfig(cluster.endpoint)
        SparkConsumer(
            Copies(), config, url, spark, ConsumerOptions(max_transaction_bytes=3000), hooks=hooks
        ).run_until_caught_up()

    def audit() -> Report:
        async def run() -> Report:
            async with JournalClient(cluster.endpoint) as audited:
                check = ConsumerCheck(
                    "copies",
                    audited,
                    SqlEvidence(SqlStore(url)),
                    expectations=[parse_expectation("SELECT SUM(n) FROM seen == sum(/n)")],
                    timeout_s=0.1,
                )
                return await run_checks("copies", [check], depth=Depth.DEEP)

        return asyncio.run(run())

    def kinds() -> set[Kind]:
        return {each.kind for each in audit().findings if each.severity is not Severity.INFO}

    publish(60)
    consume()
    assert kinds() == set()
    assert audit().subjects["copies"]["messages"] == 60

    publish(20)
    with pytest.raises(KeyboardInterrupt):
        consume(Step.STAGED)
    assert kinds() == set()  # The rows are staged under the current fence: the consumer may still be running.
    SqlStore(url).raise_fence("copies")
    assert kinds() == {Kind.ROWS_LEFT_STAGED}

    with pytest.raises(KeyboardInterrupt):
        consume(Step.COMMITTED)
    assert kinds() == {Kind.ACKNOWLEDGEMENT_MISSING}

    consume()
    assert kinds() == set()
    assert audit().subjects["copies"]["messages"] == 80
