"""Times in Go's layouts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coranto.fragments.go_time import format_time

MORNING = datetime(2013, 1, 5, 7, 8, 9, 120_000, tzinfo=UTC)  # a Saturday
EVENING = datetime(2024, 12, 31, 23, 59, 0, tzinfo=UTC)  # a Tuesday, the 366th day


@pytest.mark.parametrize(
    ("layout", "morning", "evening"),
    [
        ("2006-01-02", "2013-01-05", "2024-12-31"),
        ("2006-01-02T15:04:05Z07:00", "2013-01-05T07:08:09Z", "2024-12-31T23:59:00Z"),
        ("20060102150405", "20130105070809", "20241231235900"),
        ("06/1/2", "13/1/5", "24/12/31"),
        ("Monday, January _2", "Saturday, January  5", "Tuesday, December 31"),
        ("Mon Jan 2 15:04:05 MST 2006", "Sat Jan 5 07:08:09 UTC 2013", "Tue Dec 31 23:59:00 UTC 2024"),
        ("002 __2", "005   5", "366 366"),
        ("03:04:05PM", "07:08:09AM", "11:59:00PM"),
        ("3:4:5pm", "7:8:9am", "11:59:0pm"),
        ("05.000", "09.120", "00.000"),
        ("05.000000000", "09.120000000", "00.000000000"),
        ("05.999", "09.12", "00"),
        ("05,99", "09,12", "00"),
        ("-0700 -07:00 -07 Z0700 Z07", "+0000 +00:00 +00 Z Z", "+0000 +00:00 +00 Z Z"),
        ("-070000 -07:00:00 Z07:00:00", "+000000 +00:00:00 Z", "+000000 +00:00:00 Z"),
        ("_2006", "_2013", "_2024"),
        ("Month Janitor", "Month Janitor", "Month Janitor"),
        ("hour=15/", "hour=07/", "hour=23/"),
        ("", "", ""),
    ],
)
def test_times_are_formatted_by_go_layouts(layout: str, morning: str, evening: str) -> None:
    assert format_time(layout, MORNING) == morning
    assert format_time(layout, EVENING) == evening


@pytest.mark.parametrize(("hour", "expected"), [(0, "12AM"), (11, "11AM"), (12, "12PM"), (13, "01PM")])
def test_hours_are_formatted_in_12_hour_form(hour: int, expected: str) -> None:
    assert format_time("03PM", MORNING.replace(hour=hour)) == expected
