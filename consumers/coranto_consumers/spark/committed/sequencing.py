"""The driver's part of sequencing: decide from summaries of ranges about commits, and where to continue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from coranto.errors import CorruptData
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.columnar import ClockReset, Int32s
from coranto.messages.outlines import Limit, SegmentCommit, commit_offsets, limited_mask, resolve_outlines
from coranto.messages.pruning import Pruning
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.spark.committed.scanning import RangeSummary
from coranto_consumers.spark.journals.ranges import Range
from coranto_consumers.spark.journals.reading import Lines

_log = structlog.get_logger(__name__)


class RangeDecision(NamedTuple):
    """The decisions about one range's segments."""

    limits: tuple[Limit, ...]
    """The committed rows of segments that are not committed as a whole."""
    acknowledged: tuple[SegmentCommit, ...]
    """The offsets of the acknowledgements that committed segments. All of them only if they were scanned for that."""

    def committed(self, lines: Lines, segments: Int32s, *, commits: bool) -> Lines:
        """Return the committed lines of the range. With `commits`, they have the offsets that committed them."""
        chosen = limited_mask(segments, self.limits, lines.clocks)
        if commits:
            lines = replace(lines, commits=commit_offsets(segments, self.acknowledged, lines.begins))
        return lines.where(chosen)


@dataclass(frozen=True, slots=True)
class Sequenced:
    """The result of sequencing the ranges of one journal. If `replay` is set, the other fields are not final.

    Then read its range for its producers, and sequence again with the result.
    """

    source: Source
    decisions: Mapping[int, RangeDecision]
    """By the ranges' numbers."""
    messages: int | None
    """The number of committed messages. None if only the rows can tell."""
    resets: tuple[ClockReset, ...]
    replay: tuple[Range, Mapping[ProducerId, ProducerState]] | None
    acknowledged: Mapping[ProducerId, int]
    """The offset of the acknowledgement of each producer in `replay`."""


def sequence(
    journal: str,
    entry: Source,
    parts: Mapping[Range, RangeSummary],
    replayed: Mapping[Range, RangeSummary] | None = None,
    replayed_producers: Iterable[ProducerId] = (),
    pruning: Pruning | None = None,
) -> Sequenced:
    """Sequence adjacent ranges of a journal that begin at the entry's `read_through`, and forget producers by
    `pruning`.

    Raises CorruptData if the ranges are not contiguous.
    """
    read_through = read_end(journal, entry.read_through, parts)
    before = dict(replayed or {})
    if before:
        found = read_end(journal, min(part.begin for part in before), before)
        if found != entry.read_through:
            raise CorruptData(f"journal {journal}: the replay ended at {found} instead of {entry.read_through}")
    summaries = [before[part] for part in sorted(before)] + [parts[part] for part in sorted(parts)]
    resolution = resolve_outlines(
        [summary.outline for summary in summaries],
        entry.seen_producers,
        replayed=frozenset(replayed_producers),
        through=read_through,
    )
    decisions, messages = decided(summaries, resolution.limits, resolution.acknowledged)
    replay = None
    if resolution.replay:
        begin = min(state.begin for state in resolution.replay.values())
        whole = Range(journal, begin, entry.read_through, entry.read_through, journal_id=entry.journal_id)
        replay = whole, resolution.replay
    states = resolution.states if pruning is None else pruning.prune(journal, resolution.states, read_through)
    acknowledged = {producer: _acknowledged_at(producer, parts) for producer in resolution.replay}
    source = replace(entry, read_through=read_through, producers=states)
    return Sequenced(source, decisions, messages, resolution.resets, replay, acknowledged)


def decided(
    summaries: Sequence[RangeSummary],
    limits: Sequence[tuple[Limit, ...]],
    acknowledged: Sequence[tuple[SegmentCommit, ...]],
) -> tuple[dict[int, RangeDecision], int | None]:
    """Return the decisions about ranges, and the number of committed messages. None if only the rows can tell."""
    counts = [summary.committed_rows(found) for summary, found in zip(summaries, limits, strict=True)]
    decisions = (RangeDecision(*each) for each in zip(limits, acknowledged, strict=True))
    numbers = [summary.number for summary in summaries]
    found = dict(zip(numbers, decisions, strict=True))
    return found, None if None in counts else sum(count or 0 for count in counts)


def warn_of_resets(journal: str, sequenced: Sequenced) -> None:
    """Log acknowledgements that are below an earlier one of their producer."""
    for reset in sequenced.resets:
        _log.warning("producer.reset", journal=journal, producer=reset.producer.hex(), offset=reset.offset)


def _acknowledged_at(producer: ProducerId, parts: Mapping[Range, RangeSummary]) -> int:
    """Return the offset of a producer's first acknowledgement. A range's border has each producer's first one."""
    return next(
        segment.first_offset
        for part in sorted(parts)
        for _, segment in parts[part].outline.border
        if segment.producer == producer and segment.flags is Flags.ACK_TXN
    )


def read_end(journal: str, begin: int, parts: Mapping[Range, RangeSummary]) -> int:
    """Return the offset after the last message of adjacent ranges. Raises CorruptData if a message is missing."""
    expected = begin
    for part in sorted(parts):
        summary = parts[part]
        if not summary.rows:
            continue
        if summary.first != expected:
            raise CorruptData(f"journal {journal}: the message after {expected} was found at {summary.first}")
        expected = summary.end
    return expected
