"""Content made to harm readers: endless lines, deep nesting, and fake frames."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptMessage
from coranto.messages.csv_rows import CsvRows, TextRows
from coranto.messages.framing import Decoder, Framing, JsonLines
from coranto.messages.sequencer import Sequencer
from coranto.messages.uuids import Flags, ProducerId, format_uuid

LIMIT = 1000
BOUNDED: list[Framing[Any]] = [
    JsonLines(None, max_line_bytes=LIMIT),
    CsvRows(TextRows(1), uuid_column=None, max_row_bytes=LIMIT),
]


def taken(decoder: Decoder[Any], chunk: bytes) -> tuple[list[bytes], list[int]]:
    """Return the messages of a chunk, skipping corrupt ones, and the offsets of the corrupt ones."""
    found: list[bytes] = []
    corrupt: list[int] = []
    while True:
        try:
            for each in decoder.feed(chunk):
                found.append(each.content)  # noqa: PERF401 - those before a corrupt one count
        except CorruptMessage as error:
            corrupt.append(error.offset)
            chunk = b""
        else:
            return found, corrupt


@pytest.mark.parametrize("framing", BOUNDED, ids=["json", "csv"])
@pytest.mark.parametrize("start", [b"x", b'"'], ids=["plain", "quoted"])
def test_a_line_without_an_end_is_corrupt_and_its_memory_is_freed(framing: Framing[Any], start: bytes) -> None:
    decoder = framing.decoder("a/journal", 100)
    held = 0
    found, corrupt = taken(decoder, b"1\n" + start)
    for _ in range(50):
        more, bad = taken(decoder, b"x" * 100)
        found, corrupt = found + more, corrupt + bad
        tail = decoder.finish()
        held = max(held, tail.length if tail is not None else 0)
    assert held <= LIMIT + 100
    assert corrupt == [102]
    assert decoder.offset == 100 + 2 + 1 + 5000, "the offset is after the skipped content"
    more, bad = taken(decoder, b"xx\n2\n3\n")
    assert (found + more, bad) == ([b"1", b"2", b"3"], [])
    assert decoder.offset == 100 + 2 + 1 + 5000 + 7


@given(
    st.lists(st.integers(0, 3 * LIMIT), max_size=6), st.lists(st.integers(0, 20 * LIMIT), max_size=12), st.booleans()
)
def test_lines_within_the_limit_are_read_between_longer_ones(lengths: list[int], cuts: list[int], is_csv: bool) -> None:
    lines = [bytes([ord("a") + number]) * (length + 1) for number, length in enumerate(lengths)]
    content = b"".join(line + b"\n" for line in lines)
    marks = sorted({0, len(content), *(at % (len(content) + 1) for at in cuts)})
    decoder = BOUNDED[is_csv].decoder("a/journal", 0)
    found: list[bytes] = []
    refused: list[int] = []
    largest = max((end - begin for begin, end in pairwise(marks)), default=0)
    for begin, end in pairwise(marks):
        more, bad = taken(decoder, content[begin:end])
        found, refused = found + more, refused + bad
    begins = [content.index(line) for line in lines]
    ends = dict(zip(begins, lines, strict=True))
    assert set(found) | {ends[offset] for offset in refused} == set(lines)
    assert len(found) + len(refused) == len(lines)
    assert all(len(ends[offset]) > LIMIT for offset in refused)
    assert all(len(line) <= LIMIT + largest for line in found)
    assert decoder.offset == len(content)


def test_a_jump_ends_skipped_content() -> None:
    for framing in BOUNDED:
        decoder = framing.decoder("a/journal", 0)
        assert taken(decoder, b"x" * (LIMIT + 1)) == ([], [0])
        assert [each.content for each in decoder.feed(b"1\n", 5000)] == [b"1"]


def message(clock: int, size: int, at: int) -> Any:
    framing = JsonLines()
    line = framing.marshal({"pad": "x" * size}, format_uuid(ProducerId(b"\1\0\0\0\0\1"), clock, Flags.CONTINUE_TXN))
    [found] = framing.decoder("a/journal", at).feed(line)
    return found


def test_the_ring_does_not_exceed_its_byte_limit() -> None:
    """A transaction without an end, of large messages."""
    sequencer: Sequencer[Any] = Sequencer(ring_bytes=10_000)
    at, first = 0, None
    for clock in range(100, 200):
        envelope = message(clock, 900, at)
        first = first or envelope
        sequencer.queue(envelope)
        at = envelope.end
    assert first is not None
    ack = JsonLines().acknowledgement(format_uuid(ProducerId(b"\1\0\0\0\0\1"), 200, Flags.ACK_TXN))
    [trigger] = JsonLines().decoder("a/journal", at).feed(ack)
    sequencer.queue(trigger)
    wanted = sequencer.replay_range
    assert wanted is not None
    assert wanted.begin == 0
    assert at - 10_000 <= wanted.end < at, "the ring holds the rest"


def test_a_single_message_larger_than_the_ring_is_held() -> None:
    sequencer: Sequencer[Any] = Sequencer(ring_bytes=10)
    first = message(100, 900, 0)
    sequencer.queue(first)
    ack = JsonLines().acknowledgement(format_uuid(ProducerId(b"\1\0\0\0\0\1"), 101, Flags.ACK_TXN))
    [trigger] = JsonLines().decoder("a/journal", first.end).feed(ack)
    sequencer.queue(trigger)
    assert sequencer.replay_range is None
    assert sequencer.step() == first
