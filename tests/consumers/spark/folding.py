"""Transactions over ranges of journals in memory, run as Spark's tasks and a consumer's driver do."""

from collections.abc import Iterator

from coranto.client import Chunk
from coranto.errors import OffsetJump
from coranto.messages.checkpoints import Source
from coranto.messages.framing import JsonLines
from coranto.messages.pruning import Pruning
from coranto_consumers.journals.ranges import NumberedRange, Range, ReadPlan, plan_slices, plan_transaction, split
from coranto_consumers.spark.committed.scanning import RangeSummarizer, RangeSummary, piece_of
from coranto_consumers.spark.committed.sequencing import (
    LongTransaction,
    LongTransactions,
    SequencedRanges,
    find_long,
    sequence,
    sequence_part,
)

FRAMING = JsonLines()
NOW = 1_900_000_000


class Memory:
    """Journal content in memory, read in chunks of any size. Content before `first` is lost."""

    def __init__(self, journals: dict[str, bytes], chunk: int = 7, first: int = 0) -> None:
        self.journals = journals
        self.chunk = chunk
        self.first = first

    def read(
        self, journal, offset=0, *, end_offset=0, block=False, fail_on_jump=False, journal_id=""
    ) -> Iterator[Chunk]:
        assert block
        assert fail_on_jump
        content = self.journals[journal]
        assert end_offset <= len(content), "a read beyond the head would wait forever"
        if offset < self.first:
            raise OffsetJump(journal, offset, self.first)
        for begin in range(offset, end_offset, self.chunk):
            end = min(begin + self.chunk, end_offset)
            yield Chunk(begin, content[begin:end], len(content))


def run(memory: Memory, plan: ReadPlan) -> tuple[dict[Range, RangeSummary], list[tuple[str, int, int, int]]]:
    """Read a plan like tasks. Return summaries, and rows as (journal, offset, piece, clock)."""
    summaries: dict[Range, RangeSummary] = {}
    rows: list[tuple[str, int, int, int]] = []

    def read(numbered: NumberedRange):
        scan = RangeSummarizer(numbered)
        yield from scan.pieces(memory, FRAMING)
        summaries[numbered.range] = RangeSummary.loads(scan.summary().dumps())
        assert summaries[numbered.range] == scan.summary()
        assert summaries[numbered.range].number == numbered.number == plan.numbers[numbered.range]

    for slice_ in plan.numbered():
        for numbered in slice_:
            for lines, pieces in read(numbered):
                columns = lines.begins.tolist(), pieces.tolist(), lines.clocks.tolist()
                rows += [(numbered.range.journal, *row) for row in zip(*columns, strict=True)]
    return summaries, rows


def choose(rows, *results: SequencedRanges) -> list[tuple[str, int]]:
    """Return the committed rows of each journal, in commit order."""
    decisions = [each for result in results for each in result.decisions.items()]
    by_piece = {piece_of(number, limit.segment): limit for number, each in decisions for limit in each.limits}
    committed_at = {piece_of(number, segment): at for number, each in decisions for segment, at in each.acknowledged}
    found = sorted(
        (journal, committed_at.get(piece, offset), offset)
        for journal, offset, piece, clock in rows
        if piece not in by_piece or by_piece[piece].lo < clock <= by_piece[piece].hi
    )
    return [(journal, offset) for journal, _, offset in found]


def transaction(
    memory: Memory,
    sources: dict[str, Source],
    heads: dict[str, int],
    max_bytes: int,
    max_slices: int,
    long: LongTransactions | None = None,
):
    """Run one transaction like the consumer. Return the next sources and the delivered messages.

    With `long`, transactions that were open over more than `max_bytes` are delivered in parts.
    """
    if long is not None:
        if (due := long.due(sources, max_bytes)) is not None:
            return replayed_part(memory, sources, heads, max_bytes, due)
        heads = long.ends(heads)
    planned = plan_transaction({j: (sources[j].read_through, heads[j]) for j in sources}, max_bytes)
    slices = plan_slices(planned, max_bytes=max_bytes, max_slices=max_slices)
    plan = ReadPlan(tuple(slices), commits=True)
    summaries, rows = run(memory, plan)
    results = []
    for journal, source in sources.items():
        parts = {part: s for part, s in summaries.items() if part.journal == journal}
        result = sequence(journal, source, parts, pruning=Pruning(NOW))
        if result.replay is not None:
            if long is not None and (found := find_long(journal, source, result, max_bytes)) is not None:
                long.add([found])
                return transaction(memory, sources, heads, max_bytes, max_slices, long)
            whole, producers = result.replay
            number = 1000 + 100 * len(results)
            replay = ReadPlan(
                (tuple(split(whole, max(1, max_bytes // 2))),), number, {journal: producers}, commits=True
            )
            replayed, more = run(memory, replay)
            rows += more
            result = sequence(journal, source, parts, replayed, producers, pruning=Pruning(NOW))
            assert result.replay is None
        results.append((journal, result))
    delivered = choose(rows, *(result for _, result in results))
    counts = [result.messages for _, result in results]
    assert None in counts or sum(counts) == len(delivered)
    return {journal: result.source for journal, result in results}, delivered


def replayed_part(
    memory: Memory, sources: dict[str, Source], heads: dict[str, int], max_bytes: int, long: LongTransaction
):
    """Run a transaction that delivers a part of a long one."""
    source = sources[long.journal]
    whole = long.part(source, max_bytes)
    assert whole.length <= max_bytes
    [acknowledgement] = run(memory, ReadPlan(((long.acknowledgement(heads[long.journal]),),)))[0].values()
    begins = {long.journal: {long.producer: source.producers[long.producer]}}
    parts, rows = run(memory, ReadPlan((tuple(split(whole, max(1, max_bytes // 2))),), 1, begins, commits=True))
    result = sequence_part(long, source, acknowledgement, parts)
    delivered = choose(rows, result)
    assert result.messages in (None, len(delivered))
    return {**sources, long.journal: result.source}, delivered
