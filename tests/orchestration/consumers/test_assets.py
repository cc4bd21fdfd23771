"""The assets of a Spark consumer: runs that select some of them, and their freshness in Dagster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from coranto.client.loop import run_blocking
from coranto.testing.fake_broker import FakeBroker
from dagster_coranto import (
    ConsumerSettings,
    JournalGroup,
    JournalResource,
    SparkResource,
    SqlStoreResource,
    build_journal_observation_sensor,
    spark_consumer_assets,
)
from tests.orchestration.instances import new_instance
from tests.orchestration.revenue import ORDERS, Revenue
from tests.orchestration.staleness import status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from coranto_consumers.spark import Outputs

pytestmark = pytest.mark.integration

JOURNAL, ALERTS = "shop/orders/part-000", JournalGroup("shop/alerts")
TABLE, ALERTS_KEY, ORDERS_KEY = dg.AssetKey("revenue"), dg.AssetKey(["shop", "alerts"]), dg.AssetKey(["shop", "orders"])


class RevenueAndAlerts(Revenue):
    """An application that sums orders by customer, and publishes each order as an alert."""

    def outputs(self, committed: DataFrame) -> Outputs:
        from coranto_consumers.spark import JournalOutput, Outputs

        rows = committed.selectExpr("struct(customer) AS value", "customer AS key")
        alerts = JournalOutput(rows, ALERTS.selector_text)
        return Outputs(tables=super().outputs(committed).tables, journals=[alerts])


@spark_consumer_assets(sources=[ORDERS], tables=[dg.AssetSpec("revenue")], outputs=[ALERTS])
def consume_orders(context: dg.AssetExecutionContext, store: SqlStoreResource) -> ConsumerSettings:
    return ConsumerSettings(RevenueAndAlerts(), store.url_with_password())


@dg.asset(key=ORDERS_KEY)
def orders() -> None: ...


class Shop:
    def __init__(self, broker: FakeBroker, journals: JournalResource, folder: Path) -> None:
        self.broker = broker
        store = SqlStoreResource(url=f"sqlite:///{folder / 'store.db'}")
        self.observation = build_journal_observation_sensor(journals=journals, groups=[ORDERS], report_seconds=0)
        self.definitions = self.defined(dg.AssetSpec(ORDERS_KEY), journals, store)
        self.with_orders = self.defined(orders, journals, store)
        broker.create(JOURNAL)
        broker.create("shop/alerts/part-000")

    def defined(self, source: Any, journals: JournalResource, store: SqlStoreResource) -> dg.Definitions:
        return dg.Definitions(
            assets=[source, consume_orders],
            jobs=[dg.define_asset_job("only_the_table", selection=dg.AssetSelection.assets("revenue"))],
            resources={"journals": journals, "spark": SparkResource(), "store": store},
        )

    def order(self, cents: int) -> None:
        run_blocking(self.broker.write(JOURNAL, f'{{"customer": "ada", "cents": {cents}}}\n'.encode()))

    def observe(self, instance: dg.DagsterInstance) -> None:
        """Evaluate the observation sensor as the daemon does."""
        with dg.build_sensor_context(instance=instance) as context:
            result: Any = self.observation(context)
        for event in result.asset_events or ():
            instance.report_runless_asset_event(event)

    def run(self, instance: dg.DagsterInstance, definitions: dg.Definitions | None = None) -> dg.ExecuteInProcessResult:
        job = (definitions or self.definitions).resolve_job_def("only_the_table")
        return job.execute_in_process(instance=instance)


@pytest.fixture
def shop(broker: FakeBroker, journals: JournalResource, tmp_path: Path) -> Shop:
    return Shop(broker, journals, tmp_path)


def test_a_job_can_select_one_asset_of_a_consumer(spark: SparkSession, shop: Shop) -> None:
    """The run changes and reports the other assets, too."""
    shop.order(100)
    with new_instance() as instance:
        result = shop.run(instance)
        made_keys = {each.asset_key for each in result.asset_materializations_for_node("consume_orders")}
        assert made_keys == {TABLE, ALERTS_KEY, ORDERS_KEY}
        published = instance.get_latest_materialization_event(ALERTS_KEY)
        assert published is not None
        made = published.asset_materialization
        assert made is not None
        assert made.metadata["dagster-coranto/messages"].value == 1
        for key in (TABLE, ALERTS_KEY):
            assert status(instance, shop.definitions, key) == "FRESH"


def test_assets_that_have_read_all_journals_are_up_to_date(spark: SparkSession, shop: Shop) -> None:
    with new_instance() as instance:
        shop.order(100)
        shop.run(instance)
        shop.observe(instance)
        assert status(instance, shop.definitions, TABLE) == "FRESH", "reported after the run"
        shop.order(200)
        shop.observe(instance)
        assert status(instance, shop.definitions, TABLE) == "STALE", "it has not read the new order"
        shop.order(300)
        shop.run(instance)
        assert status(instance, shop.definitions, TABLE) == "FRESH", "it has read more than was reported"
        shop.observe(instance)
        assert [status(instance, shop.definitions, key) for key in (TABLE, ALERTS_KEY)] == ["FRESH", "FRESH"]


def test_a_source_published_by_dagster_does_not_keep_a_consumer_unsynced(spark: SparkSession, shop: Shop) -> None:
    with new_instance() as instance:
        dg.materialize([orders], instance=instance)
        shop.order(100)
        shop.run(instance, shop.with_orders)
        for key in (ORDERS_KEY, TABLE, ALERTS_KEY):
            assert status(instance, shop.with_orders, key) == "FRESH"
        shop.observe(instance)
        for key in (ORDERS_KEY, TABLE, ALERTS_KEY):
            assert status(instance, shop.with_orders, key) == "FRESH"
