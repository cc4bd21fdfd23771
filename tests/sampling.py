"""Samples of long tables of cases: `make test` runs some of them, and `make test-all` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`, all but each `every`-th of them marked `exhaustive`.

    Raises ValueError if one has marks or an id already.
    """
    found = []
    for number, case in enumerate(cases):
        if isinstance(case, type(pytest.param())):
            raise ValueError(f"case {number} is a pytest.param: mark it `exhaustive` yourself")
        found.append(case if number % every == 0 else pytest.param(case, marks=pytest.mark.exhaustive))
    return found
