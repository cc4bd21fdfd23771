"""The flights' consumer. It writes delays per carrier and month to a table, and alerts of late arrivals to a journal.

This module imports Spark. Import it when a consumer runs, not when definitions are loaded.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, String, Table

from coranto.client.groups import JournalGroup
from coranto_consumers.spark.application.outputs import JournalOutput, Outputs, TableOutput
from coranto_consumers.stores.merge import Add, Max, Quotient
from coranto_flights.data import ALERT_COLUMNS, ALERT_MINUTES
from coranto_flights.names import TABLE, consumer_name

_KEY = ("carrier", "year", "month")


def delays_table(name: str = TABLE) -> Table:
    """Return the table of flights per carrier and month.

    Delays are minutes of flights that arrived. Without arrivals, the mean and maximum are null.
    """
    return Table(
        name,
        MetaData(),
        Column("carrier", String(10), primary_key=True),
        Column("year", Integer, primary_key=True, autoincrement=False),
        Column("month", Integer, primary_key=True, autoincrement=False),
        Column("flights", BigInteger, nullable=False),
        Column("cancelled", BigInteger, nullable=False),
        Column("arrivals", BigInteger, nullable=False),
        Column("total_arr_delay", BigInteger, nullable=False),
        Column("mean_arr_delay", Double),
        Column("max_arr_delay", Integer),
    )


class CarrierDelays:
    """The application for the flights below `prefix`. It ignores messages without carrier, year or month."""

    value_schema = (
        "year INT, month INT, day INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, "
        "sched_dep_time INT, dep_time INT, arr_delay INT"
    )

    def __init__(self, prefix: str = "", table: str = TABLE) -> None:
        self._table = delays_table(table)
        self._events = JournalGroup("flights/events").under(prefix)
        self._alerts = JournalGroup("flights/alerts").under(prefix)
        self._name = consumer_name(prefix)

    @property
    def name(self) -> str:
        return self._name

    @property
    def sources(self) -> str:
        return self._events.selector_text

    def outputs(self, committed: DataFrame) -> Outputs:
        flights = committed.dropna(subset=list(_KEY))
        delays = flights.groupBy(*_KEY).agg(
            sf.count(sf.lit(1)).alias("flights"),
            sf.count_if(sf.col("dep_time").isNull()).alias("cancelled"),
            sf.count("arr_delay").alias("arrivals"),
            sf.coalesce(sf.sum("arr_delay"), sf.lit(0)).alias("total_arr_delay"),
            sf.max("arr_delay").alias("max_arr_delay"),
        )
        late = flights.where(sf.col("arr_delay") > ALERT_MINUTES)
        alerts = late.select(sf.col("carrier").alias("key"), sf.struct(*ALERT_COLUMNS).alias("value"))
        return Outputs(
            tables=[
                TableOutput(
                    self._table,
                    delays,
                    keys=_KEY,
                    merge={
                        "flights": Add(),
                        "cancelled": Add(),
                        "arrivals": Add(),
                        "total_arr_delay": Add(),
                        "mean_arr_delay": Quotient("total_arr_delay", "arrivals"),
                        "max_arr_delay": Max(),
                    },
                )
            ],
            journals=[JournalOutput(alerts, self._alerts.selector_text)],
        )
