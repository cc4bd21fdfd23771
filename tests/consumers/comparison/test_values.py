"""Equivalent values of different drivers are equal, and others are not."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from uuid import UUID

import pytest

from coranto.errors import InvalidInput
from coranto_consumers.comparison.values import KeyKinds, normal, same

NOON = dt.datetime(2026, 3, 1, 12)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (True, 1),
        (memoryview(b"ab"), b"ab"),
        (UUID(int=7), str(UUID(int=7))),
        (NOON.replace(tzinfo=dt.UTC), NOON),
        (NOON.replace(hour=14, tzinfo=dt.timezone(dt.timedelta(hours=2))), NOON),
        (Decimal("1.50"), Decimal("1.5")),
        (2, 2.0),
        (0.5, Decimal("0.5")),
        (0.0, -0.0),
        (float("nan"), Decimal("NaN")),
        (None, None),
        ({"a": [1]}, {"a": [1]}),
    ],
)
def test_equivalent_values_are_equal(left: object, right: object) -> None:
    assert same(normal(left), normal(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (0.1, Decimal("0.1")),  # The float is not exactly this decimal.
        (1.0, 1.0000000000000002),
        (float("nan"), 0.0),
        (None, 0),
        (None, ""),
        ("1", 1),
        ("a", "A"),
        ("a", "a "),
        (b"a", "a"),
        (NOON, NOON.date()),
        (NOON, NOON.replace(microsecond=1)),
        (9007199254740993, 9007199254740992.0),
    ],
)
def test_other_values_differ(left: object, right: object) -> None:
    assert not same(normal(left), normal(right))
    assert not same(normal(right), normal(left))


def test_a_tolerance_applies_only_to_floats() -> None:
    assert same(1e9, 1e9 + 1, 1e-9)
    assert same(0.1, Decimal("0.1"), 1e-9)
    assert not same(1e9, 1e9 + 2, 1e-9)
    assert not same(Decimal("1.0000000001"), Decimal(1), 1e-9)
    assert not same(10**12, 10**12 + 1, 1e-9)
    assert not same(float("inf"), 1e308, 1e-9)


def test_keys_of_different_kinds_are_refused() -> None:
    kinds = KeyKinds(["id"])
    kinds.check([1], "a")
    kinds.check([Decimal(2)], "b")
    with pytest.raises(InvalidInput, match="key id: holds text in b and numbers in a"):
        kinds.check(["3"], "b")
    with pytest.raises(InvalidInput, match="key id of c: is of type dict"):
        KeyKinds(["id"]).check([{}], "c")
