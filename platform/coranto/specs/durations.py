"""Durations as people write them in journal specs: `1h30m`, `5m0s`, `1.5s`, `250ms`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from google.protobuf.duration_pb2 import Duration

from coranto.errors import InvalidInput

_SECOND: Final = 1_000_000_000
_UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # the micro sign
    "μs": 1_000,  # the Greek letter
    "ms": 1_000_000,
    "s": _SECOND,
    "m": 60 * _SECOND,
    "h": 3600 * _SECOND,
}
_PART = re.compile(r"([0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(ns|us|µs|μs|ms|s|m|h)")
_MAX_CHARACTERS: Final = 128


def parse_duration(text: str) -> Duration:
    """Parse a duration: numbers with units (ns, us, ms, s, m, h), or `0`. Raises InvalidInput."""
    if len(text) > _MAX_CHARACTERS:
        raise InvalidInput(f"{text[:40]!r}… is too long for a duration such as 30s, 5m or 1h30m")
    unsigned = text.removeprefix("-") if text.startswith("-") else text.removeprefix("+")
    total, position = Decimal(0), 0
    while found := _PART.match(unsigned, position):
        total += Decimal(found[1]) * _UNITS[found[2]]
        position = found.end()
    if unsigned != "0" and (not position or position != len(unsigned)):
        raise InvalidInput(f"{text!r} is not a duration such as 30s, 5m or 1h30m")
    nanoseconds = int(total)
    if nanoseconds >= 2**63:
        raise InvalidInput(f"{text!r} is longer than the maximum of 292 years; give less")
    result = Duration()
    result.FromNanoseconds(-nanoseconds if text.startswith("-") else nanoseconds)
    return result


def format_duration(duration: Duration) -> str:
    """Format a duration as `parse_duration` reads it: `1h0m0s`, `5m0s`, `1.5s`, `250ms`, `0s`."""
    nanoseconds = duration.ToNanoseconds()
    sign, nanoseconds = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    if nanoseconds == 0:
        return "0s"
    if nanoseconds < _SECOND:
        unit = next(name for name in ("ms", "µs", "ns") if nanoseconds >= _UNITS[name])
        return f"{sign}{_decimal(nanoseconds, _UNITS[unit])}{unit}"
    minutes, rest = divmod(nanoseconds, _UNITS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, _SECOND)}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else sign + text


def _decimal(value: int, unit: int) -> str:
    whole, rest = divmod(value, unit)
    digits = f"{rest:0{len(str(unit)) - 1}d}".rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)
