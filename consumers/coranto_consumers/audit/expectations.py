"""Expectations of a user about a consumer's tables, such as `SELECT COUNT(*) FROM orders == messages`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, TypeAlias

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages import Envelope

Number: TypeAlias = int | Decimal

_SEPARATOR: Final = re.compile(r"\s==\s*(?P<measure>[^=]+?)\s*$")
_SUM: Final = re.compile(r"sum\(\s*(?P<pointer>(?:/[^/()]+)+)\s*\)")
_RELATIVE_ERROR: Final = Decimal("1e-9")
"""The relative tolerance for sums: a database may compute them in binary floating point."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number for each committed message. The sum over all messages is compared with a query's result.

    `name` identifies the measure in the memory of audits: rename a measure that you change.
    """

    name: str
    of: Callable[[Envelope[Any]], Number]


MESSAGES: Final = Measure("messages", lambda envelope: 1)
"""Counts messages."""


def sum_of(pointer: str) -> Measure:
    """Return the measure that sums the member of JSON messages at a JSON pointer, such as `/order/cents`.

    A missing or non-numeric member counts as 0. So does a malformed line: a consumer stores it as a misfit, or with
    nulls.
    """
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]

    def value(envelope: Envelope[Any]) -> Number:
        try:
            found: Any = envelope.message
        except CorruptMessage:
            return 0
        for step in steps:
            found = found.get(step) if isinstance(found, dict) else None
        if isinstance(found, bool) or not isinstance(found, int | float):
            return 0
        return found if isinstance(found, int) else Decimal(repr(found))

    return Measure(f"sum({pointer})", value)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expectation that a query's result equals the sum of a measure over all committed messages.

    The query returns one row of one number. It runs in the audit's snapshot of the checkpoints.
    """

    query: str
    measure: Measure

    def __str__(self) -> str:
        return f"{self.query} == {self.measure.name}"


def parse_expectation(text: str) -> Expectation:
    """Parse an expectation, such as `SELECT SUM(cents) FROM totals == sum(/cents)`. Raises InvalidInput."""
    match = _SEPARATOR.search(text)
    if match is None:
        raise InvalidInput(
            f"{text!r} is not an expectation. Write a query, ` == `, and `messages` or `sum(/pointer)`", field="expect"
        )
    query, name = text[: match.start()].strip().rstrip(";"), match["measure"]
    if not query:
        raise InvalidInput(f"{text!r} has no query before ` == `", field="expect")
    if name == MESSAGES.name:
        return Expectation(query, MESSAGES)
    summed = _SUM.fullmatch(name)
    if summed is None:
        raise InvalidInput(f"{name!r} is not a measure; use `messages` or `sum(/pointer)`", field="expect")
    return Expectation(query, sum_of(summed["pointer"]))


def number(value: object) -> Number | None:
    """Return a query's result as a number: 0 for NULL, and None for a value that is not a number."""
    match value:
        case None:
            return 0
        case bool():
            return None
        case int() | Decimal():
            return value
        case float():
            return Decimal(repr(value))
        case _:
            return None


def agree(found: Number, expected: Number) -> bool:
    """Return True if a query's result equals the expected sum: exactly for integers, else within the tolerance."""
    if isinstance(found, int) and isinstance(expected, int):
        return found == expected
    one, other = Decimal(found), Decimal(expected)
    return abs(one - other) <= _RELATIVE_ERROR * max(abs(one), abs(other))
