"""The cases of Gazette's own sequencer tests, with the same histories.

The ranges of replays differ slightly, because this ring holds only pending messages and never acknowledgements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from coranto.errors import InvalidInput, Unavailable
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.framing import Envelope, JsonLines, JsonObject
from coranto.messages.pruning import Pruning
from coranto.messages.sequencer import QueueOutcome, ReplayRange, Sequencer, read_committed
from coranto.messages.uuids import ZERO_PRODUCER, Flags, ProducerId, clock_to_ns

JOURNAL = "test/journal"
A, B, C = ProducerId(b"\x01AAAAA"), ProducerId(b"\x01BBBBB"), ProducerId(b"\x01CCCCC")
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN
LINES = JsonLines()

Message = Envelope[JsonObject]


class Journal:
    """A journal of messages of a hundred bytes, with gaps of two bytes."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def write(self, producer: ProducerId, clock: int, flags: int) -> Message:
        begin = 102 * len(self.messages)
        self.messages.append(Envelope(JOURNAL, begin, begin + 100, producer, clock, flags, b"{}", LINES))
        return self.messages[-1]

    def read(self, wanted: ReplayRange) -> list[Message]:
        return [row for row in self.messages if wanted.begin <= row.begin and row.end <= wanted.end]


class Reader:
    """A sequencer over a journal."""

    def __init__(self, journal: Journal, ring_size: int, sources: dict[str, Source] | None = None) -> None:
        self.journal = journal
        self.sequencer: Sequencer[JsonObject] = Sequencer(sources, ring_size)

    def queue(self, *messages: Message) -> list[QueueOutcome]:
        return [self.sequencer.queue(message) for message in messages]

    def wanted(self) -> tuple[int, int] | None:
        """Return the range to replay."""
        wanted = self.sequencer.replay_range
        return wanted and (wanted.begin, wanted.end)

    def take(self) -> list[Message]:
        """Return everything that is committed now."""
        taken = []
        wanted = self.sequencer.replay_range
        if wanted is not None:
            taken += [message for message in self.journal.read(wanted) if self.sequencer.replay(message)]
            self.sequencer.end_replay()
        while (message := self.sequencer.step()) is not None:
            taken.append(message)
        return taken

    def source(self) -> Source:
        return self.sequencer.checkpoint()[JOURNAL]


@pytest.fixture
def journal() -> Journal:
    return Journal()


def test_messages_enter_the_ring_and_are_evicted_from_it(journal: Journal) -> None:
    reader = Reader(journal, 5)
    rows = [journal.write(producer, 100 * (n + 1), CONTINUE) for n, producer in enumerate([A, B, A, A, *[B] * 7])]
    ack_a, ack_b = journal.write(A, 1200, ACK), journal.write(B, 1300, ACK)

    # The ring holds the last five messages. A's replay grows as the ring evicts its messages.
    for seen, wanted in [(4, None), (5, None), (6, (0, rows[2].begin)), (8, (0, rows[3].begin)), (9, (0, ack_a.begin))]:
        reader = Reader(journal, 5)
        reader.queue(*rows[:seen], ack_a)
        assert reader.wanted() == wanted
        assert reader.take() == [rows[0], rows[2], rows[3], ack_a]

    reader = Reader(journal, 5)
    assert reader.queue(*rows)[:3] == [
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.CONTINUE_EXTEND,
    ]
    assert reader.source() == Source(
        rows[-1].end, {A: ProducerState(99, rows[0].begin), B: ProducerState(199, rows[1].begin)}
    )
    assert reader.queue(ack_b) == [QueueOutcome.ACK_COMMIT_REPLAY]
    assert reader.wanted() == (rows[1].begin, rows[6].begin)
    assert reader.take() == [rows[1], *rows[4:], ack_b]


def test_successive_transactions(journal: Journal) -> None:
    reader, write = Reader(journal, 3), journal.write
    sequencer = reader.sequencer

    # Duplicates within a transaction, delivered from the ring.
    a1, a2, *rest = [write(A, clock, CONTINUE) for clock in (1, 2, 1, 2)]
    a3 = write(A, 3, ACK)
    assert reader.queue(a1, a2, *rest, a3) == [
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.CONTINUE_EXTEND,
        QueueOutcome.CONTINUE_CLOCK_LARGER,
        QueueOutcome.CONTINUE_CLOCK_LARGER,
        QueueOutcome.ACK_COMMIT_RING,
    ]
    assert reader.take() == [a1, a2, a3]
    assert not sequencer.has_pending

    # An acknowledgement without messages.
    a4 = write(A, 4, ACK)
    assert reader.queue(a4) == [QueueOutcome.ACK_EMPTY]
    assert reader.take() == [a4]

    # An acknowledgement of a part.
    a5, a7, a6 = write(A, 5, CONTINUE), write(A, 7, CONTINUE), write(A, 6, ACK)
    assert reader.queue(a5, a7, a6)[-1] is QueueOutcome.ACK_COMMIT_RING
    assert reader.take() == [a5, a6]
    assert not sequencer.has_pending

    # A rollback between messages of another producer.
    write(A, 7, CONTINUE)
    b1 = write(B, 1, CONTINUE)
    write(A, 7, CONTINUE)
    write(A, 8, CONTINUE)
    b2, a6_again = write(B, 2, CONTINUE), write(A, 6, ACK)
    assert reader.queue(*journal.messages[-6:]) == [
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.CONTINUE_CLOCK_LARGER,
        QueueOutcome.CONTINUE_EXTEND,
        QueueOutcome.CONTINUE_EXTEND,
        QueueOutcome.ACK_ROLLBACK,
    ]
    assert reader.take() == []
    assert sequencer.has_pending
    assert reader.source() == Source(a6_again.end, {A: ProducerState(6), B: ProducerState(0, b1.begin)})

    # That producer's acknowledgement still finds both messages in the ring.
    b3 = write(B, 3, ACK)
    assert reader.queue(b3) == [QueueOutcome.ACK_COMMIT_RING]
    assert reader.take() == [b1, b2, b3]

    # A replay with duplicates of this and earlier transactions in the ring and in the journal.
    b4, _, _, b5, b6, _, b7 = [write(B, clock, CONTINUE) for clock in (4, 1, 4, 5, 6, 2, 7)]
    b8 = write(B, 8, ACK)
    assert reader.queue(*journal.messages[-8:]) == [
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.CONTINUE_DUPLICATE,
        QueueOutcome.CONTINUE_CLOCK_LARGER,
        QueueOutcome.CONTINUE_EXTEND,
        QueueOutcome.CONTINUE_EXTEND,
        QueueOutcome.CONTINUE_DUPLICATE,
        QueueOutcome.CONTINUE_EXTEND,
        QueueOutcome.ACK_COMMIT_REPLAY,
    ]
    assert reader.wanted() == (b4.begin, b5.begin)
    assert reader.take() == [b4, b5, b6, b7, b8]

    # All messages of the ring are rolled back, and some of the replay.
    b9, _, b12, _, _ = [write(B, clock, CONTINUE) for clock in (9, 11, 12, 13, 14)]
    b10 = write(B, 10, ACK)
    assert reader.queue(*journal.messages[-6:])[-1] is QueueOutcome.ACK_COMMIT_REPLAY
    assert reader.wanted() == (b9.begin, b12.begin)
    assert reader.take() == [b9, b10]

    # Two interleaved transactions that both need a replay.
    b11, a7, a8, a9 = write(B, 11, CONTINUE), *(write(A, clock, CONTINUE) for clock in (7, 8, 9))
    b12, a10, b13 = write(B, 12, CONTINUE), write(A, 10, ACK), write(B, 13, ACK)
    assert reader.queue(b11, a7, a8, a9, b12, a10)[-1] is QueueOutcome.ACK_COMMIT_REPLAY
    assert reader.wanted() == (a7.begin, a8.begin)
    assert reader.take() == [a7, a8, a9, a10]
    assert sequencer.has_pending
    assert reader.queue(b13) == [QueueOutcome.ACK_COMMIT_REPLAY]
    assert reader.wanted() == (b11.begin, b12.begin)
    assert reader.take() == [b11, b12, b13]

    # A reset to an earlier acknowledgement, after which clocks are reused.
    b8_again, b9_again, b10_again = write(B, 8, ACK), write(B, 9, CONTINUE), write(B, 10, ACK)
    assert reader.queue(b8_again, b9_again, b10_again) == [
        QueueOutcome.ACK_RESET,
        QueueOutcome.CONTINUE_BEGIN,
        QueueOutcome.ACK_COMMIT_RING,
    ]
    assert reader.take() == [b9_again, b10_again]


def test_the_smallest_ring(journal: Journal) -> None:
    reader, write = Reader(journal, 1), journal.write
    a1, a2, b1 = write(A, 1, CONTINUE), write(A, 2, CONTINUE), write(B, 1, CONTINUE)
    write(A, 1, CONTINUE)
    write(A, 2, CONTINUE)
    a3, b2, b3 = write(A, 3, ACK), write(B, 2, CONTINUE), write(B, 3, ACK)
    assert reader.queue(*journal.messages[:6])[-1] is QueueOutcome.ACK_COMMIT_REPLAY
    assert reader.wanted() == (a1.begin, a3.begin)
    assert reader.take() == [a1, a2, a3]
    assert reader.sequencer.has_pending
    assert reader.queue(b2, b3) == [QueueOutcome.CONTINUE_EXTEND, QueueOutcome.ACK_COMMIT_REPLAY]
    assert reader.wanted() == (b1.begin, b2.begin)
    assert reader.take() == [b1, b2, b3]
    assert not reader.sequencer.has_pending


def test_messages_outside_transactions(journal: Journal) -> None:
    reader, write = Reader(journal, 1), journal.write

    def one(producer: ProducerId, clock: int, flags: int, outcome: QueueOutcome, is_taken: bool) -> None:
        message = write(producer, clock, flags)
        assert reader.queue(message) == [outcome]
        assert reader.take() == ([message] if is_taken else [])
        assert reader.sequencer.read_through(JOURNAL) == message.end

    one(A, 1, OUTSIDE, QueueOutcome.OUTSIDE_COMMIT, True)
    one(A, 2, OUTSIDE, QueueOutcome.OUTSIDE_COMMIT, True)
    one(A, 1, OUTSIDE, QueueOutcome.OUTSIDE_DUPLICATE, False)
    one(A, 2, OUTSIDE, QueueOutcome.OUTSIDE_DUPLICATE, False)
    assert not reader.sequencer.has_pending

    # They drop pending messages, even if their flags are unknown.
    one(A, 3, CONTINUE, QueueOutcome.CONTINUE_BEGIN, False)
    one(A, 4, CONTINUE, QueueOutcome.CONTINUE_EXTEND, False)
    one(A, 5, OUTSIDE, QueueOutcome.OUTSIDE_COMMIT, True)
    one(A, 6, CONTINUE, QueueOutcome.CONTINUE_BEGIN, False)
    one(A, 7, 0x100, QueueOutcome.OUTSIDE_COMMIT, True)
    one(A, 7, 0x100, QueueOutcome.OUTSIDE_DUPLICATE, False)

    # Zero UUIDs are always delivered, and their producer is not tracked.
    one(ZERO_PRODUCER, 0, 0, QueueOutcome.OUTSIDE_COMMIT, True)
    one(ZERO_PRODUCER, 0, 0, QueueOutcome.OUTSIDE_COMMIT, True)
    assert not reader.sequencer.has_pending
    assert reader.source().producers == {A: ProducerState(7)}


def test_states_are_passed_to_another_sequencer(journal: Journal) -> None:
    first, write = Reader(journal, 12), journal.write
    a1, a2, b1, b2 = (write(producer, clock, CONTINUE) for producer, clock in ((A, 1), (A, 2), (B, 1), (B, 2)))
    c1, zero = write(C, 1, ACK), write(ZERO_PRODUCER, 0, 0)
    first.queue(a1, a2, b1, b2, c1)
    assert first.take() == [c1]
    first.queue(zero)
    assert first.take() == [zero]

    assert first.sequencer.has_pending
    sources = first.sequencer.checkpoint()
    assert not first.sequencer.has_pending
    second = Reader(journal, 12, sources)
    expected = {A: ProducerState(0, a1.begin), B: ProducerState(0, b1.begin), C: ProducerState(1)}
    assert second.sequencer.checkpoint() == sources == {JOURNAL: Source(zero.end, expected)}

    # From here both deliver the same messages; the second replays those that the first holds.
    b3 = write(B, 3, ACK)
    assert first.queue(b3) == [QueueOutcome.ACK_COMMIT_RING]
    assert second.queue(b3) == [QueueOutcome.ACK_COMMIT_REPLAY]
    assert second.wanted() == (b1.begin, b3.begin)
    assert first.take() == second.take() == [b1, b2, b3]
    c2, c1_again = write(C, 2, CONTINUE), write(C, 1, ACK)
    for reader in (first, second):
        assert reader.queue(c2, c1_again) == [QueueOutcome.CONTINUE_BEGIN, QueueOutcome.ACK_ROLLBACK]
        assert reader.take() == []
    a3 = write(A, 3, ACK)
    assert first.queue(a3) == [QueueOutcome.ACK_COMMIT_RING]
    assert second.queue(a3) == [QueueOutcome.ACK_COMMIT_REPLAY]
    assert second.wanted() == (a1.begin, a3.begin)
    assert first.take() == second.take() == [a1, a2, a3]


def test_states_are_passed_on_during_a_delivery(journal: Journal) -> None:
    first, write = Reader(journal, 12), journal.write
    a1, a2, a3 = write(A, 1, CONTINUE), write(A, 2, CONTINUE), write(A, 3, ACK)
    assert first.queue(a1, a2, a3)[-1] is QueueOutcome.ACK_COMMIT_RING

    # Nothing is consumed yet. States that are restored and not used do not change.
    sources = Sequencer[JsonObject](first.sequencer.checkpoint()).checkpoint()
    assert sources == {JOURNAL: Source(a2.end, {A: ProducerState(0, a1.begin)})}
    second = Reader(journal, 12, sources)
    assert second.queue(a3) == [QueueOutcome.ACK_COMMIT_REPLAY]
    assert second.wanted() == (a1.begin, a3.begin)
    assert first.take() == second.take() == [a1, a2, a3]

    # The first of two is consumed; the second was delivered and is put back.
    a4, a5, a6 = write(A, 4, CONTINUE), write(A, 5, CONTINUE), write(A, 6, ACK)
    first.queue(a4, a5, a6)
    assert [first.sequencer.step(), first.sequencer.step()] == [a4, a5]
    first.sequencer.put_back()
    sources = Sequencer[JsonObject](first.sequencer.checkpoint()).checkpoint()
    assert sources == {JOURNAL: Source(a5.end, {A: ProducerState(4, a4.end)})}
    second = Reader(journal, 12, sources)
    assert second.queue(a6) == [QueueOutcome.ACK_COMMIT_REPLAY]
    assert second.wanted() == (a4.end, a6.begin)
    assert second.take() == [a5, a6]


def test_duplicates_on_both_sides_of_a_checkpoint(journal: Journal) -> None:
    first, write = Reader(journal, 12), journal.write
    rows = [write(A, clock, CONTINUE) for clock in (1, 2, 3, 1, 2, 3)]
    a4 = write(A, 4, ACK)
    first.queue(*rows[:3])
    second = Reader(journal, 12, first.sequencer.checkpoint())
    assert first.queue(*rows[3:], a4) == [*[QueueOutcome.CONTINUE_CLOCK_LARGER] * 3, QueueOutcome.ACK_COMMIT_RING]
    assert second.queue(*rows[3:], a4) == [*[QueueOutcome.CONTINUE_EXTEND] * 3, QueueOutcome.ACK_COMMIT_REPLAY]
    assert second.wanted() == (rows[0].begin, rows[3].begin)
    assert first.take() == second.take() == [*rows[:3], a4]


def test_pruning_by_horizon(journal: Journal) -> None:
    """Gazette compares with the newest clock of any producer, and loses messages if that clock is ahead."""

    def second(number: int) -> int:
        return number * 10_000_000 << 4

    reader, write = Reader(journal, 12), journal.write
    a, b = write(A, second(10), CONTINUE), write(B, second(19), CONTINUE)
    b_ack, c = write(B, second(20), ACK), write(C, second(30), OUTSIDE)
    reader.queue(a, b, b_ack)
    assert reader.take() == [b, b_ack]
    reader.queue(c)
    assert reader.take() == [c]
    state_a, state_b = ProducerState(second(10) - 1, a.begin), ProducerState(second(20))

    # B is decided and judged by its own clock against the reader's. A's transaction is open and may still commit.
    everything = {A: state_a, B: state_b, C: ProducerState(second(30))}
    for horizon, kept in [(11, everything), (9, {A: state_a, C: everything[C]})]:
        pruning = Pruning(clock_to_ns(second(30)) / 1e9, horizon, distance=1)
        assert reader.sequencer.checkpoint(pruning)[JOURNAL].producers == kept


def _fails(_: Message) -> Message:
    raise Unavailable("the replay broke")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_fails, "the replay broke"),
        (lambda row: row._replace(journal="wrong/journal"), r"message of wrong/journal at \[102, 202\)"),
        (lambda row: row._replace(begin=row.begin - 1), r"at \[101, 202\) is not part of .* \[102, 306\)"),
        (lambda row: row._replace(end=row.end + 110), r"at \[102, 312\) is not part of .* \[102, 306\)"),
    ],
)
def test_failed_replays(journal: Journal, change: Callable[[Message], Message], problem: str) -> None:
    rows = [journal.write(producer, clock, CONTINUE) for producer, clock in ((B, 1), (A, 2), (B, 3))]
    ack = journal.write(A, 4, ACK)
    sequencer: Sequencer[JsonObject] = Sequencer(ring_size=1)
    for row in rows:
        sequencer.queue(row)

    def replay(wanted: ReplayRange) -> Iterator[Message]:
        assert wanted == ReplayRange(JOURNAL, rows[1].begin, ack.begin)
        yield change(rows[1])

    with pytest.raises((InvalidInput, Unavailable), match=problem):
        list(read_committed([ack], sequencer, replay))
    # Nothing was delivered, so a correct replay is still possible.
    reader = Reader(journal, 1)
    reader.sequencer = sequencer
    assert reader.take() == [rows[1], ack]
