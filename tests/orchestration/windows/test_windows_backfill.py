"""A backfill of windows with a real broker, launched as by the UI: each message counts once."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.backfill import execute_backfill_iteration
from pyspark.sql import SparkSession
from sqlalchemy import text

from coranto.client.publishing import sync_publisher
from coranto.labels import CONTENT_TYPE, JSON_LINES, label_set
from coranto.messages import JsonLines
from coranto.wire import protocol_pb2 as pb
from dagster_coranto import AsOf, JournalGroup, JournalResource, SparkResource, SqlStoreResource
from tests.orchestration.instances import new_instance

PARTS = ("windows/orders/part-000", "windows/orders/part-001")
GROUP = JournalGroup("windows/orders")
KEY = dg.AssetKey("revenue_by_window")
LIVE = dg.AssetKey("revenue")
PARTITIONS = "coranto_revenue_windows_windows"
ROOT = str(Path(__file__).parents[3])
DEFINITIONS = f"""
import sys
import dagster as dg
from dagster_coranto import *
from dagster_coranto.consumers.assets import spark_consumer_assets

sys.path.insert(0, {ROOT!r})  # The process of the code server does not know the folder of the tests.
from tests.orchestration.revenue import Revenue, RevenueByWindow

ORDERS, STORE, JOURNALS = JournalGroup("windows/orders"), SqlStoreResource(), JournalResource()


def live(context):
    return ConsumerSettings(Revenue(ORDERS), STORE.url_with_password())


def again(context):
    return ConsumerSettings(RevenueByWindow(ORDERS), STORE.url_with_password())


windowed = build_windowed_consumer(
    name="revenue_windows", settings=again, sources=[ORDERS], tables=[dg.AssetSpec("revenue_by_window")]
)
consumer = spark_consumer_assets(
    name="consume", sources=[ORDERS], tables=[dg.AssetSpec("revenue")]
)(live)
sensor = build_window_sensor(windowed, journals=JOURNALS, store=STORE, window_bytes=8_000, max_windows=4)
defs = dg.Definitions(
    assets=[windowed.assets, consumer],
    sensors=[sensor],
    resources={{"journals": JOURNALS, "spark": SparkResource()}},
    executor=dg.in_process_executor,
)
"""
SYNC_LAUNCHER = {
    "run_launcher": {
        "module": "dagster._core.launcher.sync_in_memory_run_launcher",
        "class": "SyncInMemoryRunLauncher",
    },
    "run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"},
}


@pytest.fixture
def store(cluster_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqlStoreResource:
    monkeypatch.setenv("CORANTO_STORE_URL", f"sqlite:///{tmp_path}/store.db")
    return SqlStoreResource()


def create_journals(journals: JournalResource) -> None:
    changes = []
    for name in PARTS:
        spec = pb.JournalSpec(name=name, replication=1, labels=label_set([(CONTENT_TYPE, JSON_LINES)]))
        spec.fragment.length = 1024
        spec.fragment.compression_codec = pb.GZIP
        spec.fragment.stores.append("file:///")
        spec.fragment.refresh_interval.FromSeconds(1)
        changes.append(pb.ApplyRequest.Change(upsert=spec))
    with journals.client() as client:
        client.apply(changes)


def publish(journals: JournalResource, transactions: int) -> int:
    """Publish transactions to both journals, and return the cents of all orders."""
    cents = 0
    with journals.client() as client:
        for number in range(transactions):
            publisher = sync_publisher(client, JsonLines())
            for order in range(10):
                publisher.add(PARTS[order % 2], {"customer": f"c{order % 3}", "cents": number * 10 + order})
                cents += number * 10 + order
            publisher.commit()
    return cents


def total(store: SqlStoreResource, table: str) -> int:
    with store.store().engine.connect() as connection:
        return int(connection.execute(text(f"SELECT SUM(cents) FROM {table}")).scalar_one())


def evaluate_sensor(definitions: dg.Definitions, instance: dg.DagsterInstance) -> list[str]:
    """Evaluate the window sensor as the daemon does, and return the partitions."""
    repository = definitions.get_repository_def()
    sensor = definitions.resolve_sensor_def("revenue_windows__window_sensor")
    context = dg.build_sensor_context(instance=instance, repository_def=repository, sensor_name=sensor.name)
    result = sensor.evaluate_tick(context)
    for request in result.dynamic_partitions_requests or ():
        keys = list(request.partition_keys)
        if isinstance(request, dg.AddDynamicPartitionsRequest):
            instance.add_dynamic_partitions(PARTITIONS, keys)
        else:
            for key in keys:
                instance.delete_dynamic_partition(PARTITIONS, key)
    for event in result.asset_events:
        assert isinstance(event, dg.AssetMaterialization)
        instance.report_runless_asset_event(event)
    return list(instance.get_dynamic_partitions(PARTITIONS))


def launch_backfill(workspace: Any, instance: dg.DagsterInstance, partitions: list[str]) -> PartitionBackfill:
    """Launch a backfill, process it with the daemon's loop, and return it at its end."""
    backfill = PartitionBackfill.from_asset_partitions(
        backfill_id=f"windows{len(partitions)}",
        asset_graph=workspace.create_request_context().asset_graph,
        partition_names=partitions,
        asset_selection=[KEY],
        backfill_timestamp=time.time(),
        tags={},
        dynamic_partitions_store=instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    instance.add_backfill(backfill)
    deadline = time.monotonic() + 240
    while True:
        problems = list(execute_backfill_iteration(workspace, logging.getLogger("backfill")))
        found = instance.get_backfill(backfill.backfill_id)
        assert found is not None
        if found.status is not BulkActionStatus.REQUESTED:
            return found
        assert time.monotonic() < deadline, problems


@pytest.mark.exhaustive
def test_a_backfill_during_a_live_consumer_counts_each_message_once(
    spark: SparkSession, store: SqlStoreResource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals = JournalResource()
    create_journals(journals)
    first = publish(journals, 8)
    (tmp_path / "window_definitions.py").write_text(DEFINITIONS)
    monkeypatch.syspath_prepend(tmp_path)
    from window_definitions import consumer, defs  # type: ignore[import-not-found]  # written just now

    target = PythonFileTarget(str(tmp_path / "window_definitions.py"), None, str(tmp_path), "shop")
    with new_instance(overrides=SYNC_LAUNCHER) as instance:

        def consume() -> str:
            resources = {"journals": journals, "spark": SparkResource()}
            result = dg.materialize([consumer], instance=instance, resources=resources)
            assert result.success
            return str(result.run_id)

        early = consume()
        assert total(store, "revenue") == first
        everything = first + publish(journals, 12)
        consume()

        deadline = time.monotonic() + 60
        while (
            len(partitions := evaluate_sensor(defs, instance)) < 2
        ):  # Wait until the broker has stored enough fragments.
            assert time.monotonic() < deadline
            time.sleep(0.2)
        with create_test_daemon_workspace_context(target, instance) as workspace:
            for attempt in (partitions, partitions[1:]):
                done = launch_backfill(workspace, instance, attempt)
                assert done.status == BulkActionStatus.COMPLETED_SUCCESS
                runs = instance.get_runs(dg.RunsFilter(tags={"dagster/backfill": done.backfill_id}))
                assert {run.tags["dagster/partition"] for run in runs} == set(attempt)
        assert instance.get_materialized_partitions(KEY) == set(partitions)

        assert total(store, "revenue") == everything
        ends = AsOf.checkpoint(store, "revenue")
        with journals.client() as client:
            assert ends == AsOf({name: client.head(name) for name in PARTS})

        schema = "customer STRING, cents BIGINT"
        then = AsOf.run(instance, LIVE, early).read(spark, journals, schema)
        assert then.groupBy().sum("cents").first()[0] == first
        assert ends.read(spark, journals, schema).groupBy().sum("cents").first()[0] == everything
        # The end of the journals is not in a window yet.
        through = AsOf.offsets(_ends_of_windows(store)).read(spark, journals, schema)
        assert total(store, "revenue_by_window") == through.groupBy().sum("cents").first()[0]


def _ends_of_windows(store: SqlStoreResource) -> dict[str, int]:
    from coranto.fragments.windows import positions
    from coranto_consumers.stores.windows import WindowLog

    known = WindowLog(store.store(), "revenue_windows").load()
    return {name: span.end for name, span in positions([each.window for each in known]).items()}
