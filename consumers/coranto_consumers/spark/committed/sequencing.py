"""The driver's part of sequencing: decide from summaries of ranges about commits, and where to continue.

It handles summaries (`scanning.py`), never rows. It uses the rules of `coranto.messages.outlines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from coranto.errors import CorruptData
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.columnar import ClockReset
from coranto.messages.outlines import Limit, SegmentCommit, resolve_outlines
from coranto.messages.pruning import Pruning
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.spark.committed.scanning import RangeSummary, piece_of
from coranto_consumers.spark.journals.ranges import Range

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PieceLimit:
    """The committed rows of a piece that is committed in part: those with a clock in (lo, hi]."""

    piece: int
    lo: int
    hi: int


class PieceCommit(NamedTuple):
    """The offset of the acknowledgement that committed a piece's rows."""

    piece: int
    offset: int


@dataclass(frozen=True, slots=True)
class Sequenced:
    """The result of sequencing the ranges of one journal.

    If `replay` is not None, the other fields are not final: read its range for its producers, and sequence again with
    the result.
    """

    source: Source
    limits: tuple[PieceLimit, ...]
    messages: int | None
    """The number of committed messages. None if only the rows can tell."""
    resets: tuple[ClockReset, ...]
    replay: tuple[Range, Mapping[ProducerId, ProducerState]] | None
    acknowledged: Mapping[ProducerId, int]
    """The offset of the acknowledgement of each producer in `replay`."""
    commits: tuple[PieceCommit, ...]
    """The pieces that were acknowledged. All of them only if the ranges were scanned with `commits`."""


def sequence(
    journal: str,
    entry: Source,
    parts: Mapping[Range, RangeSummary],
    replayed: Mapping[Range, RangeSummary] | None = None,
    replayed_producers: Iterable[ProducerId] = (),
    pruning: Pruning | None = None,
) -> Sequenced:
    """Sequence adjacent ranges of a journal that begin at the entry's `read_through`.

    Forgets producers as `pruning` decides; without it, none. Raises CorruptData if the ranges are not contiguous.
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
    limits, messages = limits_of(summaries, resolution.limits)
    replay = None
    if resolution.replay:
        begin = min(state.begin for state in resolution.replay.values())
        whole = Range(journal, begin, entry.read_through, entry.read_through, journal_id=entry.journal_id)
        replay = whole, resolution.replay
    states = resolution.states if pruning is None else pruning.prune(journal, resolution.states, read_through)
    acknowledged = {producer: _acknowledged_at(producer, parts) for producer in resolution.replay}
    commits = commits_of(summaries, resolution.acknowledged)
    source = replace(entry, read_through=read_through, producers=states)
    return Sequenced(source, limits, messages, resolution.resets, replay, acknowledged, commits)


def limits_of(
    summaries: Sequence[RangeSummary], found: Sequence[Sequence[Limit]]
) -> tuple[tuple[PieceLimit, ...], int | None]:
    """Return the limits of ranges by piece, and the number of committed messages. None if only the rows can tell."""
    both = list(zip(summaries, found, strict=True))
    counts = [summary.committed_rows(limits) for summary, limits in both]
    pieces = (
        PieceLimit(piece_of(summary.number, segment), lo, hi) for summary, limits in both for segment, lo, hi in limits
    )
    return tuple(pieces), None if None in counts else sum(count or 0 for count in counts)


def warn_of_resets(journal: str, sequenced: Sequenced) -> None:
    """Log acknowledgements that are below an earlier one of their producer."""
    for reset in sequenced.resets:
        _log.warning("producer.reset", journal=journal, producer=reset.producer.hex(), offset=reset.offset)


def commits_of(
    summaries: Sequence[RangeSummary], acknowledged: Sequence[Sequence[SegmentCommit]]
) -> tuple[PieceCommit, ...]:
    """Return the acknowledged segments of ranges as pieces."""
    return tuple(
        PieceCommit(piece_of(summary.number, segment), offset)
        for summary, found in zip(summaries, acknowledged, strict=True)
        for segment, offset in found
    )


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
