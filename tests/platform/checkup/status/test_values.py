"""The values of a snapshot."""

from __future__ import annotations

import pytest

from coranto.checkup.results import Condition, Examination
from coranto.checkup.status.values import StatusReport


@pytest.mark.parametrize("condition", Condition)
def test_only_problems_are_unhealthy(condition: Condition) -> None:
    judged = Examination("a", condition, "b")
    look = StatusReport(1.0, 0.1, None, (), (judged,), 0, 0, (), (), ())
    assert look.is_healthy is (condition is not Condition.PROBLEM)
    assert look.of(condition) == [judged]
