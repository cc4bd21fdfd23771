"""The range of a fragment's growth without a roll."""

from __future__ import annotations

import pytest

from coranto.fragments.fragment import ZERO_SUM, Codec, Fragment
from coranto_broker.spool.steady import Steady


@pytest.mark.parametrize(
    ("begin", "end", "now", "expected"),
    [(10, 20, 4.9, True), (10, 10, 0.0, True), (10, 21, 4.9, False), (11, 20, 4.9, False), (10, 20, 5.0, False)],
)
def test_a_fragment_grows_only_within_its_length_and_time(begin: int, end: int, now: float, expected: bool) -> None:
    fragment = Fragment("a/journal", begin, end, ZERO_SUM, Codec.NONE)
    assert Steady(10, 20, 5.0).holds(fragment, now) is expected
