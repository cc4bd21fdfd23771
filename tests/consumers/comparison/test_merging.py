"""One pass over sorted rows equals a comparison of whole tables, and checks the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto_consumers.comparison.merging import Merged, RowMerger
from coranto_consumers.comparison.report import TableComparison

ROWS = st.lists(st.tuples(st.integers(0, 9) | st.none(), st.sampled_from([None, 1, 2])), max_size=12)


def in_order(rows: list[tuple[int | None, int | None]]) -> list[tuple[int | None, int | None]]:
    return sorted(rows, key=lambda row: (row[0] is None, row[0] or 0))


def merged(left: list[tuple[int | None, int | None]], right: list[tuple[int | None, int | None]]) -> Merged:
    return RowMerger(["id"], ["n"], examples=3).merge(("old", in_order(left)), ("new", in_order(right)))


@given(ROWS, ROWS)
def test_a_merge_of_sorted_rows_equals_a_comparison_by_dictionaries(
    left: list[tuple[int | None, int | None]], right: list[tuple[int | None, int | None]]
) -> None:
    found = merged(left, right)
    sides = []
    for rows, side in ((in_order(left), found.left), (in_order(right), found.right)):
        first: dict[int, int | None] = {}
        for key, value in rows:
            if key is not None:
                first.setdefault(key, value)
        assert side.rows == len(rows)
        assert side.unkeyed == sum(key is None for key, _ in rows)
        assert side.duplicates == len(rows) - side.unkeyed - len(first)
        assert side.sums["n"].total == sum(value or 0 for _, value in rows)
        sides.append(first)
    one, other = sides
    assert found.left.only_here == len(one.keys() - other.keys())
    assert found.right.only_here == len(other.keys() - one.keys())
    assert found.in_both == len(one.keys() & other.keys())
    assert found.differing == sum(one[key] != other[key] for key in one.keys() & other.keys())
    assert found.differing_in.get("n", 0) == found.differing
    differing = sorted(key for key in one.keys() & other.keys() if one[key] != other[key])
    assert [each.key[0] for each in found.examples["differing"]] == differing[:3]
    assert [each.key[0] for each in found.examples["left"]] == sorted(one.keys() - other.keys())[:3]
    assert TableComparison(("id",), ("n",), found).is_equal == (
        bool(left) and in_order(left) == in_order(right) and len(one) == len(left)
    )


def test_rows_out_of_order_end_the_comparison() -> None:
    with pytest.raises(InvalidInput, match=r"old: the database gives the key \('B',\) after \('a',\)"):
        RowMerger(["id"], []).merge(("old", [["a"], ["B"]]), ("new", [["a"], ["B"]]))
