"""The position and the rows of a table in its store, and its description next to its file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from coranto.types.kinds import PlainKind, TypeField
from coranto_consumers.tables import read_table
from coranto_consumers.tables.columns import layout_of
from coranto_consumers.tables.evolving import ColumnChange, TableState
from coranto_consumers.tables.state import TableProgress, describe, expectation_of, stored_progress
from tests.consumers.tables.shop import Shop, run, table_file


def test_progress_before_and_after_the_first_commit(shop: Shop, place: tuple[str, str]) -> None:
    journal = f"{shop.name}/items"
    shop.create(journal)
    file = table_file(f"{{journal: {journal}}}", place[0], table=place[1])
    spec = read_table(file)
    assert stored_progress(spec) == TableProgress({}, None, None)
    run(shop, file)
    assert stored_progress(spec) == TableProgress({journal: 0}, None, 0)
    began = time.time()
    shop.publish(journal, {"id": 1}, {"id": 2})
    run(shop, file)
    found = stored_progress(spec)
    assert (found.rows, found.offsets) == (2, {journal: shop.client.head(journal)})
    assert found.last_commit is not None
    assert began - 1 < found.last_commit < time.time() + 1


def test_the_last_commit_has_the_time_of_the_last_event(shop: Shop, tmp_path: Path) -> None:
    stream = shop.stream(2)
    spec = read_table(file := table_file(f"{{stream: {stream}}}", f"sqlite:///{tmp_path}/s.db", "upsert"))
    began = time.time()
    shop.write(stream, {"id": 1}, {"id": 2})
    run(shop, file)
    first = stored_progress(spec).last_commit
    assert first is not None
    assert began - 1 < first < time.time() + 1
    shop.write(stream, {"id": 3})
    run(shop, file)
    last = stored_progress(spec).last_commit
    assert last is not None
    assert last > first


@pytest.mark.parametrize(
    ("mode", "more", "store", "expected"),
    [
        ("append", {}, "sqlite:////s.db", ["SELECT COUNT(*) FROM items == messages"]),
        ("append", {"misfits": "nulls"}, "sqlite:////s.db", ["SELECT COUNT(*) FROM items == messages"]),
        ("append", {"table": "order"}, "sqlite:////s.db", ['SELECT COUNT(*) FROM "order" == messages']),
        ("append", {"filter": "id > 1", "runner": "spark"}, "sqlite:////s.db", []),
        ("upsert", {}, "sqlite:////s.db", []),
        ("append", {"table": "shop.items"}, "iceberg://lake", ['SELECT COUNT(*) FROM "shop"."items" == messages']),
    ],
)
def test_audits_expect_as_many_rows_as_messages(
    mode: str, more: dict[str, str], store: str, expected: list[str]
) -> None:
    assert expectation_of(read_table(table_file("{stream: shop/items}", store, mode, **more))) == expected


def test_the_description_names_differences(tmp_path: Path) -> None:
    file = table_file("{stream: shop/items}", f"sqlite:///{tmp_path}/s.db", columns="id BIGINT, note STRING")
    layout = layout_of(read_table(file))
    change = ColumnChange(TypeField("note", PlainKind.STRING), "has no column 'note'", "ADD note")

    def lines(state: TableState, *, evolves: bool = False) -> list[tuple[str, bool]]:
        return list(describe(replace(layout, spec=replace(layout.spec, evolves=evolves)), state))[1:]

    assert [each[1] for each in lines(TableState(False))] == [False]
    assert lines(TableState(True)) == []
    assert lines(TableState(True, [], ["too narrow"])) == [("table items: too narrow", True)]
    [(text, is_problem)] = lines(TableState(True, [change]))
    assert is_problem
    assert "has no column 'note' (ADD note)" in text
    assert lines(TableState(True, [change]), evolves=True) == [
        ("the table has no column 'note'; `coranto table run` makes the change: ADD note", False)
    ]
