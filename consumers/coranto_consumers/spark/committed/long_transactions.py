"""Producer transactions with more content than a consumer reads in one transaction. Pure.

The messages of an open transaction are read again when its acknowledgement arrives (`columnar.py`, Replay). If that is
much, a consumer continues in three steps, and so delivers messages in the order of their commits:

1. It processes the journal up to the acknowledgement, without it.
2. It **replays parts** of the producer's pending messages, one in each consumer transaction. The checkpoint still ends
   before the acknowledgement, but pending messages now begin after the part, and its last clock is the producer's.
3. The rest, which is small enough, is delivered with the content after the acknowledgement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.outlines import resolve_outlines
from coranto.messages.uuids import Flags, ProducerId
from coranto_consumers.spark.committed.scanning import RangeSummary
from coranto_consumers.spark.committed.sequencing import Sequenced, decided, read_end
from coranto_consumers.spark.journals.ranges import Range


@dataclass(frozen=True, slots=True)
class LongTransaction:
    """A producer's transaction to replay in parts."""

    journal: str
    producer: ProducerId
    acknowledged_at: int
    """The offset of its acknowledgement."""

    def acknowledgement(self, head: int) -> Range:
        """Return the range of the acknowledgement alone, in a journal that ends at `head`."""
        return Range(self.journal, self.acknowledged_at, self.acknowledged_at + 1, head)

    def part(self, source: Source, max_bytes: int) -> Range:
        """Return the next part to replay."""
        begin = source.producers[self.producer].begin
        end = min(begin + max_bytes, source.read_through)
        return Range(self.journal, begin, end, source.read_through, journal_id=source.journal_id)


def find_long(journal: str, source: Source, sequenced: Sequenced, max_bytes: int) -> LongTransaction | None:
    """Return the transaction acknowledged first among those with more than `max_bytes` to read again, if any."""
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
    """The long transactions that a consumer has found and not delivered yet: at most one for each journal."""

    def __init__(self) -> None:
        self._met: dict[str, LongTransaction] = {}

    def __bool__(self) -> bool:
        return bool(self._met)

    def meet(self, found: Iterable[LongTransaction]) -> None:
        """Record long transactions. The input with their acknowledgements must not be committed."""
        for each in found:
            self._met[each.journal] = each

    def ends(self, ends: Mapping[str, int]) -> dict[str, int]:
        """Return the present end offsets for reading journals, at most `ends`."""
        return {
            journal: min(end, self._met[journal].acknowledged_at) if journal in self._met else end
            for journal, end in ends.items()
        }

    def due(self, sources: Mapping[str, Source], max_bytes: int) -> LongTransaction | None:
        """Return a transaction with a part to replay now. Forgets ones with at most `max_bytes` left to read."""
        for journal, long in list(self._met.items()):
            source = sources[journal]
            if source.read_through < long.acknowledged_at:
                continue
            state = source.producers.get(long.producer)
            left = source.read_through - state.begin if state is not None and state.is_pending else 0
            if source.read_through == long.acknowledged_at and left > max_bytes:
                return long
            del self._met[journal]
        return None


def sequence_part(
    long: LongTransaction, source: Source, acknowledgement: RangeSummary, parts: Mapping[Range, RangeSummary]
) -> Sequenced:
    """Sequence the ranges of a part. `source` is the state before it. Raises CorruptData as `sequence` does."""
    end = read_end(long.journal, min(part.begin for part in parts), parts)
    summaries = [parts[part] for part in sorted(parts)]
    resolution = resolve_outlines(
        [each.outline for each in (*summaries, acknowledgement)], source.seen_producers, replayed={long.producer}
    )
    decisions, messages = decided(summaries, resolution.limits[:-1], resolution.acknowledged[:-1])
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
    return Sequenced(after_part, decisions, messages, (), None, {})
