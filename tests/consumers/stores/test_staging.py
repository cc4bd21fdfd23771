"""Stage tables next to tables of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, make_url, text

from coranto_consumers.spark import Outputs, SparkConsumer
from coranto_consumers.stores.merge import Add, plan_merge
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.stores.staging import StageWriter, stage_of

if TYPE_CHECKING:
    from tests.consumers.conftest import Broker


class Blue:
    """An application without content to read."""

    name = "blue"
    sources = "name=a/source"
    value_schema = "key BIGINT"

    def outputs(self, committed: Any) -> Outputs:
        return Outputs()


def consumer(url: str, broker: Broker) -> SparkConsumer:
    def no_session() -> Any:
        raise AssertionError("there is nothing to read")

    return SparkConsumer(Blue(), broker.config, url, no_session)


def stage(store: SqlStore, url: str, shard: str, fence: int) -> str:
    """Stage rows of a consumer that it will not merge, and return the name of their table."""
    columns = Column("key", BigInteger, primary_key=True), Column("total", BigInteger)
    plan = plan_merge(Table(f"sums_of_{shard}", MetaData(), *columns), ["key", "total"], ["key"], {"total": Add()})
    table = stage_of(store, plan)
    with StageWriter(url, table, shard, fence, "attempt") as writer:
        writer.write([{"key": 1, "total": 1}])
    return table.name


def staged(store: SqlStore, table: str) -> int:
    with store.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())


def test_tables_that_only_look_like_stage_tables_are_kept(store_url: str, broker: Broker) -> None:
    broker.create("a/source")
    store = SqlStore(store_url)
    table = stage(store, store_url, "blue", 0)
    with store.engine.begin() as connection:
        connection.execute(text("CREATE TABLE coranto_stage_of_somebody (coranto_shard VARCHAR(20), n INTEGER)"))
        connection.execute(text("INSERT INTO coranto_stage_of_somebody VALUES ('blue', 1)"))
    consumer(store_url, broker).run_until_caught_up()
    assert staged(store, table) == 0
    assert staged(store, "coranto_stage_of_somebody") == 1


@pytest.mark.integration
def test_a_consumer_starts_next_to_stage_tables_without_access(
    new_store: Callable[[str], str], broker: Broker, postgres: Any
) -> None:
    """Another consumer's role owns them. The consumer still deletes its own staged rows."""
    broker.create("a/source")
    url = new_store("postgresql")
    store = SqlStore(url)
    store.create_tables()
    with store.engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS blue"))
        connection.execute(text("CREATE ROLE blue LOGIN PASSWORD 'secret'"))
        connection.execute(text("GRANT CREATE, USAGE ON SCHEMA public TO blue"))
        connection.execute(text("GRANT SELECT, INSERT, UPDATE ON gazette_checkpoints TO blue"))
    others = stage(store, url, "red", 0)
    mine = make_url(url).set(username="blue").render_as_string(hide_password=False)
    table = stage(SqlStore(mine), mine, "blue", 0)
    consumer(mine, broker).run_until_caught_up()
    assert staged(store, table) == 0
    assert staged(store, others) == 1
