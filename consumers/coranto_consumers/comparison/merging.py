"""Comparison of two tables' rows, both sorted by key, in one pass and bounded memory. Pure.

The order of rows is verified, because a database may sort text by the collation of a language. A row that is out of
order ends the comparison with an error: otherwise, rows would be reported as missing, or skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from coranto.errors import InvalidInput
from coranto_consumers.comparison.sums import Sum
from coranto_consumers.comparison.values import KeyKinds, is_nan, normal, same

Key: TypeAlias = tuple[Any, ...]
Row: TypeAlias = Sequence[Any]
"""The values of a row: the key's columns first, then the columns to compare."""


@dataclass(slots=True)
class Side:
    """One table of a comparison: its name, and counts of its rows.

    `unkeyed` rows have NULL or NaN in their key. `duplicates` have the key of an earlier row. Neither is compared.
    """

    name: str
    rows: int = 0
    only_here: int = 0
    unkeyed: int = 0
    duplicates: int = 0
    sums: dict[str, Sum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Example:
    """A key that is in one table only (the other's `values` are None), or whose values differ."""

    key: Key
    left: Row | None
    right: Row | None


@dataclass(slots=True)
class Merged:
    """The result of a comparison of rows. `differing_in` counts differing values by column."""

    left: Side
    right: Side
    in_both: int = 0
    differing: int = 0
    differing_in: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[Example]] = field(default_factory=lambda: {"left": [], "right": [], "differing": []})


class RowMerger:
    """Compares rows of `keys` and `columns`. Keeps at most `examples` of each kind of difference."""

    def __init__(
        self, keys: Sequence[str], columns: Sequence[str], *, tolerance: float = 0.0, examples: int = 10
    ) -> None:
        self._keys = tuple(keys)
        self._columns = tuple(columns)
        self._tolerance = tolerance
        self._max_examples = examples
        self._kinds = KeyKinds(keys)

    def merge(self, left: tuple[str, Iterable[Row]], right: tuple[str, Iterable[Row]]) -> Merged:
        """Compare the rows of two named tables. Raises InvalidInput for keys that are out of order or have no order."""
        merged = Merged(Side(left[0]), Side(right[0]))
        lefts, rights = self._ordered(merged.left, left[1]), self._ordered(merged.right, right[1])
        mine, other = next(lefts, None), next(rights, None)
        while mine is not None or other is not None:
            if other is None or (mine is not None and mine[0] < other[0]):
                assert mine is not None
                merged.left.only_here += 1
                self._keep(merged, "left", Example(mine[0], mine[1], None))
                mine = next(lefts, None)
            elif mine is None or other[0] < mine[0]:
                merged.right.only_here += 1
                self._keep(merged, "right", Example(other[0], None, other[1]))
                other = next(rights, None)
            else:
                self._compare(merged, mine[0], mine[1], other[1])
                mine, other = next(lefts, None), next(rights, None)
        return merged

    def _compare(self, merged: Merged, key: Key, left: Row, right: Row) -> None:
        merged.in_both += 1
        differing = [
            name
            for name, mine, other in zip(self._columns, left, right, strict=True)
            if not same(mine, other, self._tolerance)
        ]
        for name in differing:
            merged.differing_in[name] = merged.differing_in.get(name, 0) + 1
        if differing:
            merged.differing += 1
            self._keep(merged, "differing", Example(key, left, right))

    def _keep(self, merged: Merged, kind: str, example: Example) -> None:
        if len(merged.examples[kind]) < self._max_examples:
            merged.examples[kind].append(example)

    def _ordered(self, side: Side, rows: Iterable[Row]) -> Iterator[tuple[Key, Row]]:
        """Yield the first row of each key, with normalized values. Count and sum all rows."""
        size, before = len(self._keys), None
        names = (*self._keys, *self._columns)
        sums = side.sums = {name: Sum() for name in names}
        totals = tuple(sums.values())
        for row in rows:
            values = tuple(map(normal, row))
            side.rows += 1
            for total, value in zip(totals, values, strict=True):
                total.add(value)
            key = values[:size]
            if any(value is None or is_nan(value) for value in key):
                side.unkeyed += 1
                continue
            self._kinds.check(key, side.name)
            if before is not None and not before < key:
                if before != key:
                    raise InvalidInput(
                        f"the database gives the key {key!r} after {before!r}, so it does not sort them by their "
                        "values; choose other columns for the key",
                        field=side.name,
                    )
                side.duplicates += 1
                continue
            before = key
            yield key, values[size:]
