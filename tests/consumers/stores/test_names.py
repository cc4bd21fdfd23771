"""Special names of tables and columns: with `%`, quotes and braces, and of the maximum length."""

from __future__ import annotations

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text, select

from coranto_consumers.stores import SqlStore
from coranto_consumers.stores.merge import Replace, merge_staged, plan_merge
from coranto_consumers.stores.staged_sql import StagedSql
from coranto_consumers.stores.staging import StageWriter, compare_plan, merge_in_transaction, stage_of

NAMES = {
    "percent": ("100%s of %(it)s %", "%s"),
    "quotes": ('a "b" `c`', "d'e"),
    "63 bytes": ("t" * 63, "c" * 63),
    "63 bytes of few letters": ("é" * 31 + "x", "ü" * 31 + "x"),
    "four bytes each": ("😀" * 15, "😀" * 15),
}


@pytest.mark.parametrize("kind", NAMES)
def test_rows_are_merged_and_appended_with_any_name(store_url: str, kind: str) -> None:
    name, column = NAMES[kind]
    if store_url.startswith("mysql") and kind != "percent":
        pytest.skip("MariaDB has names of at most 64 letters of three bytes")
    store = SqlStore(store_url)
    table = Table(
        name, MetaData(), Column("id", BigInteger, primary_key=True, autoincrement=False), Column(column, Text)
    )
    batch = pa.record_batch([pa.array([1, 2]), pa.array(["a", "b"])], names=["id", column])
    plans = [plan_merge(table, ["id", column], keys, {column: Replace()} if keys else {}) for keys in (["id"], [])]
    for number, plan in enumerate(plans):
        stage = stage_of(store, plan)
        compare_plan(store, plan, stage)
        with StageWriter(store_url, stage, "shard", 1, f"attempt{number}") as writer:
            writer.write_batch(batch.slice(number, 1))
        with store.engine.begin() as connection:
            merge_staged(connection, plan, stage, [f"attempt{number}"], 1)
    with store.engine.begin() as connection:
        merge_in_transaction(connection, plans[0], batch)
        assert connection.execute(select(table).order_by("id")).all() == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("kind", NAMES)
def test_statements_of_an_application_use_any_name(store_url: str, kind: str) -> None:
    name, column = NAMES[kind]
    if store_url.startswith("mysql") and kind != "percent":
        pytest.skip("MariaDB has names of at most 64 letters of three bytes")
    store = SqlStore(store_url)
    table = Table(name, MetaData(), Column("id", BigInteger, primary_key=True, autoincrement=False))
    rows = Table(name[:20], MetaData(), Column("id", BigInteger), Column(column, Text))
    sql = StagedSql(rows, [f"INSERT INTO {{{name}}} (id) SELECT s.id FROM {{stage}} AS s"], [table])
    stage = sql.prepare(store)
    with StageWriter(store_url, stage, "shard", 1, "won") as writer:
        writer.write([{"id": 7, column: "x"}])
    with store.engine.begin() as connection:
        sql.run(connection, stage, ["won"], 1)
        assert connection.execute(select(table)).all() == [(7,)]
