"""Blank lines are skipped and marks removed, whether lines are read one by one, in blocks or as batches."""

from __future__ import annotations

import numpy as np
import pytest

from coranto.errors import CorruptMessage
from coranto.messages.batches import UNREADABLE
from coranto.messages.framing import JsonLines
from coranto.messages.line_batches import LineBatchDecoder
from coranto.messages.special_lines import read_block
from coranto.messages.uuids import Flags, ProducerId, format_uuid

MARK = b"\xef\xbb\xbf"
UUID = format_uuid(ProducerId(b"\1\2\3\4\5\6"), 1 << 30, Flags.OUTSIDE_TXN)
LINES = [
    b"",
    b'{"_meta":{"uuid":"%s"},"n":1}' % UUID.encode(),
    b" \t\r",
    MARK + b'{"_meta":{"uuid":"%s"},"n":2}' % UUID.encode(),
    MARK,
    MARK + b'{"n":3}',
    b'{"n":4}',
]
BLOCK = b"".join(line + b"\n" for line in LINES)


@pytest.mark.parametrize("tolerant", [False, True])
@pytest.mark.parametrize("pointer", ["/_meta/uuid", None])
def test_blank_lines_are_skipped_and_marks_removed(pointer: str | None, tolerant: bool) -> None:
    found = read_block(JsonLines(pointer, tolerant=tolerant), "a/b", BLOCK, 100)
    assert found.blank is not None
    assert np.flatnonzero(found.blank).tolist() == [0, 2, 4]
    assert found.unreadable is None
    texts = [text.as_py().removesuffix(b"\n") for text in found.content]
    assert [text for row, text in enumerate(texts) if not found.blank[row]] == [
        line.removeprefix(MARK) for line in LINES if b"{" in line
    ]
    if pointer is not None:
        assert found.lines.uuids.clocks.tolist() == [0, 1 << 30, 0, 1 << 30, 0, 0, 0]


def test_other_invalid_lines_are_still_errors_or_unreadable() -> None:
    block = b"\n" + MARK + b"nonsense\n" + b"nonsense\n"
    with pytest.raises(CorruptMessage, match="offset 11"):
        read_block(JsonLines(), "a/b", block, 10)
    found = read_block(JsonLines(tolerant=True), "a/b", block, 10)
    assert found.unreadable is not None
    assert found.unreadable.tolist() == [False, True, True]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("pointer", ["/_meta/uuid", None])
def test_single_lines_and_batches_agree_with_blocks(pointer: str | None, size: int) -> None:
    framing = JsonLines(pointer)
    block = read_block(framing, "a/b", BLOCK, 100)
    assert block.blank is not None
    chosen = np.flatnonzero(~block.blank)
    places = [
        (int(begin), int(end))
        for begin, end in zip(block.lines.offsets(100)[chosen], block.lines.end_offsets(100)[chosen], strict=True)
    ]
    texts = [block.content[row].as_py() for row in chosen]
    clocks = block.lines.uuids.clocks[chosen].tolist()

    decoder, batches = framing.decoder("a/b", 100), LineBatchDecoder(framing, "a/b", 100)
    found, rows = [], []
    for at in range(0, len(BLOCK), size):
        found += list(decoder.feed(BLOCK[at : at + size]))
        batch = batches.feed(BLOCK[at : at + size], 100 + at)
        rows += batch.to_pylist() if batch is not None else []
    assert [(each.begin, each.end) for each in found] == places
    assert [(row["offset"], row["end"]) for row in rows] == places
    assert [each.content + b"\n" for each in found] == [row["content"] for row in rows] == texts
    assert [each.clock for each in found] == [row["clock"] for row in rows] == clocks
    assert [each.message["n"] for each in found] == [1, 2, 3, 4]
    assert decoder.offset == batches.offset == 100 + len(BLOCK)


def test_corrupt_and_torn_lines_after_a_mark_are_reported_by_offset() -> None:
    good = LINES[1] + b"\n"
    content = b" \n" + MARK + b"nonsense\n" + MARK + b'{"torn":' + good + good
    decoder = JsonLines(tolerant=True).decoder("a/b", 10)
    found = [(each.begin, each.end, each.clock > 0) for each in decoder.feed(content)]
    torn = 12 + len(MARK) + 9
    assert found == [
        (12, torn, False),
        (torn + 3, torn + 11, False),
        (torn + 11, torn + 11 + len(good), True),
        (torn + 11 + len(good), 10 + len(content), True),
    ]
    batches = LineBatchDecoder(JsonLines(tolerant=True), "a/b", 10)
    batch = batches.feed(b" \n" + MARK + b"nonsense\n" + good, 10)
    assert batch is not None
    assert batch.column(UNREADABLE).to_pylist() == [True, False]
    with pytest.raises(CorruptMessage, match="offset 12"):
        list(JsonLines().decoder("a/b", 10).feed(content))
