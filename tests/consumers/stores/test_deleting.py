"""Rows that delete others by key, in all databases."""

import pytest
from sqlalchemy import JSON, Boolean, Column, Integer, MetaData, String, Table, insert, select

from coranto.errors import InvalidInput
from coranto_consumers.stores import Add, Replace, SqlStore
from coranto_consumers.stores.merge import MergePlan, merge_staged, plan_merge
from coranto_consumers.stores.staging import StageWriter, stage_name, stage_of

STOCK = Table(
    "stock",
    MetaData(),
    Column("shop", String(20), primary_key=True),
    Column("item", Integer, primary_key=True, autoincrement=False),
    Column("count", Integer),
)
KEYS = ("shop", "item")
PLAN = plan_merge(STOCK, (*KEYS, "count", "gone"), KEYS, {"count": Replace()}, "gone")


def merged(store: SqlStore, plan: MergePlan, rows: list[tuple], fence: int) -> list[tuple]:
    stage = stage_of(store, plan)
    names = (*KEYS, "count", "gone") if "count" in plan.columns else (*KEYS, "gone")
    with StageWriter(store.url, stage, "shard", fence, str(fence)) as writer:
        writer.write([dict(zip(names, row, strict=True)) for row in rows])
    with store.engine.begin() as connection:
        merge_staged(connection, plan, stage, [str(fence)], len(rows))
        return [tuple(row) for row in connection.execute(select(STOCK).order_by(*KEYS))]


def test_rows_delete_or_replace_rows_of_their_keys_or_are_added(store_url):
    store = SqlStore(store_url)
    assert merged(store, PLAN, [("a", 1, 10, False), ("a", 2, 20, None), ("b", 1, 30, False)], 1) == [
        ("a", 1, 10),
        ("a", 2, 20),
        ("b", 1, 30),
    ]
    later = [("a", 1, None, True), ("a", 2, 21, False), ("b", 2, 40, None), ("c", 9, None, True)]
    assert merged(store, PLAN, later, 2) == [("a", 2, 21), ("b", 1, 30), ("b", 2, 40)]
    with pytest.raises(InvalidInput, match="staged more than once"):
        merged(store, PLAN, [("b", 1, 1, False), ("b", 1, None, True)], 3)


def test_rows_with_only_keys_also_delete(store_url):
    store = SqlStore(store_url)
    plan = plan_merge(STOCK, (*KEYS, "gone"), KEYS, {}, "gone")
    store.create_tables(STOCK)
    with store.engine.begin() as connection:
        connection.execute(insert(STOCK), [{"shop": "a", "item": 1, "count": 5}])
    assert merged(store, plan, [("a", 1, True), ("a", 2, False)], 1) == [("a", 2, None)]
    with pytest.raises(InvalidInput, match="staged more than once"):
        merged(store, plan, [("a", 2, True), ("a", 2, True)], 2)


def test_a_column_of_deletes_makes_another_stage_table():
    without = plan_merge(STOCK, (*KEYS, "count"), KEYS, {"count": Replace()})
    other = plan_merge(STOCK, (*KEYS, "count", "dropped"), KEYS, {"count": Replace()}, "dropped")
    assert len({stage_name(plan) for plan in (PLAN, without, other)}) == 3


@pytest.mark.parametrize(
    ("columns", "keys", "rules", "delete", "problem"),
    [
        ((*KEYS, "count"), KEYS, {}, "count", "'count' is a column of the table"),
        ((*KEYS, "count"), KEYS, {"count": Replace()}, "gone", "the rows have no column 'gone'"),
        ((*KEYS, "gone"), (), {}, "gone", "'gone' deletes rows by their keys, and there are none"),
        ((*KEYS, "count", "gone"), KEYS, {"count": Add()}, "gone", r"use Replace\(\) for all columns"),
        ((*KEYS, "coranto_fence"), KEYS, {}, "coranto_fence", "'coranto_fence' is reserved"),
    ],
)
def test_invalid_columns_of_deletes_are_refused(columns, keys, rules, delete, problem):
    with pytest.raises(InvalidInput, match=problem):
        plan_merge(STOCK, columns, keys, rules, delete)


def test_columns_without_an_order_are_replaced_next_to_deletions(store_url):
    """PostgreSQL has no largest BOOLEAN and no largest JSON."""
    flags = Table(
        "flags",
        MetaData(),
        Column("id", Integer, primary_key=True, autoincrement=False),
        Column("is_set", Boolean),
        Column("parts", JSON),
    )
    store = SqlStore(store_url)
    plan = plan_merge(
        flags, ("id", "is_set", "parts", "gone"), ("id",), {"is_set": Replace(), "parts": Replace()}, "gone"
    )
    stage = stage_of(store, plan)
    with StageWriter(store.url, stage, "shard", 1, "1") as writer:
        names = ("id", "is_set", "parts", "gone")
        rows = [(1, True, {"a": [1]}, False), (2, None, None, None), (3, False, None, True)]
        writer.write([dict(zip(names, row, strict=True)) for row in rows])
    with store.engine.begin() as connection:
        merge_staged(connection, plan, stage, ["1"], 3)
        found = [tuple(row) for row in connection.execute(select(flags).order_by(flags.c.id))]
    assert found == [(1, True, {"a": [1]}), (2, None, None)]
