"""Both sequencers compared with a plain model of the rules, over histories of well-formed and invalid producers.

The message sequencer runs with rings that are far too small. Both are restored from checkpoints at any message.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coranto.messages import columnar
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto.messages.framing import Envelope, JsonLines, JsonObject
from coranto.messages.sequencer import ReplayRange, Sequencer, read_committed, read_committed_async
from coranto.messages.uuids import Flags, ProducerId

JOURNAL = "a/journal"
PRODUCERS = [ProducerId(bytes([1, 0, 0, 0, 0, number])) for number in (7, 3, 200)]
LINES = JsonLines()


@dataclass
class Known:
    """A producer's state in the model."""

    last_ack: int
    pending: list[Envelope[JsonObject]] = field(default_factory=list)


class Model:
    """The rules of sequencing, one message at a time, with all pending messages in memory."""

    def __init__(self) -> None:
        self.known: dict[ProducerId, Known] = {}

    def take(self, row: Envelope[JsonObject]) -> list[Envelope[JsonObject]]:
        """Return the messages that a message commits, in order."""
        if row.clock == 0:
            return [row]
        known = self.known.setdefault(row.producer, Known(row.clock - 1))
        committed: list[Envelope[JsonObject]] = []
        if row.flags == Flags.CONTINUE_TXN:
            if row.clock > max([known.last_ack, *(message.clock for message in known.pending)]):
                known.pending.append(row)
            return []
        if row.flags == Flags.ACK_TXN:
            if row.clock > known.last_ack:
                committed = [message for message in known.pending if message.clock <= row.clock]
        elif row.clock > known.last_ack:
            committed = [row]
        else:
            return []
        known.last_ack, known.pending = row.clock, []
        return committed

    def states(self) -> dict[ProducerId, ProducerState]:
        return {
            producer: ProducerState(known.last_ack, known.pending[0].begin if known.pending else -1)
            for producer, known in self.known.items()
        }


@dataclass(frozen=True)
class History:
    """The messages of a journal from offset 0, and whether producers followed the rules of publishing."""

    rows: tuple[Envelope[JsonObject], ...]
    is_well_formed: bool

    def __repr__(self) -> str:
        names = {0: "OUTSIDE", 1: "CONTINUE", 2: "ACK"}
        rows = ", ".join(
            f"{row.begin}:p{PRODUCERS.index(row.producer)} {names.get(row.flags, row.flags)}({row.clock})"
            for row in self.rows
        )
        return f"<{'well' if self.is_well_formed else 'ill'}-formed: {rows}>"

    def content(self, begin: int, end: int) -> Iterator[Envelope[JsonObject]]:
        """Return the messages within [begin, end)."""
        return (row for row in self.rows if begin <= row.begin and row.end <= end)

    def replay(self, wanted: ReplayRange) -> Iterable[Envelope[JsonObject]]:
        assert wanted.journal == JOURNAL
        return self.content(wanted.begin, wanted.end)


def make_history(rows: Iterable[tuple[ProducerId, int, int]], is_well_formed: bool) -> History:
    envelopes = []
    begin = 0
    for number, (producer, clock, flags) in enumerate(rows):
        end = begin + 10 + number % 7
        envelopes.append(Envelope(JOURNAL, begin, end, producer, clock, flags, b"{}", LINES))
        begin = end
    return History(tuple(envelopes), is_well_formed)


class Writer:
    """A well-behaved producer: appends at least once, acknowledges or rolls back, never mixes."""

    def __init__(self, producer: ProducerId) -> None:
        self.producer = producer
        self.clock = 100
        self.last_ack: int | None = None
        self.block: list[tuple[ProducerId, int, int]] = []
        self.is_open = False

    def write(self, action: str, count: int) -> list[tuple[ProducerId, int, int]]:
        if action == "messages":
            self.block = [self._next(Flags.CONTINUE_TXN) for _ in range(count)]
            self.is_open = True
            return self.block
        if action == "outside" and not self.is_open:
            self.block = [self._next(Flags.OUTSIDE_TXN) for _ in range(count)]
            self.last_ack = self.clock
            return self.block
        if action == "same again":
            return self.block  # The append was repeated, with nothing of this producer in between.
        if action == "acknowledge":
            row = self._next(Flags.ACK_TXN)
            self.last_ack, self.is_open, self.block = self.clock, False, []
            return [row] * count  # A recovering consumer appends its intents again.
        if action == "roll back" and self.is_open:
            assert self.last_ack is not None
            self.is_open, self.block = False, []
            return [(self.producer, self.last_ack, Flags.ACK_TXN)] * count
        if action == "without clock":
            return [(self.producer, 0, count % 4)]
        return []

    def _next(self, flags: Flags) -> tuple[ProducerId, int, int]:
        self.clock += 1
        if self.last_ack is None:
            self.last_ack = self.clock - 1
        return self.producer, self.clock, flags


ACTIONS = ["messages", "messages", "messages", "same again", "outside", "acknowledge", "roll back", "without clock"]
steps = st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS), st.integers(1, 4))


def write_all(script: list[tuple[int, str, int]]) -> History:
    writers = [Writer(producer) for producer in PRODUCERS]
    rows = [row for number, action, count in script for row in writers[number].write(action, count)]
    return make_history(rows, True)


well_formed = st.lists(steps, max_size=25).map(write_all)
ill_formed = st.lists(
    st.tuples(
        st.sampled_from(PRODUCERS),
        st.integers(0, 9) | st.sampled_from([2**63, 2**64 - 1]),
        st.sampled_from([1, 1, 1, 2, 2, 0, 3, 1023]),
    ),
    max_size=40,
).map(lambda rows: make_history(rows, False))
# Few producers and clocks, so that a transaction's messages repeat in any order, also before restored checkpoints.
dense = st.lists(
    st.tuples(st.sampled_from(PRODUCERS[:2]), st.integers(1, 8), st.sampled_from([1, 1, 1, 1, 2, 0])), max_size=16
).map(lambda rows: make_history(rows, False))
histories = well_formed | ill_formed | dense


def deliveries(history: History) -> list[list[Envelope[JsonObject]]]:
    """Return the messages that each message of a history commits by the rules."""
    model = Model()
    return [model.take(row) for row in history.rows]


def offsets_of(messages: Iterable[Envelope[JsonObject]]) -> list[int]:
    return [message.begin for message in messages]


def through_the_wire(sources: Mapping[str, Source]) -> dict[str, Source]:
    return dict(Checkpoint.from_bytes(Checkpoint(sources).to_bytes()).sources)


# The sequencer.


@given(histories, st.integers(1, 8), st.integers(1, 500))
def test_the_sequencer_follows_the_rules(history: History, ring_size: int, ring_bytes: int) -> None:
    sequencer: Sequencer[JsonObject] = Sequencer(ring_size=ring_size, ring_bytes=ring_bytes)
    model = Model()
    for row in history.rows:
        read = list(read_committed([row], sequencer, history.replay))
        assert offsets_of(read) == offsets_of(model.take(row))
        source = sequencer.checkpoint()[JOURNAL]
        assert source == Source(row.end, model.states())


@given(histories, st.integers(1, 8), st.lists(st.integers(1, 6), max_size=8))
def test_a_restored_sequencer_delivers_the_rest_once(
    history: History, ring_size: int, retry_timeout: list[int]
) -> None:
    """Each consumer stops after some messages, even within a transaction, and the next continues there."""
    delivered: list[int] = []
    sources: dict[str, Source] = {}
    for count in [*retry_timeout, len(history.rows) + 1]:
        sequencer: Sequencer[JsonObject] = Sequencer(sources, ring_size, ring_bytes=40 * ring_size)
        begin = sequencer.read_through(JOURNAL)
        messages = read_committed(history.content(begin, 2**63), sequencer, history.replay)
        delivered += offsets_of(itertools.islice(messages, count))
        sources = through_the_wire(sequencer.checkpoint())
    assert delivered == [offset for row in deliveries(history) for offset in offsets_of(row)]


class DeferringConsumer:
    """A consumer that puts some messages back, and then continues or is restored from its checkpoint."""

    def __init__(self, history: History, ring_size: int, decisions: list[tuple[bool, bool]]) -> None:
        self.history = history
        self.ring_size = ring_size
        self.decisions = iter(decisions)
        self.consumed: list[int] = []
        self.sequencer: Sequencer[JsonObject] = Sequencer(ring_size=ring_size)

    def run(self) -> None:
        while not all(self._take(row) for row in self.history.content(self.sequencer.read_through(JOURNAL), 2**63)):
            self.sequencer = Sequencer(through_the_wire(self.sequencer.checkpoint()), self.ring_size)

    def _take(self, row: Envelope[JsonObject]) -> bool:
        """Queue and consume. Return False to be restored."""
        sequencer = self.sequencer
        sequencer.queue(row)
        for replayed in self.history.replay(sequencer.replay_range) if sequencer.replay_range else ():
            while sequencer.replay(replayed):
                defer, restore = next(self.decisions, (False, False))
                if not defer:
                    self.consumed.append(replayed.begin)
                    break
                sequencer.put_back()
                if restore:
                    return False
        sequencer.end_replay()
        while (message := sequencer.step()) is not None:
            defer, restore = next(self.decisions, (False, False))
            if not defer:
                if message.flags != Flags.ACK_TXN or message.clock == 0:
                    self.consumed.append(message.begin)
                continue
            sequencer.put_back()
            sequencer.checkpoint()
            if restore:
                return False
        return True


@given(histories, st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_a_message_put_back_is_delivered_again_directly_or_after_a_restore(
    history: History, ring_size: int, decisions: list[tuple[bool, bool]]
) -> None:
    consumer = DeferringConsumer(history, ring_size, decisions)
    consumer.run()
    assert consumer.consumed == [offset for row in deliveries(history) for offset in offsets_of(row)]


@given(well_formed, st.integers(1, 5), st.integers(0, 40))
def test_restoring_between_messages_loses_nothing(history: History, ring_size: int, cut: int) -> None:
    rows, model = history.rows, Model()
    before: Sequencer[JsonObject] = Sequencer(ring_size=ring_size)
    list(read_committed(rows[:cut], before, history.replay))
    after: Sequencer[JsonObject] = Sequencer(through_the_wire(before.checkpoint()), ring_size)
    list(read_committed(rows[cut:], after, history.replay))
    for row in rows:
        model.take(row)
    if rows:
        assert after.checkpoint() == {JOURNAL: Source(rows[-1].end, model.states())}


@given(histories)
def test_asynchronous_reading_delivers_the_same(history: History) -> None:
    async def over(rows: Iterable[Envelope[JsonObject]]) -> AsyncIterator[Envelope[JsonObject]]:
        for row in rows:
            yield row

    async def read() -> list[int]:
        sequencer: Sequencer[JsonObject] = Sequencer(ring_size=2)
        messages = read_committed_async(over(history.rows), sequencer, lambda wanted: over(history.replay(wanted)))
        return [message.begin async for message in messages]

    assert asyncio.run(read()) == [offset for row in deliveries(history) for offset in offsets_of(row)]


# The columns.


class Columns(NamedTuple):
    """Rows in the form of the columnar functions."""

    producers: columnar.UInt64s
    clocks: columnar.UInt64s
    flags: columnar.UInt16s
    offsets: columnar.Int64s

    def rows(self, chosen: slice | columnar.Mask) -> Columns:
        return Columns(*(column[chosen] for column in self))


def columns_of(rows: Iterable[Envelope[JsonObject]]) -> Columns:
    rows = list(rows)
    return Columns(
        np.array([columnar.producer_number(row.producer) for row in rows], dtype=np.uint64),
        np.array([row.clock for row in rows], dtype=np.uint64),
        np.array([row.flags for row in rows], dtype=np.uint16),
        np.array([row.begin for row in rows], dtype=np.int64),
    )


def split(columns: Columns, cuts: list[int]) -> list[Columns]:
    """Return adjacent pieces, some of them empty."""
    count = len(columns.clocks)
    marks = sorted([0, count, *(cut % (count + 1) for cut in cuts)])
    return [columns.rows(slice(begin, end)) for begin, end in itertools.pairwise(marks)]


class Transaction(NamedTuple):
    committed: list[int]
    source: Source


def sequence(history: History, source: Source, end: int, cuts: list[int], replay_first: bool) -> Transaction:
    """Run a consumer transaction over columns: messages from `source` that end by `end`, in ranges by `cuts`."""
    ranges = split(columns_of(history.content(source.read_through, end)), cuts)
    pending = {producer: state for producer, state in source.producers.items() if state.is_pending}
    needed = pending if replay_first else {}
    while True:
        before: list[Columns] = []
        if needed:
            begin = min(state.begin for state in needed.values())
            content = columns_of(history.content(begin, source.read_through))
            counts = columnar.replay_mask(
                content.producers, content.clocks, content.offsets, needed, source.read_through
            )
            before = split(content.rows(counts), cuts)
        pieces = [*before, *ranges]
        scans = [columnar.scan(*piece) for piece in pieces]
        resolution = columnar.resolve(
            [one.segments for one in pickle.loads(pickle.dumps(scans))], source.producers, replayed=needed.keys()
        )
        if not resolution.replay:
            break
        assert not resolution.replay.keys() & needed.keys()
        needed = {**needed, **resolution.replay}
    committed: list[int] = []
    for piece, one, windows in zip(pieces, scans, resolution.windows, strict=True):
        mask = columnar.committed_mask(one.row_segment, windows, piece.clocks)
        committed += piece.offsets[mask].tolist()
    read_through = max([source.read_through, *(row.end for row in history.rows if row.end <= end)])
    return Transaction(committed, Source(read_through, resolution.states))


@given(histories, st.lists(st.integers(0, 600), max_size=6), st.lists(st.integers(0, 50), max_size=5), st.booleans())
def test_columns_follow_the_rules_in_any_ranges_and_transactions(
    history: History, ends: list[int], cuts: list[int], replay_first: bool
) -> None:
    model = Model()
    source = Source()
    left = list(history.rows)
    for end in [*sorted(ends), 2**40]:
        expected: list[int] = []
        while left and left[0].end <= end:
            expected += offsets_of(model.take(left.pop(0)))
        committed, source = sequence(history, source, end, cuts, replay_first)
        assert sorted(committed) == sorted(expected)
        states = model.states()
        assert source.producers.keys() == states.keys()
        for producer, state in states.items():
            found = source.producers[producer]
            assert found.last_ack == state.last_ack
            if history.is_well_formed:
                assert found.begin == state.begin
            else:
                assert found.is_pending == state.is_pending
                assert found.begin <= state.begin
        source = through_the_wire({JOURNAL: source})[JOURNAL]


@given(histories, st.integers(1, 4), st.integers(1, 12), st.lists(st.integers(0, 50), max_size=3), st.booleans())
def test_columns_continue_from_a_sequencers_position_and_back(
    history: History, ring_size: int, count: int, cuts: list[int], replay_first: bool
) -> None:
    sequencer: Sequencer[JsonObject] = Sequencer(ring_size=ring_size)
    messages = read_committed(history.rows, sequencer, history.replay)
    delivered = offsets_of(itertools.islice(messages, count))
    source = sequencer.checkpoint().get(JOURNAL, Source())

    middle = source.read_through + 60
    committed, source = sequence(history, source, middle, cuts, replay_first)
    delivered += committed

    sequencer = Sequencer({JOURNAL: source}, ring_size)
    rest = history.content(source.read_through, 2**40)
    delivered += offsets_of(read_committed(rest, sequencer, history.replay))
    assert sorted(delivered) == sorted(offset for row in deliveries(history) for offset in offsets_of(row))


@given(histories, st.lists(st.integers(0, 50), max_size=5))
def test_a_scan_does_not_depend_on_batches(history: History, cuts: list[int]) -> None:
    whole = columns_of(history.rows)
    scanner = columnar.RangeScanner()
    rows = [scanner.feed(*piece) for piece in split(whole, cuts)]
    segments, row_segment = columnar.scan(*whole)
    assert scanner.segments() == segments
    assert np.concatenate(rows).tolist() == row_segment.tolist()
    assert [segment.first_offset for segment in segments] == sorted(segment.first_offset for segment in segments)
