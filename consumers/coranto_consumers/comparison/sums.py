"""Exact sums of a column's numbers, which do not depend on the order of rows. Pure."""

from __future__ import annotations

import math
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from typing import Any, Final

from coranto_consumers.comparison.values import Number

_SCALE: Final = 1074
"""All finite floats are multiples of 2**-_SCALE."""
_EXACT: Final = Context(prec=2000, traps=[Inexact])


class Sum:
    """The sum of a column. `numbers` counts the summands, and `others` the omitted NaN and infinite numbers."""

    def __init__(self) -> None:
        self.numbers = 0
        self.others = 0
        self._whole = 0
        self._decimal = Decimal(0)
        self._scaled = 0
        self._has_floats = False

    def add(self, value: Any) -> None:
        """Add a normalized value of the column. Values other than numbers are ignored."""
        match value:
            case int():
                self._whole += value
            case float():
                if not math.isfinite(value):
                    self.others += 1
                    return
                numerator, denominator = value.as_integer_ratio()
                self._scaled += numerator * ((1 << _SCALE) // denominator)
                self._has_floats = True
            case Decimal():
                if not value.is_finite():
                    self.others += 1
                    return
                self._decimal = _EXACT.add(self._decimal, value)
            case _:
                return
        self.numbers += 1

    @property
    def total(self) -> Number:
        """The sum: of integers, an integer; of floats, the float nearest to it; otherwise a decimal."""
        exact = _EXACT.add(self._decimal, Decimal(self._whole))
        if self._has_floats:
            true = Fraction(self._scaled, 1 << _SCALE) + Fraction(exact)
            try:
                return float(true)
            except OverflowError:
                return math.inf if true > 0 else -math.inf
        return exact if self._decimal.as_tuple().exponent != 0 or self._decimal else self._whole
