"""Pruning: no clock of a producer affects another one's state.

Readers that prune at every checkpoint are compared with one that never prunes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source
from coranto.messages.columnar_sequencer import ColumnarSequencer
from coranto.messages.framing import Envelope, JsonLines, JsonObject
from coranto.messages.pruning import DEFAULT_PRUNE_DISTANCE, Pruning
from coranto.messages.reading import ReadCommitted
from coranto.messages.sequencer import ReplayRange, Sequencer, read_committed
from coranto.messages.uuids import Flags, ProducerClock, ProducerId, clock_from_ns
from tests.platform.messages.envelope_batches import envelope_batch

LINES = JsonLines()
HOUR = 3600
NOW = 1_900_000_000
A, B = ProducerId(b"\x01AAAAA"), ProducerId(b"\x01BBBBB")
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN


def clock_at(seconds: float) -> int:
    return clock_from_ns(int(seconds * 10**9))


# The rule.


def test_a_silent_producer_is_forgotten_by_its_clock_and_the_bytes_read_since() -> None:
    pruning = Pruning(NOW, horizon_s=24 * HOUR, distance=1000)
    old, recent, ahead = (ProducerState(clock_at(NOW + hours * HOUR), -1, 500) for hours in (-25, -23, 25))
    assert pruning.forgets(old, 1500)
    assert not pruning.forgets(old, 1499)
    assert not pruning.forgets(recent, 10**9)
    assert pruning.forgets(ahead, 1500), "otherwise a clock far ahead would be kept forever, and checkpoints would grow"
    assert not pruning.forgets(ahead, 1499)
    assert not pruning.forgets(ProducerState(old.last_ack), 10**9), "its last seen offset is unknown"
    assert pruning.prune("j", {A: old, B: recent}, 1500) == {B: recent}
    for wrong in ({"horizon_s": -1}, {"distance": -1}):
        with pytest.raises(InvalidInput, match="negative"):
            Pruning(NOW, **wrong)  # type: ignore[arg-type]


def test_an_open_transaction_is_forgotten_only_after_its_removal() -> None:
    open_state = ProducerState(clock_at(0), 400, 500)
    assert not Pruning(NOW, distance=1).forgets(open_state, 10**12)
    assert not Pruning(NOW, distance=1).forgets(open_state, 10**12, first_offset=499), "its last message is there"
    assert Pruning(NOW, distance=1).forgets(open_state, 10**12, first_offset=500)
    assert not Pruning(NOW).forgets(open_state, 600, first_offset=500), "the listing may be briefly outdated"


def test_the_number_of_known_producers_is_bounded_for_any_clocks() -> None:
    """Invented producers with any clocks cost at most the producers within the distance."""
    sequencer: Sequencer[JsonObject] = Sequencer()
    for number in range(2000):
        clock = clock_at(NOW + (number % 7 - 3) * 1000 * HOUR + 30 * HOUR)
        producer = ProducerId(bytes([1, *number.to_bytes(5, "big")]))
        sequencer.queue(Envelope("j", 10 * number, 10 * number + 10, producer, clock, OUTSIDE, b"{}", LINES))
        while sequencer.step():
            pass
        if number % 100 == 99:
            kept = sequencer.checkpoint(Pruning(NOW, distance=500))["j"].producers
            assert len(kept) == 50


# Readers that prune against one that does not.


class Write(NamedTuple):
    """A writer's next step: `count` messages at a time of its machine's clock."""

    writer: int
    action: str
    count: int
    time: float


@dataclass
class Writer:
    """A well-behaved producer: it repeats appends, recovers its acknowledgements, and never mixes."""

    producer: ProducerId
    wall: float = 0.0
    last_ack: int | None = None
    is_open: bool = False

    def __post_init__(self) -> None:
        self.clock = ProducerClock(lambda: int(self.wall * 10**9))
        self.block: list[tuple[ProducerId, int, int]] = []

    def write(self, write: Write) -> list[tuple[ProducerId, int, int]]:
        self.wall = write.time
        if write.action == "again":
            return self.block
        if write.action == "roll back":
            if not self.is_open or self.last_ack is None:
                return []
            self.block, self.is_open = [(self.producer, self.last_ack, ACK)], False
            return self.block
        if write.action == "outside" and self.is_open:
            return []
        flags = {"add": CONTINUE, "outside": OUTSIDE, "commit": ACK}[write.action]
        clocks = [self.clock.tick() for _ in range(1 if flags is ACK else write.count)]
        if self.last_ack is None:
            self.last_ack = clocks[0] - 1
        if flags is not CONTINUE:
            self.last_ack = clocks[-1]
        self.block, self.is_open = [(self.producer, clock, flags) for clock in clocks], flags is CONTINUE
        return self.block


# Correct, skewed by more than the horizon, years off, frozen. A writer may use several, like a stepped clock.
TIMES = [NOW, NOW + 60, NOW + 26 * HOUR, NOW - 26 * HOUR, NOW + 90_000 * HOUR, NOW - 90_000 * HOUR, 0.0]
times = st.sampled_from(TIMES)
writes = st.builds(
    Write,
    st.integers(0, 3),
    st.sampled_from(["add", "add", "outside", "commit", "again", "roll back"]),
    st.integers(1, 3),
    times,
)


@dataclass(frozen=True)
class History:
    rows: tuple[Envelope[JsonObject], ...]

    def replay(self, wanted: ReplayRange) -> list[Envelope[JsonObject]]:
        return [row for row in self.rows if wanted.begin <= row.begin and row.end <= wanted.end]


def history_of(script: Iterable[Write], repeat_within: int) -> History:
    """Return the writers' messages. A writer repeats an append only while at most `repeat_within` bytes follow it."""
    writers = [Writer(ProducerId(bytes([1, 0, 0, 0, 0, number]))) for number in range(4)]
    rows: list[Envelope[JsonObject]] = []
    ends: dict[int, int] = {}
    for write in script:
        end = rows[-1].end if rows else 0
        block = writers[write.writer].write(write)
        if write.action == "again" and end + 10 * len(block) - ends.get(write.writer, 0) >= repeat_within:
            continue
        for producer, clock, flags in block:
            rows.append(Envelope("j", end, end + 10, producer, clock, flags, b"{}", LINES))
            end += 10
        if block:  # A writer that wrote nothing keeps its end.
            ends[write.writer] = end
    return History(tuple(rows))


def oracle(history: History) -> list[int]:
    """Return the offsets of committed messages, from a reader that never prunes."""
    sequencer: Sequencer[JsonObject] = Sequencer(ring_size=1000)
    return [each.begin for each in read_committed(history.rows, sequencer, history.replay)]


@given(st.lists(writes, max_size=30), st.lists(times, min_size=1), st.booleans(), st.sampled_from([60, 200, None]))
def test_a_pruning_reader_delivers_the_same_as_one_that_never_prunes(
    script: list[Write], reader_times: list[float], restores: bool, distance: int | None
) -> None:
    """Clocks are skewed, stepped and frozen, including the reader's. It takes a checkpoint after each message."""
    distance = distance or DEFAULT_PRUNE_DISTANCE
    history = history_of(script, distance)
    sequencer: Sequencer[JsonObject] = Sequencer(ring_size=2)
    delivered = []
    for number, row in enumerate(history.rows):
        delivered += [each.begin for each in read_committed([row], sequencer, history.replay)]
        pruning = Pruning(reader_times[number % len(reader_times)], distance=distance)
        sources = sequencer.checkpoint(pruning)
        if restores:
            sequencer = Sequencer(Checkpoint.from_bytes(Checkpoint(sources).to_bytes()).sources, 2)
    assert delivered == oracle(history)


@given(st.lists(writes, max_size=30), st.lists(times, min_size=1), st.booleans(), st.integers(1, 5))
def test_a_pruning_columnar_reader_delivers_the_same(
    script: list[Write], reader_times: list[float], restores: bool, size: int
) -> None:
    distance = 60
    history = history_of(script, distance)

    def replay(wanted: ReplayRange) -> list[object]:
        return [envelope_batch(history.replay(wanted))]

    sequencer = ColumnarSequencer(replay, ring_rows=2)  # type: ignore[arg-type]
    delivered: list[int] = []
    for number in range(0, len(history.rows), size):
        batch = envelope_batch(list(history.rows[number : number + size]))
        delivered += sequencer.feed(batch).column("offset").to_pylist()
        sources = sequencer.checkpoint(Pruning(reader_times[number % len(reader_times)], distance=distance))
        if restores:
            sequencer = ColumnarSequencer(replay, sources, ring_rows=2)  # type: ignore[arg-type]
    assert delivered == oracle(history)


def test_a_writer_a_day_ahead_does_not_affect_others() -> None:
    """Formerly a transaction across a checkpoint was lost, and a repeated append was read twice."""
    b = clock_at(NOW + 25 * HOUR)
    rows = [(A, 1, CONTINUE), (A, 2, CONTINUE), (B, b, OUTSIDE), (A, 3, ACK), (A, 4, OUTSIDE), (A, 4, OUTSIDE)]
    base = clock_at(NOW)
    history = History(
        tuple(
            Envelope("j", 10 * n, 10 * n + 10, producer, clock if producer == B else base + clock, flags, b"{}", LINES)
            for n, (producer, clock, flags) in enumerate(rows)
        )
    )
    source, read = Source(), []
    for row in history.rows:
        reader = ReadCommitted(
            lambda begin, end, row=row: history.replay(ReplayRange("j", begin, end or row.end)), "j", source
        )
        read += [message.begin for message in reader]
        source = reader.source()
    assert read == oracle(history) == [20, 0, 10, 40]
