"""Parsing of date and time strings, as Spark's JSON reader parses them without a user-defined format.

Dates are days since 1970, and times are microseconds, because Spark's years exceed Python's. Other strings give None.
"""

from __future__ import annotations

import functools
import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

_SPACE: Final = "".join(map(chr, range(0x21))) + "\x7f"
_DATE: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<year>\d{4,7})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})(?:[ T].*)?)?)?", re.ASCII | re.DOTALL
)
_CLOCK: Final = (
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d*))?(?P<zone>\D.*)?)?)?"
)
_TIME: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<year>\d{4,6})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})(?:[ T]" + _CLOCK + ")?)?)?",
    re.ASCII | re.DOTALL,
)
_CLOCK_ALONE: Final = re.compile(r"T" + _CLOCK, re.ASCII | re.DOTALL)
_CLOCK_WITH_MINUTES: Final = re.compile(_CLOCK, re.ASCII | re.DOTALL)
_DAYS_AS_NUMBER: Final = re.compile(r"[+-]?\d{1,10}")
_ONE_HOUR_DIGIT: Final = re.compile(r"([+-])(\d):", re.ASCII)
_ONE_MINUTE_DIGIT: Final = re.compile(r"([+-]\d\d):(\d)$", re.ASCII)
_OFFSET: Final = re.compile(r"([+-])(\d\d?)(?:(?::(\d\d)(?::(\d\d))?)|(?:(\d\d)(\d\d)?))?", re.ASCII)
_REGION: Final = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+", re.ASCII)
_MICROSECONDS: Final = 1_000_000
_DAY: Final = 86_400 * _MICROSECONDS
_GREGORIAN_SINCE: Final = -141_427  # The day 1582-10-15.
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
_ZONES: Final = """
    ACT=Australia/Darwin AET=Australia/Sydney AGT=America/Argentina/Buenos_Aires ART=Africa/Cairo AST=America/Anchorage
    BET=America/Sao_Paulo BST=Asia/Dhaka CAT=Africa/Harare CNT=America/St_Johns CST=America/Chicago CTT=Asia/Shanghai
    EAT=Africa/Addis_Ababa ECT=Europe/Paris IET=America/Indiana/Indianapolis IST=Asia/Kolkata JST=Asia/Tokyo
    MIT=Pacific/Apia NET=Asia/Yerevan NST=Pacific/Auckland PLT=Asia/Karachi PNT=America/Phoenix PRT=America/Puerto_Rico
    PST=America/Los_Angeles SST=Pacific/Guadalcanal VST=Asia/Ho_Chi_Minh EST=-05:00 MST=-07:00 HST=-10:00
"""
_SHORT_NAMES: Final = dict(pair.split("=") for pair in _ZONES.split())
"""Java's short names of zones, which Spark accepts."""
_NO_REGIONS: Final = ("Factory", "localtime", "posixrules", "posix/", "right/")


class NoZone(Exception):
    """A time has no time zone, and no default zone is known."""


def days_of(text: str) -> int | None:
    """Return the days since 1970 of a date. Numbers of one to three, or more than seven, digits are days since 1970."""
    for each in (text, text.replace("GMT", "")):
        found = _DATE.fullmatch(each.strip(_SPACE))
        days = None if found is None else _day(found)
        if days is not None and -(1 << 31) <= days < 1 << 31:
            return days
    if not _DAYS_AS_NUMBER.fullmatch(text) or any(character > "\uffff" for character in text):
        return None
    number = int(text)
    return _from_julian(number) if -(1 << 31) <= number < 1 << 31 else None


def micros_of(text: str, zone: tzinfo | None) -> int | None:
    """Return the microseconds since 1970 UTC of a time. Raises NoZone if neither the time nor `zone` has a zone."""
    found = _micros_in_zone(text, zone)
    return _micros_in_zone(text.replace("GMT", ""), zone) if found is None and "GMT" in text else found


def local_micros_of(text: str) -> int | None:
    """Return the microseconds since 1970 of a time without a zone. Returns None for a time with a zone."""
    found = _TIME.fullmatch(text.strip(_SPACE))
    if found is None or found["zone"] is not None:
        return None
    days, clock = _day(found), _clock(found)
    return None if days is None or clock is None else _long(days * _DAY + clock)


def zone_of(name: str) -> tzinfo | None:
    """Return the zone with a name that Java accepts: `Europe/Paris`, `+01:00`, `UTC+1`, `EST`. None for other names."""
    name = _ONE_HOUR_DIGIT.sub(r"\g<1>0\2:", name.strip(_SPACE), count=1)
    name = _ONE_MINUTE_DIGIT.sub(r"\1:0\2", name, count=1)
    return _zone(_SHORT_NAMES.get(name, name))


@functools.lru_cache(maxsize=256)
def _zone(name: str) -> tzinfo | None:
    if name == "Z":
        return UTC
    for prefix in ("UTC", "GMT", "UT"):
        if name == prefix:
            return UTC
        if name.startswith(prefix) and name[len(prefix)] in "+-":
            return _offset(name[len(prefix) :])
    if name[:1] in ("+", "-"):
        return _offset(name)
    if not _REGION.fullmatch(name) or name.startswith(_NO_REGIONS):
        return None
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def _offset(text: str) -> tzinfo | None:
    found = _OFFSET.fullmatch(text)
    if found is None or (len(found[2]) == 1 and found.end() > found.end(2)):
        return None
    hours, minutes = int(found[2]), int(found[3] or found[5] or 0)
    seconds = int(found[4] or found[6] or 0)
    size = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if minutes > 59 or seconds > 59 or size > timedelta(hours=18):
        return None
    return timezone(-size if found[1] == "-" else size)


def _micros_in_zone(text: str, zone: tzinfo | None) -> int | None:
    found = _TIME.fullmatch(text.strip(_SPACE))
    if found is None:
        stripped = text.rstrip(_SPACE)
        found = _CLOCK_ALONE.fullmatch(stripped) or _CLOCK_WITH_MINUTES.fullmatch(stripped.lstrip(_SPACE))
        if found is None or (found["minute"] is None and not stripped.startswith("T")):
            return None
    named = found["zone"]
    if named is not None:
        zone = zone_of(named)
        if zone is None:
            return None
    clock = _clock(found)
    if clock is None:
        return None
    if zone is None:
        raise NoZone
    today = datetime.now(zone)
    days = _day(found) if "year" in found.re.groupindex else _days(today.year, today.month, today.day)
    return None if days is None else _long(days * _DAY + clock - _utc_offset(days, clock, zone))


def _day(found: re.Match[str]) -> int | None:
    year = int(found["year"]) * (-1 if found["sign"] == "-" else 1)
    month, day = int(found["month"] or 1), int(found["day"] or 1)
    if not 1 <= month <= 12 or not 1 <= day <= 31:
        return None
    days = _days(year, month, day)
    following = _days(year + month // 12, month % 12 + 1, 1)
    return days if days < following else None


def _clock(found: re.Match[str]) -> int | None:
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    if hour > 23 or minute > 59 or second > 59:
        return None
    part = int((found["part"] or "")[:6].ljust(6, "0"))
    return ((hour * 60 + minute) * 60 + second) * _MICROSECONDS + part


def _utc_offset(days: int, clock: int, zone: tzinfo) -> int:
    cycles = 0
    if days > _days(9998, 12, 31):  # Zone rules and weekdays repeat every 400 years.
        cycles = (days - _days(9600, 1, 1)) // _CYCLE_DAYS
    earliest = _days(1, 1, 2)
    local = datetime(1970, 1, 1, tzinfo=zone) + timedelta(days=max(earliest, days - cycles * _CYCLE_DAYS))
    offset = (local + timedelta(microseconds=clock)).utcoffset() or timedelta()
    return offset // timedelta(microseconds=1)


def _long(number: int) -> int | None:
    return number if -(1 << 63) <= number < 1 << 63 else None


def _days(year: int, month: int, day: int) -> int:
    """Return the days since 1970 of a date of the Gregorian calendar, for any year."""
    cycles, within = divmod(year, _CYCLE_YEARS)
    return datetime(within + _CYCLE_YEARS, month, 1).toordinal() + (cycles - 1) * _CYCLE_DAYS + day - 1 - 719_163


def _from_julian(days: int) -> int:
    """Convert a day of the Julian calendar, before 1582-10-15, to the day with the same date in the Gregorian one."""
    if days >= _GREGORIAN_SINCE:
        return days
    # The Julian calendar repeats every 1461 days. Years are counted from March 1 of the year 0, day -719470.
    cycles, within = divmod(days + 719_470, 1461)
    years = min(within // 365, 3)
    day_of_year = within - 365 * years
    months = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * months + 2) // 5
    year = 4 * cycles + years + (months >= 10)
    return _days(year, months + 3 if months < 10 else months - 9, 1) + day
