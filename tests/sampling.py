"""Samples of long tables of cases: `make test` runs some of them, and `make test-all` runs all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import hypothesis
import pytest

T = TypeVar("T")
SAMPLE, REST = "sample", "rest"
PARTS = pytest.mark.parametrize("part", [SAMPLE, pytest.param(REST, marks=pytest.mark.exhaustive)])
"""Marks for tests that run through a list of cases: `make test` runs the sample, `make test-all` also the rest."""


def examples(full: int) -> int:
    """Return the number of examples of a property: `full` in `make test-all`, and fewer in `make test`."""
    return full * hypothesis.settings.default.max_examples // 100


def part_of(part: str, cases: Iterable[T], sample: Collection[T]) -> list[T]:
    """Return the cases of a part of `PARTS`, in order. Raises ValueError if `sample` names an unknown case."""
    known = list(cases)
    if unknown := [case for case in sample if case not in known]:
        raise ValueError(f"not among the cases: {unknown}")
    return [case for case in known if (case in sample) == (part == SAMPLE)]


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`, all but each `every`-th of them marked `exhaustive`.

    Raises ValueError if a case already has marks or an id.
    """
    found = []
    for number, case in enumerate(cases):
        if isinstance(case, type(pytest.param())):
            raise ValueError(f"case {number} is a pytest.param: mark it `exhaustive` yourself")
        found.append(case if number % every == 0 else pytest.param(case, marks=pytest.mark.exhaustive))
    return found
