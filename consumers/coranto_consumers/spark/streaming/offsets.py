"""Positions of a streaming query in its journals, as JSON that Spark keeps in the query's checkpoint.

Users write one offset per journal: `{"flights/events/part-000": 1024}`. The query itself writes objects:

====================  ================================================================================================
`offset`              everything below this offset was read
`journal_id`          the journal's id; a recreated journal has another id
`created`             the etcd revision that created the journal, for the same purpose; 0 or no id: unknown
`since`               only in the first batch with this journal: the first offset of the batch
`producers`           states of producers at `offset`: [last acknowledged clock, seen through, first pending offset]
`from`                the states of unlisted producers can be derived from the content [`from`, `offset`)
====================  ================================================================================================

**Producers' states.** A committed read must know the clock of each producer's last decided message, and the begin of
its open transaction. The process that plans micro-batches has these states, and they must survive the process. Their
size is bounded in two ways. At most `MAX_LISTED` producers are listed, over all journals: the producers with the oldest
last decision. The states of other producers are derived from the content after their *anchor*: the offset of their last
decision, or of their first pending message if that is earlier. `from` is the lowest anchor of an unlisted producer; a
restarted query reads from there. At most `MAX_RESCAN` bytes of a journal are read again for idle producers: unlisted
producers that were idle for longer are dropped.

**Segments of streams** are included from the time when they may be read until they are truncated
(`journals/discovery.py`).

**`since`.** Spark records only the ends of batches. If a query ended before its first batch did, Spark asks for the
initial offset again, and `latest` is then a later offset. So the end of the first batch also includes its begin, and no
content is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coranto.errors import InvalidInput
from coranto.journal_ids import same_journal
from coranto.messages.checkpoints import ProducerState
from coranto.messages.uuids import ProducerId
from coranto.offsets import offset_of_json
from coranto_consumers.spark.session.versions import require_spark

MAX_LISTED: Final = 2_000
"""The maximum number of listed producers, over all journals of a query. Each journal may list at least 8."""
MAX_RESCAN: Final = 1 << 30
"""The maximum bytes after the anchor of an idle, unlisted producer. Beyond that, the producer is dropped."""

_KEYS: Final = frozenset(("offset", "journal_id", "created", "since", "producers", "from"))


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a query in one journal. The module's docstring describes the fields."""

    offset: int
    created: int = 0
    since: int | None = None
    producers: Mapping[ProducerId, ProducerState] = field(default_factory=dict)
    rescan: int | None = None
    journal_id: str = ""

    def is_of(self, created: int, journal_id: str) -> bool:
        """Return True if a journal with this creation revision and id has the content before this position.

        If that is unknown, returns True.
        """
        return same_journal(self.created, self.journal_id, self.offset, created, journal_id)

    def dumps(self) -> int | dict[str, object]:
        """Convert the position to JSON."""
        found: dict[str, object] = {"offset": self.offset}
        if self.journal_id:
            found["journal_id"] = self.journal_id
        if self.created:
            found["created"] = self.created
        if self.since is not None:
            found["since"] = self.since
        if self.producers:
            found["producers"] = {
                producer.hex(): [state.last_ack, state.seen_through, *([state.begin] if state.is_pending else [])]
                for producer, state in self.producers.items()
            }
        if self.rescan is not None:
            found["from"] = self.rescan
        return found if len(found) > 1 else self.offset

    @classmethod
    def loads(cls, journal: str, raw: object) -> Position:
        """Parse the JSON of `dumps`, or an offset. Raises InvalidInput."""
        try:
            if isinstance(raw, dict):
                if unknown := sorted(raw.keys() - _KEYS):
                    raise ValueError(f"there is no {unknown[0]!r}")
                return cls(
                    _offset(raw["offset"]),
                    _offset(raw.get("created", 0)),
                    None if raw.get("since") is None else _offset(raw["since"]),
                    dict(_producer(text, state) for text, state in raw.get("producers", {}).items()),
                    None if raw.get("from") is None else _offset(raw["from"]),
                    _text(raw.get("journal_id", "")),
                )
            return cls(_offset(raw))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"{raw!r} is not a position in {journal}: {error}; write an offset, such as 1024", field="offsets"
            ) from error


Positions = Mapping[str, Position]


def loads(raw: Mapping[str, Any]) -> dict[str, Position]:
    """Parse the JSON object of positions that Spark keeps. Raises InvalidInput."""
    return {journal: Position.loads(journal, position) for journal, position in raw.items()}


def dumps(positions: Positions) -> dict[str, object]:
    """Convert positions to the JSON object that Spark keeps. Equal positions have equal JSON."""
    return {journal: positions[journal].dumps() for journal in sorted(positions)}


def begin_of(start: Position | None, end: Position) -> int:
    """Return a batch's first offset. It differs from `start` if Spark asked for the initial offset again."""
    if end == start:
        return end.offset
    if end.since is not None:
        return end.since
    return end.offset if start is None else min(start.offset, end.offset)


def bounded(
    states: Mapping[ProducerId, ProducerState], anchors: Mapping[ProducerId, int], offset: int, listed: int
) -> tuple[dict[ProducerId, ProducerState], dict[ProducerId, ProducerState], int | None]:
    """Return the states to list, the unlisted states to keep, and the `rescan` offset for the unlisted states."""
    order = sorted(states, key=lambda producer: (anchors.get(producer, -1), producer))
    listed = max(listed, sum(producer not in anchors for producer in order))
    shown = {producer: states[producer] for producer in order[:listed]}
    others = {
        producer: states[producer]
        for producer in order[listed:]
        if states[producer].is_pending or offset - anchors[producer] <= MAX_RESCAN
    }
    rescan = min((anchors[producer] for producer in others), default=None)
    return shown, others, rescan


def _offset(raw: object) -> int:
    if type(raw) is not int or raw < 0:
        raise ValueError(f"{raw!r} is not 0 or more")
    return raw


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise TypeError(f"{raw!r} is not a text")
    return raw


def _producer(text: str, raw: Any) -> tuple[ProducerId, ProducerState]:
    producer = ProducerId(bytes.fromhex(text))
    if len(producer) != 6:
        raise ValueError(f"producer {text!r} does not have 6 bytes")
    last_ack, seen_through, *begin = map(_offset, raw)
    if len(begin) > 1:
        raise ValueError(f"producer {text!r} has more than three numbers")
    return producer, ProducerState(last_ack, begin[0] if begin else -1, seen_through)


def bytes_behind(progress: Any) -> dict[str, int]:
    """Return the bytes of each journal that a query has not read yet, over all of its sources.

    `progress` is an item of `query.recentProgress`, or its JSON. Raises VersionTooOld before Spark 4.2, which lacks
    heads.
    """
    require_spark("bytes_behind", (4, 2))
    raw = progress if isinstance(progress, Mapping) else json.loads(progress.json)
    behind = {}
    for source in raw["sources"]:
        heads, ends = _journals(source["latestOffset"]), _journals(source["endOffset"])
        if not isinstance(heads, dict) or not isinstance(ends, dict):
            continue  # This source does not read journals.
        positions = loads(ends)
        for journal, head in heads.items():
            read = positions[journal].offset if journal in positions else 0
            behind[journal] = max(0, offset_of_json(head) - read)
    return behind


def _journals(offsets: object) -> object:
    return json.loads(offsets) if isinstance(offsets, str) else offsets
