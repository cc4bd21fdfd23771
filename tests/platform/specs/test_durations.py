"""Durations as text."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.specs.durations import format_duration, parse_duration


@given(st.integers(-(2**62), 2**62))
def test_durations_round_trip(nanoseconds: int) -> None:
    duration = Duration()
    duration.FromNanoseconds(nanoseconds)
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.parametrize(
    ("text", "nanoseconds", "canonical"),
    [
        ("0", 0, "0s"),
        ("0s", 0, "0s"),
        ("5m0s", 300 * 10**9, "5m0s"),
        ("5m", 300 * 10**9, "5m0s"),
        ("90s", 90 * 10**9, "1m30s"),
        ("720h", 720 * 3600 * 10**9, "720h0m0s"),
        ("1h0m0.5s", 3600 * 10**9 + 5 * 10**8, "1h0m0.5s"),
        (".5h", 1800 * 10**9, "30m0s"),
        ("250ms", 250 * 10**6, "250ms"),
        ("1.5ms", 1500 * 10**3, "1.5ms"),
        ("3us", 3000, "3µs"),
        ("3μs", 3000, "3µs"),
        ("7ns", 7, "7ns"),
        ("-1m", -60 * 10**9, "-1m0s"),
        ("+1m", 60 * 10**9, "1m0s"),
    ],
)
def test_durations_are_parsed_and_formatted(text: str, nanoseconds: int, canonical: str) -> None:
    duration = parse_duration(text)
    assert duration.ToNanoseconds() == nanoseconds
    assert format_duration(duration) == canonical


@pytest.mark.parametrize("text", ["", "-", "5", "m", "5 m", "5m ", "1d", "1.2.3s", "1e3s", "5mm", "--5m"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a duration such as 30s"):
        parse_duration(text)


def test_too_long_durations_are_refused() -> None:
    with pytest.raises(InvalidInput, match="292 years"):
        parse_duration("2562048h")
