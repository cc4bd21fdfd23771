"""The last row of each key in a transaction, and keys in several journals."""

from __future__ import annotations

import pyarrow as pa
import pytest

from coranto.errors import InvalidInput
from coranto_consumers.stores.merge import Replace, plan_merge
from coranto_consumers.tables import read_table
from coranto_consumers.tables.columns import layout_of, sql_table
from coranto_consumers.tables.rows import JournalRows, last_rows, table_rows
from coranto_consumers.tables.spec import DELETED, OperationColumn

SPEC = read_table(
    """
name: shop-orders
input: {stream: shop/orders}
columns: id BIGINT, n INT
store: sqlite:////s.db
table: orders
mode: upsert
key: id
"""
)
PLAN = plan_merge(sql_table(layout_of(SPEC)), ["id", "n"], ["id"], {"n": Replace()})


def part(journal: str, *rows: tuple[int, int | None]) -> JournalRows:
    return JournalRows(
        journal,
        pa.RecordBatch.from_pylist(
            [{"id": key, "n": n} for key, n in rows], pa.schema([("id", pa.int64()), ("n", pa.int32())])
        ),
    )


def test_the_last_row_of_each_key() -> None:
    parts = [part("a", (1, 1), (2, 2), (1, 3)), part("b", (3, 9)), part("a", (2, None))]
    assert last_rows(SPEC, PLAN, parts).to_pylist() == [{"id": 1, "n": 3}, {"id": 2, "n": None}, {"id": 3, "n": 9}]


def test_a_key_in_two_journals_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"one key \(id\) are in a and b, and none .* one routing key"):
        last_rows(SPEC, PLAN, [part("a", (1, 1), (2, 2)), part("b", (3, 3), (2, 2))])


@pytest.mark.parametrize(
    ("values", "deletes", "marks"),
    [
        (pa.array(["d", "u", None, "D"]), ("d", "x"), [True, False, False, False]),
        (pa.array([True, False, None, True]), (), [True, False, False, True]),
    ],
)
def test_the_marks_of_deletions(values: pa.Array, deletes: tuple[str, ...], marks: list[bool]) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3, 4]), values], ["id", "op"])
    found = table_rows(batch, ["id"], OperationColumn("op", deletes))
    assert found.schema.names == ["id", DELETED]
    assert found.column(DELETED).to_pylist() == marks
    assert table_rows(batch, ["op"], None).schema.names == ["op"]
