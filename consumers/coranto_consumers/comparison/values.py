"""Normalization and comparison of database values. Results do not depend on the driver. Pure."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

from coranto.errors import InvalidInput

Number: TypeAlias = int | float | Decimal


def normal(value: Any) -> Any:
    """Return a value in its normalized form, which is the same for all databases.

    Booleans become integers, as in databases without them. Times with a zone become UTC without one, as consumers write
    them. Bytes of any kind become `bytes`, and UUIDs their text.
    """
    match value:
        case bool():
            return int(value)
        case bytearray() | memoryview():
            return bytes(value)
        case UUID():
            return str(value)
        case dt.datetime() if value.tzinfo is not None:
            return value.astimezone(dt.UTC).replace(tzinfo=None)
        case _:
            return value


def is_nan(value: Any) -> bool:
    """Return True for a float or decimal that is NaN."""
    return (isinstance(value, float) and math.isnan(value)) or (isinstance(value, Decimal) and value.is_nan())


def same(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Return True if two normalized values are equal. NULL equals NULL, and NaN equals NaN.

    Numbers are compared exactly, regardless of type. With a tolerance, a float may differ from another number by that
    fraction of the larger one, or by that absolute amount.
    """
    if isinstance(left, Number) and isinstance(right, Number):
        if is_nan(left) or is_nan(right):
            return is_nan(left) and is_nan(right)
        if tolerance and (isinstance(left, float) or isinstance(right, float)):
            return math.isclose(float(left), float(right), rel_tol=tolerance, abs_tol=tolerance)
        return left == right
    return type(left) is type(right) and bool(left == right)


def kind_of(value: Any) -> str:
    """Return the kind of a normalized value. Keys of one kind have an order. Raises InvalidInput for other types."""
    match value:
        case int() | float() | Decimal():
            return "numbers"
        case str():
            return "text"
        case bytes():
            return "bytes"
        case dt.datetime():
            return "times"
        case dt.date():
            return "dates"
        case dt.time():
            return "times of day"
        case dt.timedelta():
            return "durations"
        case _:
            raise InvalidInput(f"is of type {type(value).__name__}, which has no order; choose other columns")


class KeyKinds:
    """The kinds of the columns of a key. They must be the same in all rows of both tables."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._kinds: list[tuple[str, str] | None] = [None] * len(columns)

    def check(self, key: Sequence[Any], where: str) -> None:
        """Check the key of a row in the table `where`. Raises InvalidInput."""
        for index, value in enumerate(key):
            try:
                kind = kind_of(value)
            except InvalidInput as error:
                raise InvalidInput(error.message, field=f"key {self._columns[index]} of {where}") from None
            known = self._kinds[index]
            if known is None:
                self._kinds[index] = kind, where
            elif known[0] != kind:
                raise InvalidInput(
                    f"holds {kind} in {where} and {known[0]} in {known[1]}, which have no common order; give the "
                    "column the same type in both tables",
                    field=f"key {self._columns[index]}",
                )
