"""Reading in ranges, in any split and over many transactions, delivers the same as reading message by message."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coranto.messages.checkpoints import Checkpoint, Source
from coranto_consumers.journals.ranges import Range
from coranto_consumers.spark.committed.joint_reading import CommittedReader
from coranto_consumers.spark.committed.sequencing import LongTransactions
from tests.consumers.spark.folding import FRAMING, Memory, transaction
from tests.consumers.spark.histories import expected, histories
from tests.sampling import examples

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


@given(
    contents=st.lists(histories(), min_size=1, max_size=2),
    max_bytes=st.integers(150, 3000),
    max_slices=st.integers(1, 5),
    chunk=st.integers(50, 500),
    restores=st.booleans(),
    in_parts=st.booleans(),
)
@settings(max_examples=examples(120), deadline=None, phases=NO_SHRINKING)
def test_transactions_deliver_the_same_messages_as_a_plain_reader(
    contents, max_bytes, max_slices, chunk, restores, in_parts
):
    memory = Memory({f"journal/{n}": content for n, content in enumerate(contents)}, chunk)
    heads = {journal: len(content) for journal, content in memory.journals.items()}
    sources = {journal: Source() for journal in heads}
    delivered: list[tuple[str, int]] = []
    long = LongTransactions() if in_parts else None

    def progress() -> int:
        return sum(
            source.read_through + sum(state.begin for state in source.producers.values() if state.is_pending)
            for source in sources.values()
        )

    while any(sources[journal].read_through < head for journal, head in heads.items()):
        before, read_before = progress(), [source.read_through for source in sources.values()]
        sources, now = transaction(memory, sources, heads, max_bytes, max_slices, long)
        delivered += now
        read = [source.read_through for source in sources.values()]
        assert read > read_before or (read == read_before and progress() > before)
        if restores:
            long = LongTransactions() if in_parts else None
            sources = dict(Checkpoint.from_bytes(Checkpoint(sources).to_bytes()).sources)

    for journal, content in memory.journals.items():
        # In the same order, too: the order of commits.
        assert [offset for name, offset in delivered if name == journal] == expected(journal, content)


@given(content=histories(), chunk=st.integers(1, 500), begin=st.integers(0, 3000), length=st.integers(0, 3000))
@settings(max_examples=examples(100), deadline=None, phases=NO_SHRINKING)
def test_a_committed_read_of_a_range_equals_a_read_from_its_begin(content, chunk, begin, length):
    starts = [0, *(n + 1 for n, byte in enumerate(content) if byte == 0x0A)]
    begin = max((start for start in starts if start <= begin), default=0)
    end = min((start for start in starts if start >= begin + length), default=len(content))
    whole = Range("j/j", begin, end, len(content))

    reader = CommittedReader(Memory({"j/j": content}, chunk), [whole], FRAMING, commits=True)
    rows = [row for found in reader.read(0) for row in zip(found.commits.tolist(), found.begins.tolist(), strict=True)]

    assert [row for _, row in sorted(rows)] == [begin + offset for offset in expected("j/j", content[begin:end])]
