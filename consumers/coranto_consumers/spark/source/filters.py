"""Filters of a query that say which journals, offsets and times a batch read needs.

Spark hands them to a source only if `spark.sql.python.filterPushdown.enabled` is set, and applies them to the rows
again. So a filter that is not understood costs nothing but time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from coranto.client.moments import LARGEST_SKEW_SECONDS
from coranto.messages.columnar import Int64s, Mask, UInt64s
from coranto.messages.uuids import clock_to_ns

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_MOST: Final = (1 << 63) - 1
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], object]]] = {
    "EqualTo": operator.eq,
    "EqualNullSafe": operator.eq,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "StringStartsWith": str.startswith,
    "StringEndsWith": str.endswith,
    "StringContains": operator.contains,
}
"""By the names of the filters' classes, because PySpark before 4.1 has no classes of filters."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values of a column from `least` to `most`, both inclusive."""

    least: int = -_MOST - 1
    most: int = _MOST

    def within(self, least: int, most: int) -> Bounds:
        return Bounds(max(self.least, least), min(self.most, most))

    def mask(self, values: Int64s) -> Mask:
        mask: Mask = (values >= self.least) & (values <= self.most)
        return mask


@dataclass(frozen=True, slots=True)
class Narrowing:
    """The rows that filters ask for at most."""

    journals: tuple[Filter, ...] = ()
    """Filters of the names of journals."""
    offsets: Bounds = Bounds()
    clocks: Bounds = Bounds()

    @classmethod
    def of(cls, filters: Iterable[Filter], own: Mapping[str, str]) -> Narrowing:
        """Return what filters ask for, which must all hold. `own` has the source's fields by columns' names."""
        found = cls()
        for each in filters:
            path: tuple[str, ...] = getattr(getattr(each, "child", each), "attribute", ())
            field = own.get(path[0]) if len(path) == 1 else None
            if field == "journal" and _of_name(each, "") is not None:
                found = replace(found, journals=(*found.journals, each))
            elif field == "offset":
                found = replace(found, offsets=_narrowed(found.offsets, each))
            elif field == "clock":
                found = replace(found, clocks=_narrowed(found.clocks, each))
        return found

    def takes(self, journal: str) -> bool:
        """Return True if rows of a journal may pass."""
        return all(_of_name(each, journal) for each in self.journals)

    @property
    def since(self) -> int | None:
        """The time in milliseconds since 1970 UTC: content stored before has no row that passes. None: no such time.

        Producers' clocks may be ahead by an hour.
        """
        if self.clocks.least <= 0:
            return None
        return max(0, clock_to_ns(self.clocks.least) // 1_000_000 - LARGEST_SKEW_SECONDS * 1000)

    def mask(self, begins: Int64s, clocks: UInt64s) -> Mask:
        """Return the mask of messages that may pass, by their offsets and clocks."""
        return self.offsets.mask(begins) & self.clocks.mask(clocks.view(np.int64))


def _narrowed(bounds: Bounds, each: Filter) -> Bounds:
    """Return the bounds of what passes a filter of a column of integers, too."""
    match type(each).__name__, getattr(each, "value", None):
        case "EqualTo" | "EqualNullSafe", int(value):
            return bounds.within(value, value)
        case "GreaterThan", int(value):
            return bounds.within(value + 1, _MOST)
        case "GreaterThanOrEqual", int(value):
            return bounds.within(value, _MOST)
        case "LessThan", int(value):
            return bounds.within(-_MOST - 1, value - 1)
        case "LessThanOrEqual", int(value):
            return bounds.within(-_MOST - 1, value)
        case "In", [*values]:
            numbers = [value for value in values if isinstance(value, int)]
            return bounds.within(min(numbers), max(numbers)) if len(numbers) == len(values) and numbers else bounds
    return bounds


def _of_name(each: Any, name: str) -> bool | None:
    """Return True or False if a name passes a filter or does not, and None for a filter that is not understood."""
    match type(each).__name__, getattr(each, "value", None):
        case "In", [*values] if all(isinstance(value, str) for value in values):
            return name in values
        case "IsNotNull" | "IsNull" as kind, _:
            return kind == "IsNotNull"
        case "Not", _:
            inner = _of_name(each.child, name)
            return None if inner is None else not inner
        case kind, str(value) if kind in _COMPARISONS:
            return bool(_COMPARISONS[kind](name, value))
    return None
