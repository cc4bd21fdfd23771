"""Readers over plain content: returned messages, positions, and the lifetime of sources."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coranto.errors import CorruptMessage
from coranto.messages.checkpoints import Checkpoint, Source
from coranto.messages.framing import IncompleteTail, JsonLines, JsonObject
from coranto.messages.reading import (
    AsyncReadCommitted,
    AsyncReadUncommitted,
    ReadCommitted,
    ReadTransaction,
    ReadUncommitted,
)
from coranto.messages.uuids import Flags, ProducerId, format_uuid

A, B = ProducerId(b"\x01AAAAA"), ProducerId(b"\x01BBBBB")
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN
LINES = JsonLines()


def line(producer: ProducerId, clock: int, flags: int) -> bytes:
    return LINES.marshal({"clock": clock}, format_uuid(producer, clock, flags))


def lines(*rows: tuple[ProducerId, int, int]) -> bytes:
    return b"".join(line(*row) for row in rows)


class Content:
    """A journal's content and its replayed ranges."""

    def __init__(self, content: bytes, size: int = 7) -> None:
        self.content = content
        self.size = size
        self.replays: list[tuple[int, int]] = []
        self.closed = 0

    def chunks(self, begin: int, end: int | None) -> Iterator[bytes]:
        try:
            content = self.content[begin:end]
            for at in range(0, len(content), self.size):
                yield content[at : at + self.size]
        finally:
            self.closed += 1

    async def achunks(self, begin: int, end: int | None) -> AsyncIterator[bytes]:
        try:
            content = self.content[begin:end]
            for at in range(0, len(content), self.size):
                yield content[at : at + self.size]
        finally:
            self.closed += 1

    def read(self, begin: int, end: int | None) -> ReadUncommitted[JsonObject]:
        self._note(begin, end)
        return ReadUncommitted(LINES, "j", self.chunks(begin, end), begin)

    def aread(self, begin: int, end: int | None) -> AsyncReadUncommitted[JsonObject]:
        self._note(begin, end)
        return AsyncReadUncommitted(LINES, "j", self.achunks(begin, end), begin)

    def _note(self, begin: int, end: int | None) -> None:
        if end is not None:
            self.replays.append((begin, end))


def clocks(messages: object) -> list[int]:
    assert isinstance(messages, list | tuple)
    return [message.clock for message in messages]


HISTORY = lines(
    (A, 10, CONTINUE),
    (B, 20, CONTINUE),
    (A, 30, CONTINUE),
    (B, 35, OUTSIDE),  # Drops 20.
    (A, 10, CONTINUE),
    (B, 40, CONTINUE),
    (A, 50, ACK),
    (A, 60, ACK),  # Commits nothing.
    (B, 70, ACK),
    (A, 80, CONTINUE),
)


def test_uncommitted_reading_returns_all_messages_with_their_offsets() -> None:
    reader = ReadUncommitted(LINES, "j", Content(HISTORY + b"{").chunks(0, None))
    read = list(reader)
    assert clocks(read) == [10, 20, 30, 35, 10, 40, 50, 60, 70, 80]
    assert b"".join(HISTORY[message.begin : message.end] for message in read) == HISTORY
    assert reader.offset == len(HISTORY)
    assert reader.tail == IncompleteTail("j", len(HISTORY), 1)


def test_committed_messages_are_read_once_in_acknowledgement_order() -> None:
    reader = ReadCommitted(Content(HISTORY).read, "j")
    assert clocks(list(reader)) == [35, 10, 30, 40]
    assert reader.offset == len(HISTORY)
    assert set(reader.source().producers) == {A, B}


def test_transactions_contain_all_their_messages() -> None:
    content = Content(HISTORY)
    reader = ReadCommitted(content.read, "j", ring_size=1)
    read = list(reader.transactions())
    assert [(one.producer, one.clock, clocks(one.messages)) for one in read] == [
        (B, 35, [35]),
        (A, 50, [10, 30]),
        (B, 70, [40]),
    ]
    assert all(HISTORY[: one.end].endswith(b"}\n") for one in read)
    assert content.replays


@pytest.mark.parametrize("ring_size", [1, 2, 100])
def test_a_small_ring_replays_and_returns_the_same(ring_size: int) -> None:
    content = Content(HISTORY)
    assert clocks(list(ReadCommitted(content.read, "j", ring_size=ring_size))) == [35, 10, 30, 40]
    assert bool(content.replays) == (ring_size < 3)
    assert content.closed == 1 + len(content.replays)


def in_parts(content: Content, counts: list[int], ring_size: int) -> Iterator[ReadTransaction[JsonObject]]:
    """Yield transactions from readers that each stop after some and hand their position to the next."""
    source = None
    for count in [*counts, None]:
        reader = ReadCommitted(content.read, "j", source, ring_size=ring_size)
        yield from itertools.islice(reader.transactions(), count)
        wire = Checkpoint({"j": reader.source(0)}).to_bytes()
        source = Checkpoint.from_bytes(wire).sources["j"]


@given(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 5))
def test_readers_continue_from_each_others_positions(counts: list[int], ring_size: int) -> None:
    read = list(in_parts(Content(HISTORY), counts, ring_size))
    assert [clocks(one.messages) for one in read] == [[35], [10, 30], [40]]


def test_a_reader_stopped_within_a_transaction_continues_within_it() -> None:
    content = Content(HISTORY)
    reader = ReadCommitted(content.read, "j")
    assert clocks([next(reader), next(reader)]) == [35, 10]
    rest = ReadCommitted(content.read, "j", reader.source())
    assert [clocks(one.messages) for one in rest.transactions()] == [[30], [40]]


def test_corrupt_messages_are_raised_or_reported_and_skipped() -> None:
    content = line(A, 10, OUTSIDE) + b"oops\n" + line(A, 20, OUTSIDE)
    errors: list[CorruptMessage] = []
    reader = ReadUncommitted(LINES, "j", [content], 100, on_corrupt=errors.append)
    assert clocks(list(reader)) == [10, 20]
    assert [error.offset for error in errors] == [100 + len(line(A, 10, OUTSIDE))]

    reader = ReadUncommitted(LINES, "j", [content], 100)
    assert next(reader).clock == 10
    with pytest.raises(CorruptMessage):
        next(reader)
    assert next(reader).clock == 20
    committed = ReadCommitted(lambda begin, end: ReadUncommitted(LINES, "j", [content], begin), "j")
    assert next(committed).clock == 10
    with pytest.raises(CorruptMessage):
        next(committed)


def test_a_producer_whose_clock_goes_back_is_reported() -> None:
    content = Content(lines((A, 10, OUTSIDE), (A, 5, ACK), (A, 10, OUTSIDE)))
    with capture_logs() as logs:
        assert clocks(list(ReadCommitted(content.read, "j"))) == [10, 10]
    [entry] = logs
    assert (entry["journal"], entry["producer"], entry["clock"]) == ("j", A.hex(), 5)


def test_leaving_a_reader_closes_its_source() -> None:
    content = Content(HISTORY)
    reader = ReadCommitted(content.read, "j")
    next(reader)
    assert content.closed == 0
    reader.close()
    assert content.closed == 1
    uncommitted = content.read(0, None)
    next(uncommitted)
    uncommitted.close()
    assert content.closed == 2


@given(st.integers(1, 5), st.integers(1, 40))
def test_asynchronous_readers_return_the_same(ring_size: int, size: int) -> None:
    async def run() -> None:
        content = Content(HISTORY, size)
        everything = [message async for message in content.aread(0, None)]
        assert clocks(everything) == [10, 20, 30, 35, 10, 40, 50, 60, 70, 80]
        reader = AsyncReadCommitted(content.aread, "j", ring_size=ring_size)
        assert clocks([message async for message in reader]) == [35, 10, 30, 40]
        reader = AsyncReadCommitted(content.aread, "j", ring_size=ring_size)
        assert (await anext(reader)).clock == 35
        rest = AsyncReadCommitted(content.aread, "j", reader.source(), ring_size=ring_size)
        assert [clocks(one.messages) async for one in rest.transactions()] == [[10, 30], [40]]
        await reader.aclose()
        assert content.closed == 4 + len(content.replays)

    asyncio.run(run())


class Slice:
    """A piece of content and its offset."""

    def __init__(self, offset: int, content: bytes) -> None:
        self.offset = offset
        self.content = content


def test_offsets_jump_over_holes() -> None:
    piece = line(A, 10, OUTSIDE)
    reader = ReadUncommitted(LINES, "j", [Slice(0, piece), Slice(500, piece)])
    assert [message.begin for message in reader] == [0, 500]


def test_a_source_includes_messages_that_are_not_committed_yet() -> None:
    content = Content(lines((A, 10, CONTINUE)))
    reader: ReadCommitted[JsonObject] = ReadCommitted(content.read, "j", Source())
    assert list(reader) == []
    source = reader.source()
    content.content += lines((A, 20, ACK))
    more = ReadCommitted(content.read, "j", source)
    assert [clocks(one.messages) for one in more.transactions()] == [[10]]


def test_a_finished_reader_is_positioned_after_blank_lines() -> None:
    whole = lines((A, 100, OUTSIDE)) + b"\n  \n\xef\xbb\xbf\n"
    unfinished = whole + b'{"clo'

    def read(begin: int, end: int | None) -> ReadUncommitted[JsonObject]:
        return ReadUncommitted(LINES, "j", Content(unfinished).chunks(begin, end), begin)

    def read_async(begin: int, end: int | None) -> AsyncReadUncommitted[JsonObject]:
        return AsyncReadUncommitted(LINES, "j", Content(unfinished).achunks(begin, end), begin)

    async def read_all() -> Source:
        reader = AsyncReadCommitted(read_async, "j")
        assert len([each async for each in reader]) == 1
        return reader.source()

    reader = ReadCommitted(read, "j")
    assert len(list(reader)) == 1
    assert reader.source().read_through == asyncio.run(read_all()).read_through == len(whole)
    assert list(ReadCommitted(read, "j", reader.source())) == []
