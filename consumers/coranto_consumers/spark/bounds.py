"""Options for the offsets at which a read begins and ends, and for the moment that it shows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from coranto.errors import InvalidInput
from coranto_consumers.spark.option_values import offsets_option

EARLIEST: Final = -2
LATEST: Final = -1

OPTIONS: Final = {
    "startingOffsets": 'earliest (default), or JSON: {"flights/events/part-000": 1024}; -2 is earliest',
    "endingOffsets": "latest (default), or JSON as above; -1 is latest",
    "asOf": "the content of a moment: ISO 8601, milliseconds since 1970 UTC, or the journals' ends as JSON (as above)",
}


def starting_offsets(given: Mapping[str, str]) -> dict[str, int] | None:
    """Return the offsets at which journals begin; None for all at their beginnings. Raises InvalidInput."""
    return _offsets(given, "startingOffsets", "earliest", EARLIEST)


def ending_offsets(given: Mapping[str, str]) -> dict[str, int] | None:
    """Return the offsets at which journals end; None for all at their heads. Raises InvalidInput."""
    return _offsets(given, "endingOffsets", "latest", LATEST)


def _offsets(given: Mapping[str, str], name: str, word: str, symbol: int) -> dict[str, int] | None:
    text = given.get(name.lower(), word).strip()
    where = f"option {name}"
    if text.lower() == word:
        return None
    offsets: dict[str, int] = offsets_option(text, name, word)
    for journal, offset in offsets.items():
        if type(offset) is not int or (offset < 0 and offset != symbol):
            raise InvalidInput(
                f"{offset!r} is not an offset for {journal}: 0 or more, or {symbol} for {word}", field=where
            )
    return offsets


def as_of(given: Mapping[str, str]) -> float | Mapping[str, int] | None:
    """Return the time in Unix seconds, or the journals' ends, that `asOf` asks for. Raises InvalidInput."""
    text = given.get("asof", "").strip()
    if not text:
        return None
    for other in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "startingTimestamp"):
        if other.lower() in given:
            raise InvalidInput(f"{other} is given, too; leave one of them out", field="option asOf")
    if text.startswith("{"):
        ends: dict[str, int] = offsets_option(text, "asOf", "a time")
        for journal, end in ends.items():
            if type(end) is not int or end < 0:
                raise InvalidInput(f"{end!r} is not an offset for {journal}: 0 or more", field="option asOf")
        return ends
    if text.isascii() and text.isdigit():
        return int(text) / 1000
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"{text!r} is neither a time, such as 2026-03-01T00:00Z or 1772323200000, nor JSON", field="option asOf"
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
