"""Options for the first and last offsets of a read, and for its moment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from coranto.errors import InvalidInput
from coranto.offsets import vector_of_json
from coranto_consumers.spark.options.option_values import offsets_option

EARLIEST: Final = -2
LATEST: Final = -1

OPTIONS: Final = {
    "startingOffsets": 'earliest (default), or JSON: {"flights/events/part-000": 1024}; -2 is earliest. Instead of a '
    'number: {"offset": 1024, "journal_id": "…"}, as Coranto writes it',
    "endingOffsets": "latest (default), or JSON as above; -1 is latest",
    "asOf": "the content of a moment: ISO 8601, milliseconds since 1970 UTC, or the journals' ends as JSON (as above)",
    "timestampAsOf": "the same as asOf, as Delta and Iceberg name it: a time",
}


_NOT_BESIDE_A_MOMENT: Final = (
    "asOf",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "startingTimestamp",
)


def starting_offsets(given: Mapping[str, str]) -> dict[str, int] | None:
    """Return the first offsets by journal; None for the beginnings of all. Raises InvalidInput."""
    return _offsets(given, "startingOffsets", "earliest", EARLIEST)


def ending_offsets(given: Mapping[str, str]) -> dict[str, int] | None:
    """Return the end offsets by journal; None for the heads of all. Raises InvalidInput."""
    return _offsets(given, "endingOffsets", "latest", LATEST)


def _offsets(given: Mapping[str, str], name: str, word: str, symbol: int) -> dict[str, int] | None:
    text = given.get(name.lower(), word).strip()
    where = f"option {name}"
    if text.lower() == word:
        return None
    return vector_of_json(offsets_option(text, name, word), where, symbol)


def as_of(given: Mapping[str, str]) -> float | Mapping[str, int] | None:
    """Return the time in Unix seconds, or the journals' ends, that is asked for. Raises InvalidInput."""
    name = "timestampAsOf" if "timestampasof" in given else "asOf"
    text = given.get(name.lower(), "").strip()
    if not text:
        return None
    for other in _NOT_BESIDE_A_MOMENT:
        if other != name and other.lower() in given:
            raise InvalidInput(f"{other} is given, too; leave one of them out", field=f"option {name}")
    if text.startswith("{") and name == "asOf":
        return vector_of_json(offsets_option(text, "asOf", "a time"), "option asOf")
    if text.isascii() and text.isdigit():
        return int(text) / 1000
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"{text!r} is not a time, such as 2026-03-01T00:00Z or 1772323200000"
            + (", nor JSON of journals' ends" if name == "asOf" else "; give JSON of journals' ends to asOf"),
            field=f"option {name}",
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
