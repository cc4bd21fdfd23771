"""Tables of all databases are compared by the values of their keys, and every difference is reported."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Float,
    Integer,
    MetaData,
    Numeric,
    String,
    Table,
    insert,
    text,
)

from coranto.cli import main
from coranto.errors import CorruptData, InvalidInput, SqlStoreError
from coranto_consumers.comparison import TableOf, compare_tables, table_at
from coranto_consumers.comparison.tables import SortedTable
from coranto_consumers.stores.sql import SqlStore
from tests.consumers.stores.iceberg.named_catalog import named_catalog

NAMES = ["", "A", "B", "_", "a", "a ", "b", "aa", "ä", "Z", "z", "é", "日本", "\U0001f600", "a-b", "ab", "A b", "a\tb"]
"""Texts that languages do not sort by code points."""


def a_table(name: str) -> Table:
    return Table(
        name,
        MetaData(),
        Column("name", String(100), primary_key=True),
        Column("n", Integer, primary_key=True, autoincrement=False),
        Column("price", Numeric(12, 2)),
        Column("mean", Float(53)),
        Column("at", DateTime),
        Column("done", Boolean),
    )


def rows(count: int = 3) -> list[dict[str, object]]:
    at = dt.datetime(2026, 3, 1, 12, 0, 0)
    return [
        {"name": name, "n": n, "price": Decimal(n) / 4, "mean": n / 3, "at": at + dt.timedelta(hours=n), "done": n > 1}
        for name in NAMES
        for n in range(count)
    ]


def fill(store: SqlStore, name: str, content: list[dict[str, object]]) -> TableOf:
    table = a_table(name)
    store.create_tables(table)
    if content:
        with store.engine.begin() as connection:
            connection.execute(insert(table), content)
    return TableOf(store, name)


def test_tables_are_compared_for_any_sort_order_of_the_database(store_url: str) -> None:
    store = SqlStore(store_url)
    old = fill(store, "old", rows())
    changed = [each for each in reversed(rows()) if each["name"] != "Z"]
    changed[0] = {**changed[0], "price": Decimal("99.99")}
    new = fill(store, "new", [*changed, {**rows()[0], "name": "zz"}])

    assert compare_tables(old, fill(store, "same", rows()[::-1]), ["name", "n"]).is_equal
    with pytest.raises(InvalidInput, match="old is to be compared with itself"):
        compare_tables(old, old, ["name", "n"])
    found = compare_tables(old, new, ["name", "n"])
    assert not found.is_equal
    assert (found.merged.left.rows, found.merged.right.rows) == (54, 52)
    assert (found.merged.left.only_here, found.merged.right.only_here, found.merged.differing) == (3, 1, 1)
    assert found.merged.differing_in == {"price": 1}
    report = json.loads(found.to_json())
    assert report["examples"]["only_left"] == [{"name": "Z", "n": n} for n in range(3)]
    (example,) = report["examples"]["differing"]
    assert example["right"] == {"price": "99.99"}
    assert report["left"]["sums"]["n"] == 54
    assert Decimal(report["left"]["sums"]["price"]) == Decimal("13.5")


@pytest.mark.integration
def test_tables_of_different_databases_are_compared(new_store: Callable[[str], str]) -> None:
    old = fill(SqlStore(new_store("sqlite")), "totals", rows())
    new = fill(SqlStore(new_store("postgresql")), "totals", rows())
    found = compare_tables(old, new, ["name", "n"])
    assert found.is_equal, found.differences()
    assert found.merged.in_both == 54
    assert found.merged.left.name == "totals (left)"


def test_empty_tables_and_other_columns_are_not_equal(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    full, empty, none = fill(store, "a", rows(1)), fill(store, "b", []), fill(store, "c", [])
    assert compare_tables(full, empty, ["name"]).differences()[0] == "b is empty"
    assert compare_tables(empty, none, ["name"]).differences() == ["b and c are empty"]
    wider = fill(store, "d", rows(1))
    with store.engine.begin() as connection:
        connection.execute(text("ALTER TABLE d ADD COLUMN note TEXT"))
    assert compare_tables(full, wider, ["name"]).differences() == ["only d has the columns note"]
    assert compare_tables(full, wider, ["name"], ignore=["note"]).is_equal


def test_rows_without_a_key_and_repeated_keys_are_reported(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    with store.engine.begin() as connection:
        for name in ("a", "b"):
            connection.execute(text(f"CREATE TABLE {name} (id INTEGER, n INTEGER)"))
            connection.execute(text(f"INSERT INTO {name} VALUES (1, 1), (1, 1), (NULL, 2), (2, 2)"))
    found = compare_tables(TableOf(store, "a"), TableOf(store, "b"), ["id"])
    assert found.differences() == [
        "1 rows of a have NULL or NaN in their key: not compared",
        "1 rows of a repeat the key of another: not compared",
        "1 rows of b have NULL or NaN in their key: not compared",
        "1 rows of b repeat the key of another: not compared",
    ]


def test_an_incompletely_read_table_is_an_error(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    a, b = fill(store, "a", rows(1)), fill(store, "b", rows(1))
    with store.engine.connect() as connection:
        table = SortedTable(store, connection, "a")
        with pytest.raises(SqlStoreError, match="has 19 rows, and 18 of them were read"):
            list(table.rows(["name"], [], 19))
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE a SET at = 'yesterday' WHERE name = 'Z'"))
    with pytest.raises(CorruptData, match=r"table a: row .* holds a value that is not of its column's type"):
        compare_tables(b, a, ["name"])


@pytest.mark.parametrize(
    ("table", "keys", "ignore", "problem"),
    [
        ("b", ["id"], [], "there is no table b in"),
        ("c", ["nothing"], [], "table a: has no column nothing; its columns are name, n, price"),
        ("c", ["name"], ["nothing"], "neither table has a column nothing"),
        ("c", [], [], "name the columns"),
        ("a", ["name"], [], "a is to be compared with itself"),
    ],
)
def test_missing_tables_and_columns_are_refused(
    tmp_path: Path, table: str, keys: list[str], ignore: list[str], problem: str
) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/store.db")
    a = fill(store, "a", rows(1))
    fill(store, "c", rows(1))
    with pytest.raises(InvalidInput, match=problem):
        compare_tables(a, TableOf(store, table), keys, ignore=ignore)


def test_the_exit_code_of_the_command_says_if_tables_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = SqlStore(url)
    fill(store, "old", rows(1))
    fill(store, "new", [{**each, "mean": 1e-12} for each in rows(1)])
    command = ["consumer", "compare", "old", "new", "--store", url, "--key", "name"]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert f"different: {len(NAMES)} of {len(NAMES)} keys in both differ: mean ({len(NAMES)})" in shown
    assert ["'A'", "mean", "0.0", "1e-12"] in [line.split() for line in shown.splitlines()]
    assert main([*command, "--tolerance", "1e-9"]) == 0
    assert f"equal: {len(NAMES)} rows, in 6 columns" in capsys.readouterr().out
    assert main([*command, "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False
    assert main([*command[:3], "gone", *command[4:]]) == 1
    assert "there is no table gone" in capsys.readouterr().err


def test_iceberg_tables_are_compared_with_each_other_and_with_databases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog, url = named_catalog(tmp_path, monkeypatch), f"sqlite:///{tmp_path}/store.db"
    fill(SqlStore(url), "totals", rows())
    kinds = {"n": pa.int32(), "price": pa.decimal128(12, 2), "at": pa.timestamp("us", "UTC"), "done": pa.bool_()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in ("name", *kinds)]).append(
        pa.field("mean", pa.float64())
    )
    content = [{**each, "at": each["at"].replace(tzinfo=dt.UTC)} for each in rows()]  # type: ignore[attr-defined]
    old, new = (catalog.create_table(f"shop.{name}", schema) for name in ("old", "new"))
    catalog.create_table("shop.empty", schema)
    for part in (content[20:], content[:20]):  # Two files, not in the order of keys.
        old.append(pa.Table.from_pylist(part, schema))
    new.append(pa.Table.from_pylist([{**content[0], "price": Decimal("99.99")}, *content[1:-1]], schema))
    lake = "iceberg://lake/shop.old"
    compare = ["consumer", "compare", "--store", lake, "--key", "name", "-k", "n"]
    assert main([*compare, "shop.old", "totals", "--right-store", url]) == 0
    assert "equal: 54 rows, in 6 columns" in capsys.readouterr().out
    assert main([*compare, "old", "new", "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [each["right"] for each in report["examples"]["differing"]] == [{"price": "99.99"}]
    assert (report["left"]["rows"], report["right"]["rows"]) == (54, 53)
    assert [each["name"] for each in report["examples"]["only_left"]] == [content[-1]["name"]]
    assert (
        compare_tables(table_at(lake, "old"), table_at(lake, "empty"), ["name"]).differences()[0]
        == "shop.empty is empty"
    )
    with pytest.raises(InvalidInput, match=r"shop\.old is to be compared with itself"):
        compare_tables(table_at(lake, "old"), table_at(lake, "shop.old"), ["name"])
    with pytest.raises(InvalidInput, match=r"there is no table shop\.gone"):
        compare_tables(table_at(lake, "old"), table_at(lake, "gone"), ["name"])
    [file] = new.inspect.files()["file_path"].to_pylist()
    Path(file.removeprefix("file://")).unlink()
    with pytest.raises(SqlStoreError, match=r"iceberg lake/shop\.old: shop\.new could not be read"):
        compare_tables(table_at(lake, "old"), table_at(lake, "new"), ["name", "n"])
