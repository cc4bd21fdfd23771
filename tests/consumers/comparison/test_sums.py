"""Sums are exact for any order of rows."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from coranto_consumers.comparison.sums import Sum

NUMBERS = st.lists(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-(10**20), 10**20, places=6),
    max_size=20,
)


def of(values: list[int | float | Decimal]) -> Sum:
    found = Sum()
    for value in values:
        found.add(value)
    return found


@given(NUMBERS)
def test_a_sum_is_the_number_nearest_to_the_exact_sum(values: list[int | float | Decimal]) -> None:
    true, found = sum(map(Fraction, values), Fraction(0)), of(values).total
    if not any(isinstance(each, float) for each in values):
        assert found == true
    elif abs(true) < Fraction(1.7e308):
        assert found == float(true)


def test_small_floats_are_not_lost_next_to_large_ones() -> None:
    assert of([1e100, 1.0, -1e100]).total == 1.0
    assert of([0.1] * 10).total == math.fsum([0.1] * 10)
    assert of([1.7e308, 1.7e308]).total == math.inf


def test_values_that_are_not_numbers_are_counted_separately() -> None:
    found = of([1, float("nan"), float("-inf"), Decimal("NaN")])
    found.add(None)
    found.add("7")
    assert (found.total, found.numbers, found.others) == (1, 1, 3)
