"""Partitions that are windows of offsets: the sensor maintains them, and a backfill counts each message once."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import time as time_of_day
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.storage.dagster_run import DagsterRunStatus
from dagster._core.storage.tags import PARTITION_NAME_TAG, RUN_KEY_TAG, SENSOR_NAME_TAG

from coranto.client.loop import run_blocking
from coranto.errors import InvalidInput
from coranto.fragments.windows import Span, Window
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.offsets import JournalOffset, id_of, vector_of_json
from coranto.testing.fake_broker import FakeBroker
from coranto_consumers.spark.consumer.windows import WindowReport
from coranto_consumers.stores.windows import WindowLog, shard_of
from dagster_coranto import (
    AsOf,
    ConsumerSettings,
    JournalResource,
    SparkResource,
    SqlStoreResource,
    build_window_sensor,
    build_windowed_consumer,
)
from dagster_coranto.translation.metadata import (
    ConsumerMetadataSet,
    WindowMetadataSet,
    offsets_metadata,
    vector_version,
)
from dagster_coranto.windows.assets import store_offsets, window_metadata, window_version
from tests.orchestration.instances import new_instance
from tests.orchestration.revenue import ORDERS, RevenueByWindow
from tests.orchestration.staleness import status

JOURNAL = "shop/orders/part-000"
REVENUE = dg.AssetKey("revenue_by_window")


def settings(context: dg.AssetExecutionContext, store: SqlStoreResource) -> ConsumerSettings:
    return ConsumerSettings(RevenueByWindow(), store.url_with_password())


windowed = build_windowed_consumer(
    name="revenue_windows",
    settings=settings,
    sources=[ORDERS],
    tables=[dg.AssetSpec("revenue_by_window")],
)
PARTITIONS = "coranto_revenue_windows_windows"


class Shop:
    """A broker, a store, Dagster's instance, and the sensor, with its results applied as by the daemon."""

    def __init__(self, broker: FakeBroker, journals: JournalResource, instance: dg.DagsterInstance, folder: Path):
        self.broker = broker
        self.journals = journals
        self.instance = instance
        self.folder = folder
        self.store = SqlStoreResource(url=f"sqlite:///{folder / 'store.db'}")
        self.cursor: str | None = None
        self.repository = dg.Definitions(
            [windowed.assets], resources={"journals": journals, "spark": SparkResource(), "store": self.store}
        ).get_repository_def()
        broker.create(JOURNAL)

    def requests(self, **options: Any) -> list[dg.RunRequest]:
        """Evaluate a sensor that launches runs, and return its requests."""
        result = self.tick(launch=True, **options)
        return list(result.run_requests or ()) if isinstance(result, dg.SensorResult) else []

    def run(self, request: dg.RunRequest, status: DagsterRunStatus) -> dg.DagsterRun:
        """Create a requested run as the daemon does, with a status."""
        tags = {
            **request.tags,
            RUN_KEY_TAG: request.run_key or "",
            SENSOR_NAME_TAG: f"{windowed.name}__window_sensor",
            PARTITION_NAME_TAG: request.partition_key or "",
        }
        job = self.repository.get_implicit_global_asset_job_def()
        return self.instance.create_run_for_job(job, status=status, tags=tags, asset_selection={REVENUE})

    def order(self, cents: int) -> None:
        """Place an order as a stored fragment."""
        run_blocking(self.broker.write(JOURNAL, f'{{"customer": "ada", "cents": {cents}}}\n'.encode()))
        self.broker.journals[JOURNAL].roll(self.folder)

    def tick(self, instance: dg.DagsterInstance | None = None, **options: Any) -> dg.SensorResult | dg.SkipReason:
        instance = instance or self.instance
        sensor = build_window_sensor(
            windowed, journals=self.journals, store=self.store, **{"window_bytes": 1, "max_windows": 3, **options}
        )
        context = dg.build_sensor_context(instance=instance, repository_def=self.repository, cursor=self.cursor)
        result: Any = sensor(context)
        self.cursor = context.cursor
        if isinstance(result, dg.SensorResult):
            for request in result.dynamic_partitions_requests or ():
                if type(request).__name__.startswith("Add"):
                    instance.add_dynamic_partitions(PARTITIONS, list(request.partition_keys))
                else:
                    for key in request.partition_keys:
                        instance.delete_dynamic_partition(PARTITIONS, key)
            for event in result.asset_events or ():
                instance.report_runless_asset_event(event)
        assert isinstance(result, dg.SensorResult | dg.SkipReason)
        return result

    def partitions(self, instance: dg.DagsterInstance | None = None) -> list[str]:
        return sorted((instance or self.instance).get_dynamic_partitions(PARTITIONS))

    def materialised(self, instance: dg.DagsterInstance | None = None) -> set[str]:
        return set((instance or self.instance).get_materialized_partitions(REVENUE))

    def claim(self) -> None:
        """Mark all windows as materialised, as a backfill does."""
        store = self.store.store()
        log = WindowLog(store, windowed.name)
        for each in log.load():
            shard = shard_of(windowed.name, each.window)
            fence, _ = store.raise_fence(shard)
            with store.transaction(shard, fence) as transaction:
                log.claim(transaction.connection, each.window, Checkpoint({}), 1.0)
                transaction.commit(Checkpoint({}))


@pytest.fixture
def shop(broker: FakeBroker, journals: JournalResource, tmp_path: Path) -> Iterator[Shop]:
    with new_instance() as instance:
        yield Shop(broker, journals, instance, tmp_path)


def test_partitions_follow_the_windows_and_a_merged_one_keeps_its_state(shop: Shop) -> None:
    for cents in (1, 2, 3):
        shop.order(cents)
    shop.tick()
    assert shop.partitions() == ["00000001", "00000002", "00000003"]
    assert isinstance(shop.tick(), dg.SkipReason)
    assert shop.materialised() == set()

    shop.claim()
    shop.order(4)
    result = shop.tick(launch=True)
    assert shop.partitions() == ["00000001-00000002", "00000003", "00000004"]
    assert shop.materialised() == {"00000001-00000002"}, "both parts were materialised"
    assert isinstance(result, dg.SensorResult)
    assert [request.partition_key for request in result.run_requests or ()] == ["00000004"]


def test_a_new_window_shows_the_time_of_its_content_before_any_run(shop: Shop) -> None:
    for cents in (1, 2):
        shop.order(cents)
    stored = shop.broker.journals[JOURNAL].stored
    for number, each in enumerate(stored):
        each.fragment = replace(each.fragment, mod_time=1_000 + 60 * number)
    shop.tick()
    windows = windowed.windows.key
    assert set(shop.instance.get_materialized_partitions(windows)) == {"00000001", "00000002"}
    assert shop.materialised() == set()
    query = dg.AssetRecordsFilter(asset_key=windows, asset_partitions=["00000002"])
    (record,) = shop.instance.fetch_materializations(query, limit=2).records
    made = record.asset_materialization
    assert made is not None
    found = WindowMetadataSet.extract(made.metadata)
    assert (found.stored_from, found.stored_until) == tuple(map(dg.MetadataValue.timestamp, (1_000.0, 1_060.0)))
    assert found.bytes == stored[1].fragment.end - stored[1].fragment.begin


def test_materialised_windows_are_up_to_date_while_journals_grow(shop: Shop) -> None:
    shop.order(1)
    shop.tick()
    rows = dg.AssetMaterialization(REVENUE, partition="00000001")
    definitions = dg.Definitions(
        [windowed.assets, windowed.windows, dg.AssetSpec(["shop", "orders"])],
        resources={"journals": shop.journals, "spark": SparkResource(), "store": shop.store},
    )
    shop.instance.report_runless_asset_event(rows)
    for version in ("one", "two"):
        shop.instance.report_runless_asset_event(
            dg.AssetMaterialization(["shop", "orders"], tags={"dagster/data_version": version})
        )
        shop.order(2)
        shop.tick()
        assert status(shop.instance, definitions, REVENUE, "00000001") == "FRESH"


def test_a_window_with_a_missing_or_failed_run_gets_another_one(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0
    monkeypatch.setattr("dagster_coranto.windows.assets.time", lambda: time_of_day() + passed)
    for cents in (1, 2):
        shop.order(cents)
    first = shop.requests()
    assert [each.partition_key for each in first] == ["00000001", "00000002"]
    assert shop.requests() == first, "Dagster has not created the runs"

    one, two = (shop.run(each, DagsterRunStatus.STARTED) for each in first)
    assert shop.requests() == []
    shop.instance.report_run_failed(one)
    shop.instance.report_run_canceled(two)
    assert shop.requests() == []
    passed = 61.0
    (again,) = shop.requests()
    assert again.partition_key == "00000001", "no run follows a canceled one"
    assert again.run_key not in {each.run_key for each in first}

    shop.instance.report_run_failed(shop.run(again, DagsterRunStatus.STARTED))
    assert shop.requests() == []
    passed = 90.0
    assert shop.requests() == []
    passed = 150.0
    assert len(shop.requests()) == 1

    shop.cursor = None
    renewed = shop.requests()
    assert [each.partition_key for each in renewed] == ["00000001", "00000002"]
    assert not {each.run_key for each in renewed} & {each.run_key for each in (*first, again)}
    shop.claim()
    shop.cursor = None
    assert shop.requests() == []


def test_a_sensor_requests_no_run_of_a_window_with_an_active_run_or_backfill(shop: Shop) -> None:
    for cents in (1, 2):
        shop.order(cents)
    one, two = shop.requests()
    by_hand = shop.run(dg.RunRequest(partition_key="00000001"), DagsterRunStatus.STARTED)
    assert [each.run_key for each in shop.requests()] == [two.run_key]
    shop.instance.report_run_failed(by_hand)
    assert [each.run_key for each in shop.requests()] == [one.run_key, two.run_key]

    graph = shop.repository.asset_graph
    backfill = PartitionBackfill.from_asset_partitions(
        backfill_id="backfill",
        asset_graph=graph,
        partition_names=["00000002"],
        asset_selection=[REVENUE],
        backfill_timestamp=1.0,
        tags={},
        dynamic_partitions_store=shop.instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    shop.instance.add_backfill(backfill)
    assert shop.requests() == []
    shop.instance.update_backfill(backfill.with_status(BulkActionStatus.COMPLETED_SUCCESS))
    assert len(shop.requests()) == 2


def test_another_home_has_the_same_windows(shop: Shop) -> None:
    for cents in (1, 2, 3, 4):
        shop.order(cents)
    shop.tick()
    with new_instance() as other:
        shop.tick(other)
        assert shop.partitions(other) == shop.partitions() == ["00000001-00000002", "00000003", "00000004"]


def test_options_that_contradict_windows_are_refused() -> None:
    options: list[dict[str, Any]] = [
        {"partitions_def": dg.StaticPartitionsDefinition(["a"])},
        {"backfill_policy": dg.BackfillPolicy.single_run()},
    ]
    for each in options:
        with pytest.raises(InvalidInput, match="its windows, with a run for each"):
            build_windowed_consumer(name="x", settings=settings, sources=[], tables=[], **each)


def read_through(head: int) -> dg.MaterializeResult[None]:
    offsets = {JOURNAL: JournalOffset(head, "c1-2")}
    metadata = dict(ConsumerMetadataSet(messages=1, offsets_read=offsets_metadata(offsets)))
    return dg.MaterializeResult(data_version=vector_version(offsets), metadata=metadata)


def test_as_of_finds_the_offsets_of_a_run_and_of_a_time() -> None:
    heads = iter((10, 30))

    @dg.asset
    def revenue() -> dg.MaterializeResult[None]:
        return read_through(next(heads))

    with new_instance() as instance:
        began = dt.datetime.now(dt.UTC)
        first = dg.materialize([revenue], instance=instance).run_id
        between = dt.datetime.now(dt.UTC)
        second = dg.materialize([revenue], instance=instance).run_id
        key = dg.AssetKey("revenue")
        assert AsOf.run(instance, key, first) == AsOf({JOURNAL: 10})
        assert AsOf.run(instance, key, second) == AsOf({JOURNAL: 30})
        assert id_of(AsOf.run(instance, key, second).ends[JOURNAL]) == "c1-2"
        assert AsOf.time(instance, key, between) == AsOf({JOURNAL: 10})
        assert AsOf.time(instance, key, dt.datetime.now(dt.UTC)) == AsOf({JOURNAL: 30})
        with pytest.raises(InvalidInput, match="was not materialised until"):
            AsOf.time(instance, key, began)
        with pytest.raises(InvalidInput, match="has not materialised"):
            AsOf.run(instance, dg.AssetKey("other"), first)
        with pytest.raises(InvalidInput, match="no time zone"):
            AsOf.time(instance, key, dt.datetime(2026, 1, 1))


def test_as_of_refuses_a_materialisation_without_all_offsets(tmp_path: Path) -> None:
    offsets = {f"shop/orders/part-{number:03d}": number for number in range(101)}

    @dg.asset
    def many() -> dg.MaterializeResult[None]:
        metadata = dict(ConsumerMetadataSet(offsets_read=offsets_metadata(offsets)))
        return dg.MaterializeResult(data_version=vector_version(offsets), metadata=metadata)

    @dg.asset
    def other() -> None: ...

    with new_instance() as instance:
        run = dg.materialize([many, other], instance=instance).run_id
        with pytest.raises(InvalidInput, match="other has no offsets in its metadata"):
            AsOf.run(instance, dg.AssetKey("other"), run)
        with pytest.raises(InvalidInput, match="name the consumer's SQL store"):
            AsOf.run(instance, dg.AssetKey("many"), run)
        store = SqlStoreResource(url=f"sqlite:///{tmp_path / 'other.db'}")
        with pytest.raises(InvalidInput, match="it is not the consumer's, or has dropped them, as it keeps 64"):
            AsOf.run(instance, dg.AssetKey("many"), run, store=store)


def test_as_of_a_window_of_300_journals_has_all_of_them(shop: Shop) -> None:
    spans = {f"shop/orders/part-{number:03d}": Span(number, 2 * number + 1, 7, f"c1-{number}") for number in range(300)}
    window = Window(3, 3, spans, 1.0)

    @dg.asset
    def by_window() -> dg.MaterializeResult[None]:
        store_offsets(shop.store.url_with_password(), windowed.name, window)
        return dg.MaterializeResult(
            data_version=window_version(window), metadata=window_metadata(window, WindowReport(window, 1, 1, 1))
        )

    run = dg.materialize([by_window], instance=shop.instance).run_id
    found = AsOf.run(shop.instance, dg.AssetKey("by_window"), run, store=shop.store)
    assert found.ends == {name: span.end for name, span in spans.items()}
    assert found.begins == {name: span.begin for name, span in spans.items()}
    options = found.options(shop.journals)
    ends = {name: {"offset": span.end, "journal_id": span.journal_id} for name, span in spans.items()}
    assert json.loads(options["endingOffsets"]) == ends


def test_as_of_reads_a_window_from_its_begin(shop: Shop) -> None:
    for cents in (1, 2):
        shop.order(cents)
    shop.tick()
    window = WindowLog(shop.store.store(), windowed.name).load()[1].window

    @dg.asset
    def by_window() -> dg.MaterializeResult[None]:
        return dg.MaterializeResult(
            data_version=window_version(window), metadata=window_metadata(window, WindowReport(window, 1, 1, 1))
        )

    run = dg.materialize([by_window], instance=shop.instance).run_id
    found = AsOf.run(shop.instance, dg.AssetKey("by_window"), run)
    span = window.spans[JOURNAL]
    assert found == AsOf({JOURNAL: span.end}, {JOURNAL: span.begin})
    options = found.options(shop.journals)
    for side, at in (("starting", span.begin), ("ending", span.end)):
        decoded = vector_of_json(json.loads(options[f"{side}Offsets"]), side)
        assert (decoded, id_of(decoded[JOURNAL])) == ({JOURNAL: at}, span.journal_id)
    assert json.loads(options["assign"]) == [JOURNAL]


def test_as_of_a_checkpoint_and_of_offsets(shop: Shop) -> None:
    with pytest.raises(InvalidInput, match="has no checkpoint"):
        AsOf.checkpoint(shop.store, "live")
    store = shop.store.store()
    fence, _ = store.raise_fence("live")
    with store.transaction("live", fence) as transaction:
        transaction.commit(Checkpoint({JOURNAL: Source(12, journal_id="c1-2")}))
    assert AsOf.checkpoint(shop.store, "live") == AsOf.offsets({JOURNAL: 12}) == AsOf({JOURNAL: 12})
    ends = json.loads(AsOf.checkpoint(shop.store, "live").options(shop.journals)["endingOffsets"])
    assert ends == {JOURNAL: {"offset": 12, "journal_id": "c1-2"}}
    for ends, begins in (({}, {}), ({JOURNAL: 3}, {JOURNAL: 4}), ({JOURNAL: -1}, {}), ({JOURNAL: 3}, {"x": 1})):
        with pytest.raises(InvalidInput):
            AsOf.offsets(ends, begins)


def test_as_of_the_clock_is_the_end_of_journals_at_that_time(shop: Shop) -> None:
    before = dt.datetime.now(dt.UTC)
    shop.order(1)
    end = len('{"customer": "ada", "cents": 1}\n')
    with pytest.raises(InvalidInput, match="no time zone"):
        AsOf.clock(shop.journals, f"name={JOURNAL}", dt.datetime(2026, 1, 1))
    # These messages have no times, and are included.
    assert AsOf.clock(shop.journals, f"name={JOURNAL}", before) == AsOf({JOURNAL: end})


def test_as_of_a_window_has_its_offsets_even_after_a_merge(shop: Shop) -> None:
    for cents in (1, 2, 3, 4):
        shop.order(cents)
    shop.tick()
    assert shop.partitions() == ["00000001-00000002", "00000003", "00000004"]
    size = len('{"customer": "ada", "cents": 1}\n')
    for name, begin, end in (("00000002", 0, 2), ("00000001-00000002", 0, 2), ("00000003", 2, 3)):
        found = AsOf.window(shop.store, windowed.name, name)
        assert found == AsOf({JOURNAL: end * size}, {JOURNAL: begin * size})
    for consumer, name in ((windowed.name, "00000009"), ("nobody", "00000001")):
        with pytest.raises(InvalidInput):
            AsOf.window(shop.store, consumer, name)
