"""The application of these tests: sums of orders by customer, in total or by window. It imports Spark when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, MetaData, String, Table

from dagster_coranto import JournalGroup

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from coranto_consumers.spark import Outputs

ORDERS = JournalGroup("shop/orders")
SCHEMA = "customer STRING, cents BIGINT"


def revenue_table(name: str, *more: Column[int]) -> Table:
    customer, cents = Column("customer", String(20), primary_key=True), Column("cents", BigInteger, nullable=False)
    return Table(name, MetaData(), *more, customer, cents)


REVENUE = revenue_table("revenue")
BY_WINDOW = revenue_table(
    "revenue_by_window", Column("coranto_window", BigInteger, primary_key=True, autoincrement=False)
)


class Revenue:
    """Sums orders by customer."""

    name = "revenue"
    value_schema = SCHEMA
    table = REVENUE

    def __init__(self, group: JournalGroup = ORDERS) -> None:
        self.sources = group.selector_text

    def outputs(self, committed: DataFrame) -> Outputs:
        from coranto_consumers.spark import Add, Outputs, TableOutput

        rows = committed.groupBy("customer").sum("cents").withColumnRenamed("sum(cents)", "cents")
        return Outputs(tables=[TableOutput(self.table, rows, keys=["customer"], merge={"cents": Add()})])


class RevenueByWindow(Revenue):
    """Sums orders by customer and window."""

    table = BY_WINDOW
