"""A consumer that sums each customer's cents in SQL."""

import os
from typing import Any

from sqlalchemy import BigInteger, Column, MetaData, String, Table, select

from coranto_consumers.runtime.application import Application
from coranto_consumers.stores import SqlShardStore

TOTALS = Table(
    "totals", MetaData(), Column("customer", String(100), primary_key=True), Column("cents", BigInteger, nullable=False)
)


class Totals(Application):
    """Adds the cents of each order to its customer's total."""

    def new_store(self, shard: Any) -> SqlShardStore:
        return SqlShardStore(os.environ["TOTALS_STORE_URL"], TOTALS)

    def consume_message(self, shard: Any, store: Any, message: Any, publisher: Any) -> None:
        order = message.message
        where = TOTALS.c.customer == order["customer"]
        row = store.connection.execute(select(TOTALS).where(where)).one_or_none()
        if row is None:
            store.connection.execute(TOTALS.insert().values(customer=order["customer"], cents=order["cents"]))
        else:
            store.connection.execute(TOTALS.update().where(where).values(cents=row.cents + order["cents"]))
