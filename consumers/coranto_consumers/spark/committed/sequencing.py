"""The driver's part of sequencing: it decides from range summaries which messages are committed.

The messages of an open transaction are read again when its acknowledgement arrives (`columnar.py`, Replay). If they are
too much for one consumer transaction, the consumer takes three steps, which keep the order of commits:

1. It processes the journal up to, but not including, the acknowledgement.
2. It **replays parts** of the producer's pending messages, one part in each consumer transaction. The checkpoint still
   ends before the acknowledgement, but the producer's pending messages now begin after the part, and its `last_ack` is
   the part's last clock.
3. Once the rest is small enough, it is delivered with the content after the acknowledgement.
"""

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
from coranto_consumers.journals.ranges import Range, States
from coranto_consumers.journals.reading import Lines
from coranto_consumers.spark.committed.scanning import RangeSummary, Summaries

Sources = Mapping[str, Source]

_log = structlog.get_logger(__name__)


class RangeDecision(NamedTuple):
    """The decisions about one range's segments."""

    limits: tuple[Limit, ...]
    """The committed rows of segments that are not committed as a whole."""
    acknowledged: tuple[SegmentCommit, ...]
    """The offsets of the acknowledgements that committed segments. Complete only after a scan with `commits`."""

    def committed(self, lines: Lines, segments: Int32s, *, commits: bool) -> Lines:
        """Return the committed lines of the range. With `commits`, lines include the offsets that committed them."""
        chosen = limited_mask(segments, self.limits, lines.clocks)
        if commits:
            lines = replace(lines, commits=commit_offsets(segments, self.acknowledged, lines.begins))
        return lines.where(chosen)


@dataclass(frozen=True, slots=True)
class SequencedRanges:
    """The result for one journal. If `replay` is set, it is not final: scan that range, and sequence again with it."""

    source: Source
    decisions: Mapping[int, RangeDecision]
    """Decisions by range number."""
    messages: int | None
    """The number of committed messages. None if rows must be counted."""
    resets: tuple[ClockReset, ...]
    replay: tuple[Range, States] | None
    acknowledged: Mapping[ProducerId, int]
    """The offset of the acknowledgement of each producer in `replay`."""


def sequence(
    journal: str,
    entry: Source,
    parts: Summaries,
    replayed: Summaries | None = None,
    replayed_producers: Iterable[ProducerId] = (),
    pruning: Pruning | None = None,
) -> SequencedRanges:
    """Sequence adjacent ranges of a journal from the entry's `read_through` on. Raises CorruptData for a gap."""
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
    decisions, messages = decide(summaries, resolution.limits, resolution.acknowledged)
    replay = None
    if resolution.replay:
        begin = min(state.begin for state in resolution.replay.values())
        whole = Range(journal, begin, entry.read_through, entry.read_through, journal_id=entry.journal_id)
        replay = whole, resolution.replay
    states = resolution.states if pruning is None else pruning.prune(journal, resolution.states, read_through)
    # A range's border has each producer's first acknowledgement.
    acknowledged = {
        segment.producer: segment.first_offset
        for part in sorted(parts, reverse=True)
        for _, segment in reversed(parts[part].outline.border)
        if segment.producer in resolution.replay and segment.flags is Flags.ACK_TXN
    }
    source = replace(entry, read_through=read_through, producers=states)
    return SequencedRanges(source, decisions, messages, resolution.resets, replay, acknowledged)


def decide(
    summaries: Sequence[RangeSummary],
    limits: Sequence[tuple[Limit, ...]],
    acknowledged: Sequence[tuple[SegmentCommit, ...]],
) -> tuple[dict[int, RangeDecision], int | None]:
    """Return the decisions by range number, and the number of committed messages: None if rows must be counted."""
    counts = [summary.committed_rows(found) for summary, found in zip(summaries, limits, strict=True)]
    decisions = (RangeDecision(*each) for each in zip(limits, acknowledged, strict=True))
    numbers = [summary.number for summary in summaries]
    found = dict(zip(numbers, decisions, strict=True))
    return found, None if None in counts else sum(count or 0 for count in counts)


def warn_of_resets(journal: str, sequenced: SequencedRanges) -> None:
    """Log acknowledgements with a clock below an earlier acknowledgement of their producer."""
    for reset in sequenced.resets:
        _log.warning("producer.reset", journal=journal, producer=reset.producer.hex(), offset=reset.offset)


def read_end(journal: str, begin: int, parts: Summaries) -> int:
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


@dataclass(frozen=True, slots=True)
class LongTransaction:
    """A producer's transaction to replay in parts."""

    journal: str
    producer: ProducerId
    acknowledged_at: int

    def acknowledgement(self, head: int) -> Range:
        """Return a range with only the acknowledgement, in a journal that ends at `head`."""
        return Range(self.journal, self.acknowledged_at, self.acknowledged_at + 1, head)

    def part(self, source: Source, max_bytes: int) -> Range:
        """Return the next part to replay."""
        begin = source.producers[self.producer].begin
        end = min(begin + max_bytes, source.read_through)
        return Range(self.journal, begin, end, source.read_through, journal_id=source.journal_id)


def find_long(journal: str, source: Source, sequenced: SequencedRanges, max_bytes: int) -> LongTransaction | None:
    """Return the first acknowledged transaction that has more than `max_bytes` to read again, if any."""
    if sequenced.replay is None:
        return None
    _, producers = sequenced.replay
    long = [
        LongTransaction(journal, producer, sequenced.acknowledged[producer])
        for producer, state in producers.items()
        if source.read_through - state.begin > max_bytes
    ]
    return min(long, key=lambda each: each.acknowledged_at, default=None)


class LongTransactions:
    """The long transactions that a consumer has found and not delivered yet: at most one per journal."""

    def __init__(self) -> None:
        self._by_journal: dict[str, LongTransaction] = {}

    def __bool__(self) -> bool:
        return bool(self._by_journal)

    def add(self, found: Iterable[LongTransaction]) -> None:
        """Record long transactions. The input with their acknowledgements must not be committed."""
        for each in found:
            self._by_journal[each.journal] = each

    def ends(self, ends: Mapping[str, int]) -> dict[str, int]:
        """Return the end offsets of the next reads: `ends`, or the acknowledgement of a long transaction if earlier."""
        return {
            journal: min(end, self._by_journal[journal].acknowledged_at) if journal in self._by_journal else end
            for journal, end in ends.items()
        }

    def due(self, sources: Sources, max_bytes: int) -> LongTransaction | None:
        """Return a transaction with a part to replay now, if any. Drops transactions with at most `max_bytes` left."""
        for journal, long in list(self._by_journal.items()):
            source = sources[journal]
            if source.read_through < long.acknowledged_at:
                continue
            state = source.producers.get(long.producer)
            left = source.read_through - state.begin if state is not None and state.is_pending else 0
            if source.read_through == long.acknowledged_at and left > max_bytes:
                return long
            del self._by_journal[journal]
        return None


def sequence_part(
    long: LongTransaction, source: Source, acknowledgement: RangeSummary, parts: Summaries
) -> SequencedRanges:
    """Sequence the ranges of a part. `source` is the state before the part. Raises CorruptData as `sequence` does."""
    end = read_end(long.journal, min(part.begin for part in parts), parts)
    summaries = [parts[part] for part in sorted(parts)]
    resolution = resolve_outlines(
        [each.outline for each in (*summaries, acknowledgement)], source.seen_producers, replayed={long.producer}
    )
    decisions, messages = decide(summaries, resolution.limits[:-1], resolution.acknowledged[:-1])
    state = source.producers[long.producer]
    clocks = [
        segment.last_clock
        for summary in summaries
        for _, segment in summary.outline.border
        if segment.producer == long.producer and segment.flags is Flags.CONTINUE_TXN
    ]
    last_ack = min(max([state.last_ack, *clocks]), resolution.states[long.producer].last_ack)
    after: ProducerState = replace(state, last_ack=last_ack, begin=end)
    after_part = replace(source, producers={**source.producers, long.producer: after})
    return SequencedRanges(after_part, decisions, messages, (), None, {})
