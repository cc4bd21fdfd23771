"""Options for the begin and end of a read: offsets, times of messages' UUIDs, or a moment in time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from coranto.client import SyncJournalClient
from coranto.client.moments import SKEW_SECONDS
from coranto.errors import InvalidInput, JournalSuspended
from coranto.messages.columnar import Mask, UInt64s
from coranto.messages.uuids import clock_from_ns
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
    "startingTimestamp": "time in milliseconds since 1970 UTC: messages from then on (instead of startingOffsets)",
    "endingTimestamp": "time in milliseconds since 1970 UTC: messages before it (instead of endingOffsets)",
    "startingOffsetsByTimestamp": 'the same by journal, as JSON: {"flights/events/part-000": 1704067200000}',
    "endingOffsetsByTimestamp": "the same by journal, as JSON",
}
ENDINGS: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")


def bounds_of(given: Mapping[str, str], name: str, word: str, symbol: int) -> dict[str, int] | None:
    """Return an option's offsets by journal. None if it is `word`, which is the default. Raises InvalidInput."""
    text = given.get(name.lower(), word).strip()
    if text.lower() == word:
        return None
    return vector_of_json(offsets_option(text, name, word), f"option {name}", symbol)


def as_of(given: Mapping[str, str]) -> float | Mapping[str, int] | None:
    """Return the requested time in Unix seconds, or the requested ends of journals, if any. Raises InvalidInput."""
    name = "timestampAsOf" if "timestampasof" in given else "asOf"
    text = given.get(name.lower(), "").strip()
    if not text:
        return None
    for other in ("asOf", *ENDINGS, "startingTimestamp"):
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


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """The times of the messages of a read: [begin, end) in milliseconds since 1970 UTC. None: no bound."""

    begin: int | None = None
    end: int | None = None

    def mask(self, clocks: UInt64s) -> Mask:
        """Return the mask of messages in the span, by the clocks of their UUIDs, and of messages without UUIDs."""
        mask: Mask = np.ones(len(clocks), dtype=np.bool_)
        if self.begin is not None:
            mask &= clocks >= np.uint64(clock_from_ns(self.begin * 1_000_000))
        if self.end is not None:
            mask &= clocks < np.uint64(clock_from_ns(self.end * 1_000_000))
        mask |= clocks == 0
        return mask

    def first_offset(self, client: SyncJournalClient, journal: str, begin: int, head: int) -> int:
        """Return the first offset in [begin, head] to read for the span."""
        if self.begin is None:
            return begin
        # A fragment is stored after its messages are published.
        try:
            fragments = client.fragments(journal)
        except JournalSuspended:
            return head
        least = self.begin // 1000 - SKEW_SECONDS
        kept = [each.fragment.begin for each in fragments if not each.persisted or each.fragment.mod_time >= least]
        return min(max(begin, min(kept, default=head)), head)


@dataclass(frozen=True, slots=True)
class TimeOptions:
    """The parsed time options."""

    starting: int | Mapping[str, int] | None = None
    ending: int | Mapping[str, int] | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> TimeOptions:
        """Parse options with names in lower case. Raises InvalidInput."""
        return cls(_side(given, "starting"), _side(given, "ending"))

    def span(self, journal: str) -> TimeSpan:
        """Return the span of a journal. Raises InvalidInput if the options leave out the journal."""
        for side, times in (("starting", self.starting), ("ending", self.ending)):
            if isinstance(times, Mapping) and journal not in times:
                raise InvalidInput(
                    f"has no time of {journal}, which is read; name all journals, or set {side}Timestamp",
                    field=f"option {side}OffsetsByTimestamp",
                )
        return self.span_or_unbounded(journal)

    def span_or_unbounded(self, journal: str) -> TimeSpan:
        """Return the span of a journal. It has no bounds if the options leave out the journal."""
        sides = (self.starting, self.ending)
        return TimeSpan(*(side.get(journal) if isinstance(side, Mapping) else side for side in sides))


def _side(given: Mapping[str, str], side: str) -> int | Mapping[str, int] | None:
    names = [f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"]
    chosen = [name for name in names if name.lower() in given]
    if len(chosen) > 1:
        raise InvalidInput(f"{chosen[1]} is given, too; leave one of them out", field=f"option {chosen[0]}")
    if not chosen or chosen[0] == names[2]:
        return None
    text, where = given[chosen[0].lower()], f"option {chosen[0]}"
    try:
        times = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is neither a time in milliseconds nor JSON: {error}", field=where) from error
    wanted = times.values() if chosen[0] == names[1] and isinstance(times, dict) else [times]
    for time in wanted:
        if type(time) is not int or not 0 <= time < 1 << 43:
            raise InvalidInput(f"{time!r} is not a time in milliseconds since 1970, such as 1704067200000", field=where)
    return times if isinstance(times, dict | int) else None
