"""Rows are merged in Arrow as SQL stores merge them."""

import pyarrow as pa
import pytest
from sqlalchemy import BigInteger, Column, Double, MetaData, String, Table

from coranto.errors import InvalidInput
from coranto_consumers.stores.iceberg.merge import check_keys, match_keys, merge
from coranto_consumers.stores.merge import Add, Max, Min, Quotient, Replace, plan_merge

TOTALS = Table(
    "totals",
    MetaData(),
    Column("key", String, primary_key=True),
    Column("n", BigInteger),
    Column("total", Double),
    Column("most", BigInteger),
    Column("least", BigInteger),
    Column("name", String),
    Column("mean", Double),
    Column("kept", String),
)
COLUMNS = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        ("n", pa.int64()),
        ("total", pa.float64()),
        ("most", pa.int64()),
        ("least", pa.int64()),
        ("name", pa.string()),
        ("mean", pa.float64()),
        ("kept", pa.string()),
    ]
)
RULES = {
    "n": Add(),
    "total": Add(),
    "most": Max(),
    "least": Min(),
    "name": Replace(),
    "mean": Quotient("total", "n"),
}
PLAN = plan_merge(TOTALS, ["key", "n", "total", "most", "least", "name"], ["key"], RULES)


def rows(*given: dict) -> pa.Table:
    return pa.Table.from_pylist(list(given), COLUMNS)


def test_each_rule_combines_old_and_new_values_and_nulls():
    old = rows(
        {"key": "a", "n": 1, "total": 2.0, "most": 5, "least": 5, "name": "old", "mean": 2.0, "kept": "stays"},
        {"key": "b", "n": None, "total": None, "most": None, "least": 1, "name": "old"},
        {"key": "z", "n": 9},
    )
    new = pa.Table.from_pylist(
        [
            {"key": "a", "n": 3, "total": 4.0, "most": 7, "least": 7, "name": "new"},
            {"key": "b", "n": 0, "total": None, "most": 4, "least": None, "name": None},
            {"key": "c", "n": 2, "total": 3.0, "most": None, "least": 3, "name": "first"},
        ],
        pa.schema([COLUMNS.field(name) for name in PLAN.columns]),
    )
    same = match_keys(PLAN, old, new)
    assert same.to_pylist() == [True, True, False]
    met = old.filter(same)
    made = {row.pop("key"): tuple(row.values()) for row in merge(PLAN, met, new).to_pylist()}
    assert made == {
        "a": (4, 6.0, 7, 5, "new", 1.5, "stays"),
        "b": (0, None, 4, 1, None, None, None),
        "c": (2, 3.0, None, 3, "first", 1.5, None),
    }


def test_rows_are_deleted_by_key():
    plan = plan_merge(TOTALS, ["key", "name", "gone"], ["key"], {"name": Replace()}, "gone")
    new = pa.table({"key": ["a", "b", "c"], "name": ["x", "y", "z"], "gone": [True, None, True]})
    old = rows({"key": "a", "name": "old", "n": 1}, {"key": "b", "name": "old", "n": 2})
    assert [(row["key"], row["n"], row["name"]) for row in merge(plan, old, new).to_pylist()] == [("b", 2, "y")]
    assert merge(plan, old.slice(0, 1), new.slice(0, 1)).num_rows == 0


def test_invalid_merges_are_refused():
    twice = pa.table({"key": ["a", "a"], "name": ["x", "y"]})
    plan = plan_merge(TOTALS, ["key", "name"], ["key"], {"name": Replace()})
    with pytest.raises(InvalidInput, match=r"key \('a',\) was staged more than once"):
        check_keys(plan, twice)
    with pytest.raises(InvalidInput, match="key 'key' is null in a row"):
        check_keys(plan, pa.table({"key": pa.array([None], pa.string()), "name": ["x"]}))
    adding = plan_merge(TOTALS, ["key", "n"], ["key"], {"n": Add()})
    check_keys(adding, pa.table({"key": ["a", "a"], "n": [1, 2]}))
    with pytest.raises(InvalidInput, match="'n' no longer fits its column"):
        merge(adding, rows({"key": "a", "n": 2**63 - 1}), pa.table({"key": ["a"], "n": [1]}))
