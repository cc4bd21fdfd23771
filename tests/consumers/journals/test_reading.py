"""Lines of a journal, read in parts of any size."""

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from coranto.errors import CorruptMessage, OffsetJump
from coranto.messages.framing import JsonLines
from coranto.messages.uuids import format_uuid
from coranto_consumers.journals.ranges import Range, split
from coranto_consumers.journals.reading import read_blocks, read_lines
from tests.consumers.spark.folding import FRAMING, Memory
from tests.consumers.spark.histories import PRODUCERS, histories
from tests.sampling import examples

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)


@given(content=histories(), tail=st.binary(max_size=20).filter(lambda t: b"\n" not in t), sizes=st.randoms())
@settings(max_examples=examples(100), deadline=None, phases=NO_SHRINKING)
def test_every_line_belongs_to_one_part_of_any_split(content, tail, sizes: random.Random):
    memory = Memory({"j/j": content + tail}, sizes.randint(1, 300))
    whole = Range("j/j", 0, len(content + tail), len(content + tail))
    blocks = [
        found
        for part in split(whole, sizes.randint(1, max(1, whole.length)))
        for found in read_blocks(memory, part, sizes.choice([1, 50, 10_000]))
    ]

    # Complete lines in order without a gap. No part has the unfinished one at the head.
    assert b"".join(block for _, block in blocks) == content
    assert all(block.endswith(b"\n") for _, block in blocks)
    assert [offset for offset, _ in blocks] == [sum(len(b) for _, b in blocks[:n]) for n in range(len(blocks))]


def test_a_line_without_an_end_is_corrupt():
    """Otherwise a writer of a source would determine the memory of a task."""
    content = b'{"n":1}\n' + b"x" * (1 << 20)
    memory = Memory({"j/j": content}, 1000)
    bounded = JsonLines(max_line_bytes=100_000)
    for end in (10, 50_000, 100_009):
        with pytest.raises(CorruptMessage, match="offset 8: a line that has not ended after 100000 bytes"):
            list(read_lines(memory, Range("j/j", 0, end, len(content)), bounded))
    # A shorter one may still end, and is left to later runs.
    whole = Range("j/j", 0, 50_000, 100_000)
    assert [lines.begins.tolist() for lines in read_lines(memory, whole, bounded)] == [[0]]


def test_an_offset_within_a_line_reads_from_the_next_line():
    content = b'{"n":1}\n{"n":2}\n{"n":3}\n'
    memory = Memory({"j/j": content})

    def lines(begin: int, end: int) -> list[bytes]:
        part = Range("j/j", begin, end, len(content), aligned=False)
        return [value for found in read_lines(memory, part, FRAMING) for value in found.values.to_pylist()]

    assert lines(3, 24) == [b'{"n":2}', b'{"n":3}']
    assert lines(8, 9) == [b'{"n":2}']
    assert lines(9, 16) == []
    assert lines(9, 17) == [b'{"n":3}']


def test_a_corrupt_line_is_named_with_its_offset():
    memory = Memory({"j/j": b'{"n":1}\n{"n":\n{"n":3}\n'})

    with pytest.raises(CorruptMessage, match="journal j/j at offset 8: not a line of JSON"):
        list(read_lines(memory, Range("j/j", 0, 22, 22), FRAMING))


def test_removed_content_is_an_offset_jump():
    memory = Memory({"j/j": b'{"n":1}\n{"n":2}\n'}, first=8)

    with pytest.raises(OffsetJump):
        list(read_lines(memory, Range("j/j", 0, 16, 16), FRAMING))


def test_a_clock_of_the_far_future_is_corrupt():
    line = FRAMING.marshal({}, format_uuid(PRODUCERS[0], 1 << 63, 0))

    with pytest.raises(CorruptMessage, match="at offset 0: the timestamp of its UUID"):
        list(read_lines(Memory({"j/j": line}), Range("j/j", 0, len(line), len(line)), FRAMING))
