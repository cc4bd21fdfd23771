"""Lines in chunks of any size make the same rows as the whole, and nothing is skipped silently."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage, InvalidInput
from coranto.messages import Flags, IncompleteTail, JsonLines, ProducerId, format_uuid
from coranto.messages.batches import UNREADABLE
from coranto.messages.line_batches import LineBatchDecoder

PRODUCER = ProducerId(b"\x01abcde")
LINES = [JsonLines().marshal({"n": n}, format_uuid(PRODUCER, 160 * n, Flags.CONTINUE_TXN)) for n in range(1, 9)]
CONTENT = b"".join(LINES)


@given(st.lists(st.integers(0, len(CONTENT)), max_size=6))
def test_chunks_may_be_cut_anywhere(cuts):
    places = sorted({0, *cuts, len(CONTENT)})
    decoder = LineBatchDecoder(JsonLines(), "a/journal", 1000)
    rows = []
    for begin, end in itertools.pairwise(places):
        batch = decoder.feed(CONTENT[begin:end], 1000 + begin)
        rows += batch.to_pylist() if batch is not None else []
    assert [row["content"] for row in rows] == LINES
    assert [(row["offset"], row["end"]) for row in rows] == [
        (1000 + n * len(LINES[0]), 1000 + (n + 1) * len(LINES[0])) for n in range(8)
    ]
    assert decoder.finish() is None
    assert decoder.offset == 1000 + len(CONTENT)


def test_a_gap_is_allowed_between_lines_and_refused_within_one():
    decoder = LineBatchDecoder(JsonLines(), "a/journal", 0)
    assert decoder.feed(LINES[0], 0).num_rows == 1
    with pytest.raises(InvalidInput, match="was fed before, up to"):
        decoder.feed(LINES[0], 0)
    assert decoder.feed(LINES[1], 5000).column("offset").to_pylist() == [5000]
    assert decoder.feed(b'{"_me', 5000 + len(LINES[1])) is None
    assert decoder.finish() == IncompleteTail("a/journal", 5000 + len(LINES[1]), 5)
    with pytest.raises(CorruptMessage, match="the rest of the line is missing"):
        decoder.feed(LINES[2], 9000)


def test_a_line_without_end_is_corrupt():
    decoder = LineBatchDecoder(JsonLines(max_line_bytes=10), "a/journal", 0)
    assert decoder.feed(b"{" * 10, 0) is None
    with pytest.raises(CorruptMessage, match="not ended after 10 bytes"):
        decoder.feed(b"{", 10)


def test_a_tolerant_framing_marks_lines_with_unreadable_uuids():
    decoder = LineBatchDecoder(JsonLines(tolerant=True), "a/journal", 0)
    batch = decoder.feed(LINES[0] + b"no JSON\n" + LINES[1], 0)
    assert batch.column(UNREADABLE).to_pylist() == [False, True, False]
    assert batch.column("clock").to_pylist() == [160, 0, 320]
