"""Tables in databases: differences, possible changes, and concurrent changes by several processes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from sqlalchemy import text

from coranto.errors import InvalidInput
from coranto_consumers.stores.sql import SqlStore
from coranto_consumers.tables import read_table
from coranto_consumers.tables.columns import TableLayout, layout_of
from coranto_consumers.tables.evolving import prepare
from coranto_consumers.tables.sql_target import SqlTarget

FILE = """
name: shop-items
input: {{journal: shop/items}}
columns: "{columns}"
store: {store}
table: items
mode: upsert
key: id
"""


def layout(store: str, columns: str, *, evolves: bool = True) -> TableLayout:
    found = layout_of(read_table(FILE.format(columns=columns, store=store)))
    return replace(found, spec=replace(found.spec, evolves=evolves))


def types(store: str) -> dict[str, tuple[str, bool]]:
    from sqlalchemy import inspect

    made = SqlStore(store)
    columns = inspect(made.engine).get_columns("items")
    return {each["name"]: (each["type"].compile(made.engine.dialect), each["nullable"]) for each in columns}


def test_a_table_is_created_and_evolves(store_url: str) -> None:
    first = layout(store_url, "id INT, n SMALLINT, d FLOAT, p DECIMAL(8, 2), s STRING")
    assert prepare(first, SqlTarget(first)) == ()
    assert prepare(first, SqlTarget(first)) == ()
    later = layout(store_url, "id BIGINT, n BIGINT, d DOUBLE, p DECIMAL(12, 3), s STRING, `new one` STRING NOT NULL")
    changes = prepare(later, SqlTarget(later))
    names = [each.field.name for each in changes]
    if store_url.startswith("sqlite"):  # The column accepts numbers of any size.
        assert names == ["new one"]
    else:
        assert names == ["id", "n", "p", "new one"]
        found = types(store_url)
        assert [found[name][0].replace(" ", "").replace("(20)", "") for name in ("id", "n", "p")] == [
            *("BIGINT", "BIGINT"),
            "NUMERIC(12,3)" if store_url.startswith("postgres") else "DECIMAL(12,3)",
        ]
        assert [found[name][1] for name in ("id", "n")] == [False, True]
        assert found["new one"][1]
    assert prepare(later, SqlTarget(later)) == ()
    assert prepare(first, SqlTarget(first)) == ()


def test_without_evolve_the_error_has_the_statement(store_url: str) -> None:
    first = layout(store_url, "id INT")
    prepare(first, SqlTarget(first))
    later = layout(store_url, "id INT, note STRING", evolves=False)
    with pytest.raises(InvalidInput, match=r"has no column 'note' \(ALTER TABLE items ADD COLUMN note (LONG)?TEXT\)"):
        prepare(later, SqlTarget(later))
    assert list(types(store_url)) == ["id"]


def test_changes_that_would_lose_values_are_refused(store_url: str) -> None:
    first = layout(store_url, "id INT, t STRING, n BIGINT")
    prepare(first, SqlTarget(first))
    wrong = layout(store_url, "id INT, t INT, n BIGINT")
    with pytest.raises(InvalidInput, match=r"'t' is .*: use a new table"):
        prepare(wrong, SqlTarget(wrong))
    if not store_url.startswith("sqlite"):
        wrong = layout(store_url, "id INT, t STRING, n DOUBLE")
        with pytest.raises(InvalidInput, match=r"'n' is BIGINT.*, and .* is needed, which does not hold all"):
            prepare(wrong, SqlTarget(wrong))


def test_several_processes_can_make_the_same_change(store_url: str) -> None:
    first = layout(store_url, "id INT")
    prepare(first, SqlTarget(first))
    later = layout(store_url, "id INT, a STRING, b BIGINT, c DOUBLE")
    failures: list[BaseException] = []

    def change() -> None:
        try:
            prepare(later, SqlTarget(later))
        except BaseException as error:  # noqa: BLE001 - the test inspects it
            failures.append(error)

    threads = [threading.Thread(target=change) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []
    assert list(types(store_url)) == ["id", "a", "b", "c"]


def test_a_not_null_column_for_an_optional_field_is_refused(store_url: str) -> None:
    with SqlStore(store_url).engine.begin() as connection:
        connection.execute(text("CREATE TABLE items (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)"))
    wrong = layout(store_url, "id INT, n INT")
    with pytest.raises(InvalidInput, match="'n' must not be null, and messages may lack it"):
        prepare(wrong, SqlTarget(wrong))
    right = layout(store_url, "id INT, n INT NOT NULL")
    assert prepare(right, SqlTarget(right)) == ()
