"""A shop in Dagster: verified journals, their recovery, and a consumer partitioned by windows."""

import json
import os
from collections import Counter
from datetime import timedelta
from typing import Any

import dagster as dg
from sqlalchemy import BigInteger, Column, MetaData, String, Table

from dagster_coranto import (
    AsOf,
    ConsumerSettings,
    JournalGroup,
    JournalResource,
    SparkResource,
    SqlStoreResource,
    build_journal_recovery,
    build_recovery_sensor,
    build_verification,
    build_window_sensor,
    build_windowed_consumer,
)

ORDERS, JOURNALS = JournalGroup("shop/orders"), JournalResource()
STORE = SqlStoreResource(url=f"sqlite:///{os.environ['CORANTO_DATA']}/shop.db")
TABLE = Table(
    "revenue_by_window",
    MetaData(),
    Column("coranto_window", BigInteger, primary_key=True, autoincrement=False),
    Column("customer", String(20), primary_key=True),
    Column("cents", BigInteger, nullable=False),
)


class Revenue:
    """Sums orders by customer and window."""

    name = "revenue"
    sources = "name:prefix=shop/orders/"
    value_schema = "customer STRING, cents BIGINT"

    def outputs(self, committed: Any) -> Any:
        from coranto_consumers.spark import Add, Outputs, TableOutput

        rows = committed.groupBy("customer").sum("cents").withColumnRenamed("sum(cents)", "cents")
        return Outputs(tables=[TableOutput(TABLE, rows, keys=["customer"], merge={"cents": Add()})])


def settings(context: dg.AssetExecutionContext) -> ConsumerSettings:
    return ConsumerSettings(Revenue(), STORE.url_with_password())


orders = dg.AssetSpec(
    ["shop", "orders"],
    kinds={"journal"},
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(days=1)),
    description="Orders, as they are placed.",
)
windowed = build_windowed_consumer(
    name="revenue_windows", settings=settings, sources=[ORDERS], tables=[dg.AssetSpec("revenue_by_window")]
)


@dg.asset(partitions_def=windowed.partitions_def, deps=[orders], kinds={"python"})
def order_counts(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
    """Orders by customer, of one window, without Spark."""
    window = AsOf.window(STORE, windowed.name, context.partition_key)
    counts: Counter[str] = Counter()
    with JOURNALS.client() as client:
        for journal, end in window.ends.items():
            content = b"".join(chunk.content for chunk in client.read(journal, window.begins[journal], end_offset=end))
            counts.update(order["customer"] for order in map(json.loads, content.splitlines()) if "customer" in order)
    return dg.MaterializeResult(
        metadata={
            "orders": counts.total(),
            "bytes": sum(window.ends.values()) - sum(window.begins.values()),
            "customers": dg.MetadataValue.json(dict(sorted(counts.items()))),
        }
    )


verification = build_verification(ORDERS)
recovery = build_journal_recovery(ORDERS)
windows = build_window_sensor(
    windowed,
    journals=JOURNALS,
    store=STORE,
    window_bytes=4_500,
    max_windows=3,
    minimum_interval_seconds=5,
    default_status=dg.DefaultSensorStatus.RUNNING,
)

defs = dg.Definitions.merge(
    verification.definitions,
    dg.Definitions(
        assets=[orders, order_counts, windowed.assets, windowed.windows],
        jobs=recovery.jobs,
        sensors=[windows, build_recovery_sensor(recovery, verification.check_keys)],
        resources={"journals": JOURNALS, "spark": SparkResource(short=True)},
        executor=dg.in_process_executor,
    ),
)
