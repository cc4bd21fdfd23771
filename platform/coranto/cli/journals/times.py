"""Times on the command line."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

from coranto.errors import InvalidInput
from coranto.specs.durations import parse_duration


def parse_time(text: str, now: float, option: str) -> int:
    """Parse a time into Unix seconds: Unix seconds, an ISO 8601 time (UTC by default), or an age such as `24h`.

    An empty text gives 0, no bound. Raises InvalidInput, which names the option.
    """
    if not text:
        return 0
    if text.isdecimal():
        return int(text)
    with contextlib.suppress(ValueError):
        when = datetime.fromisoformat(text)
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
    with contextlib.suppress(InvalidInput):
        return int(now - parse_duration(text).ToNanoseconds() / 1e9)
    raise InvalidInput(
        f"{text!r} is not a time: give Unix seconds, an ISO 8601 time, or how long ago, such as 24h", field=option
    )


def parse_ttl(text: str, option: str) -> int:
    """Parse a duration such as `15m` into whole seconds; empty is 0. Raises InvalidInput, which names the option."""
    if not text:
        return 0
    try:
        seconds = parse_duration(text).ToNanoseconds() / 1e9
    except InvalidInput as error:
        raise InvalidInput(error.message, field=option) from None
    if seconds < 1:
        raise InvalidInput(f"{text} is shorter than a second; give 1s or more", field=option)
    return int(seconds)
