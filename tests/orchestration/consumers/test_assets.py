"""The assets of a Spark consumer: runs that are asked for some of them, and whether Dagster takes them as fresh."""

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
    """Sums orders by customer, and publishes each order as an alert."""

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
        """Let the observation sensor tick as a daemon does."""
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


def test_a_job_may_select_one_of_a_consumers_assets(spark: SparkSession, shop: Shop) -> None:
    """The others change with it, and are reported, too."""
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


def test_what_has_read_all_journals_is_up_to_date_whoever_reports_their_growth_and_when(
    spark: SparkSession, shop: Shop
) -> None:
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


def test_a_source_that_dagster_publishes_to_keeps_no_consumer_unsynced(spark: SparkSession, shop: Shop) -> None:
    with new_instance() as instance:
        dg.materialize([orders], instance=instance)
        shop.order(100)
        shop.run(instance, shop.with_orders)
        for key in (ORDERS_KEY, TABLE, ALERTS_KEY):
            assert status(instance, shop.with_orders, key) == "FRESH"
        shop.observe(instance)
        for key in (ORDERS_KEY, TABLE, ALERTS_KEY):
            assert status(instance, shop.with_orders, key) == "FRESH"
