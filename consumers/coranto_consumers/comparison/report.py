"""Report of a comparison, as JSON and as a table. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from coranto_consumers.comparison.merging import Example, Merged, Side
from coranto_consumers.comparison.values import same


@dataclass(frozen=True, slots=True)
class TableComparison:
    """The comparison of two tables by `keys`.

    `columns` were compared, and `ignored` excluded by the caller. `only_left` and `only_right` are columns that the
    other table lacks.
    """

    keys: tuple[str, ...]
    columns: tuple[str, ...]
    merged: Merged
    ignored: tuple[str, ...] = ()
    only_left: tuple[str, ...] = ()
    only_right: tuple[str, ...] = ()
    tolerance: float = 0.0

    @property
    def is_equal(self) -> bool:
        """True if the tables are not empty, have the same columns, and all rows were compared and are equal."""
        return not self.differences()

    def differences(self) -> list[str]:
        """Return the differences between the tables as phrases. Empty if the tables are equal."""
        left, right, found = self.merged.left, self.merged.right, []
        if not left.rows or not right.rows:
            empty = [side.name for side in (left, right) if not side.rows]
            found.append(f"{' and '.join(empty)} {'is' if len(empty) == 1 else 'are'} empty")
        for side, others in ((left, self.only_left), (right, self.only_right)):
            if others:
                found.append(f"only {side.name} has the columns {', '.join(others)}")
        found += [f"{_keys(side.only_here)} only in {side.name}" for side in (left, right) if side.only_here]
        if self.merged.differing:
            places = ", ".join(f"{name} ({count:,})" for name, count in sorted(self.merged.differing_in.items()))
            found.append(f"{self.merged.differing:,} of {_keys(self.merged.in_both)} in both differ: {places}")
        for side in (left, right):
            if side.unkeyed:
                found.append(f"{side.unkeyed:,} rows of {side.name} have NULL or NaN in their key: not compared")
            if side.duplicates:
                found.append(f"{side.duplicates:,} rows of {side.name} repeat the key of another: not compared")
        return found

    def rows(self) -> list[list[str]]:
        """Return the measures of both tables as rows of text: name, left, right."""
        left, right = self.merged.left, self.merged.right
        found = [["rows", f"{left.rows:,}", f"{right.rows:,}"], ["keys only here", *_both(left, right, "only_here")]]
        for name, attribute in (("rows without key", "unkeyed"), ("repeated keys", "duplicates")):
            if getattr(left, attribute) or getattr(right, attribute):
                found.append([name, *_both(left, right, attribute)])
        for name in (*self.keys, *self.columns):
            one, other = left.sums[name], right.sums[name]
            if one.numbers or other.numbers:
                found.append([f"sum of {name}", str(one.total), str(other.total)])
            if one.others or other.others:
                found.append([f"NaN and infinite {name}", f"{one.others:,}", f"{other.others:,}"])
        return found

    def examples(self) -> list[list[str]]:
        """Return the first differences as rows of text: key, column, left, right."""
        found = []
        for example in self.merged.examples["differing"]:
            for name, left, right in self._differing(example):
                found.append([_shown(example.key), name, _shown(left), _shown(right)])
        for kind in ("left", "right"):
            for example in self.merged.examples[kind]:
                there = ["present", "missing"] if kind == "left" else ["missing", "present"]
                found.append([_shown(example.key), "", *there])
        return found

    def to_json(self) -> str:
        """Return the report as a JSON document. Decimals, times and bytes are text."""
        merged = self.merged
        document = {
            "equal": self.is_equal,
            "differences": self.differences(),
            "keys": self.keys,
            "columns": self.columns,
            "ignored": self.ignored,
            "tolerance": self.tolerance,
            "left": self._side(merged.left, self.only_left),
            "right": self._side(merged.right, self.only_right),
            "keys_in_both": merged.in_both,
            "differing": merged.differing,
            "differing_in": merged.differing_in,
            "examples": {
                "only_left": [self._named(each.key) for each in merged.examples["left"]],
                "only_right": [self._named(each.key) for each in merged.examples["right"]],
                "differing": [
                    {
                        "key": self._named(each.key),
                        "left": {name: _plain(value) for name, value, _ in self._differing(each)},
                        "right": {name: _plain(value) for name, _, value in self._differing(each)},
                    }
                    for each in merged.examples["differing"]
                ],
            },
        }
        return json.dumps(document, indent=2)

    def _side(self, side: Side, only: Sequence[str]) -> Mapping[str, object]:
        return {
            "table": side.name,
            "rows": side.rows,
            "keys_only_here": side.only_here,
            "rows_without_key": side.unkeyed,
            "repeated_keys": side.duplicates,
            "columns_only_here": list(only),
            "sums": {name: _plain(each.total) for name, each in side.sums.items() if each.numbers},
        }

    def _differing(self, example: Example) -> list[tuple[str, Any, Any]]:
        assert example.left is not None
        assert example.right is not None
        found = zip(self.columns, example.left, example.right, strict=True)
        return [(name, left, right) for name, left, right in found if not same(left, right, self.tolerance)]

    def _named(self, key: Sequence[Any]) -> Mapping[str, object]:
        return {name: _plain(value) for name, value in zip(self.keys, key, strict=True)}


def _keys(count: int) -> str:
    return f"{count:,} key{'' if count == 1 else 's'}"


def _both(left: Side, right: Side, attribute: str) -> list[str]:
    return [f"{getattr(left, attribute):,}", f"{getattr(right, attribute):,}"]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return "NULL" if value is None else repr(value) if isinstance(value, (str, bytes)) else str(value)


def _plain(value: Any) -> object:
    """Return a value for JSON: unchanged if JSON has its type, otherwise as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, (str, int, float, dict, list)):
        return value
    return format(value, "f") if isinstance(value, Decimal) else str(value)
