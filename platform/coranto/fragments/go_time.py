"""Formatting of times with Go's layouts, which show the reference time `Mon Jan 2 15:04:05 2006`.

Journal specs are shared with Gazette's brokers, whose path templates format times this way. Times are in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# A chunk comes before its prefixes. "Jan" and "Mon" aren't chunks at the start of a longer word.
_CHUNK = re.compile(
    r"January|Jan(?![a-z])|Monday|Mon(?![a-z])|MST"
    r"|2006|_2006|002|__2|_2|0[1-6]|15|[1-5]|PM|pm"
    r"|[-Z]07(?:0000|:00:00|00|:00)?"
    r"|[.,](?:0+|9+)(?![0-9])"
)

_CHUNKS: Mapping[str, Callable[[datetime], str]] = {
    "2006": lambda at: f"{at.year:04d}",
    "_2006": lambda at: f"_{at.year:04d}",
    "06": lambda at: f"{at.year % 100:02d}",
    "January": lambda at: month_name(at),
    "Jan": lambda at: month_name(at)[:3],
    "01": lambda at: f"{at.month:02d}",
    "1": lambda at: f"{at.month}",
    "Monday": lambda at: weekday_name(at),
    "Mon": lambda at: weekday_name(at)[:3],
    "02": lambda at: f"{at.day:02d}",
    "_2": lambda at: f"{at.day:2d}",
    "2": lambda at: f"{at.day}",
    "002": lambda at: f"{day_of_year(at):03d}",
    "__2": lambda at: f"{day_of_year(at):3d}",
    "15": lambda at: f"{at.hour:02d}",
    "03": lambda at: f"{at.hour % 12 or 12:02d}",
    "3": lambda at: f"{at.hour % 12 or 12}",
    "04": lambda at: f"{at.minute:02d}",
    "4": lambda at: f"{at.minute}",
    "05": lambda at: f"{at.second:02d}",
    "5": lambda at: f"{at.second}",
    "PM": lambda at: "PM" if at.hour >= 12 else "AM",
    "pm": lambda at: "pm" if at.hour >= 12 else "am",
    "MST": lambda at: "UTC",
}


def format_time(layout: str, at: datetime) -> str:
    """Format `at`, which must be in UTC, with a layout."""
    return _CHUNK.sub(lambda found: _format_chunk(found[0], at), layout)


def month_name(at: datetime) -> str:
    return _MONTHS[at.month - 1]


def weekday_name(at: datetime) -> str:
    return _WEEKDAYS[at.weekday()]


def day_of_year(at: datetime) -> int:
    """Return the day of the year; 1 for the first of January."""
    return at.timetuple().tm_yday


def _format_chunk(chunk: str, at: datetime) -> str:
    if (known := _CHUNKS.get(chunk)) is not None:
        return known(at)
    if chunk.startswith("Z"):
        return "Z"
    if chunk.startswith("-"):
        return chunk.replace("-", "+").replace("7", "0")
    fraction = f"{at.microsecond * 1000:09d}"[: len(chunk) - 1].ljust(len(chunk) - 1, "0")
    if chunk[1] == "0":
        return chunk[0] + fraction
    fraction = fraction.rstrip("0")
    return chunk[0] + fraction if fraction else ""
