"""The sequencer by example: returned messages, several journals, invalid calls, pruning.

`test_gazette_cases.py` has its outcomes and replays, and `test_sequencing_rules.py` its rules over random histories.
"""

from __future__ import annotations

import tracemalloc

import pytest

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import ProducerState, Source
from coranto.messages.framing import Envelope, JsonLines, JsonObject
from coranto.messages.pruning import Pruning
from coranto.messages.sequencer import QueueOutcome, ReplayRange, Sequencer, read_committed
from coranto.messages.uuids import Flags, ProducerId, clock_from_ns, clock_to_ns

A = ProducerId(b"\x01AAAAA")
B = ProducerId(b"\x01BBBBB")
LINES = JsonLines()
CONTINUE, ACK, OUTSIDE = Flags.CONTINUE_TXN, Flags.ACK_TXN, Flags.OUTSIDE_TXN


class Feed:
    """Messages of ten bytes each, appended to a journal."""

    def __init__(self, journal: str = "j", sequencer: Sequencer[JsonObject] | None = None, ring_size: int = 5) -> None:
        self.journal = journal
        self.sequencer = sequencer or Sequencer[JsonObject](ring_size=ring_size)
        self.rows: list[Envelope[JsonObject]] = []

    def queue(self, producer: ProducerId, clock: int, flags: int) -> QueueOutcome:
        begin = 10 * len(self.rows)
        self.rows.append(Envelope(self.journal, begin, begin + 10, producer, clock, flags, b"{}", LINES))
        return self.sequencer.queue(self.rows[-1])

    def replay(self, wanted: ReplayRange) -> list[Envelope[JsonObject]]:
        return [row for row in self.rows if wanted.begin <= row.begin and row.end <= wanted.end]

    def drain(self) -> list[int]:
        """Return the clocks of delivered messages, including replays."""
        read = []
        wanted = self.sequencer.replay_range
        if wanted is not None:
            read += [row.clock for row in self.replay(wanted) if self.sequencer.replay(row)]
            self.sequencer.end_replay()
        while (message := self.sequencer.step()) is not None:
            read.append(message.clock)
        return read

    def state(self, producer: ProducerId) -> ProducerState:
        return self.sequencer.checkpoint()[self.journal].producers[producer]


@pytest.mark.parametrize("ring_size", [1, 2, 8])
def test_a_repeated_message_is_dropped_in_the_ring_and_in_a_replay(ring_size: int) -> None:
    feed = Feed(ring_size=ring_size)
    feed.queue(A, 8, OUTSIDE)
    feed.drain()
    assert feed.queue(A, 4, ACK) is QueueOutcome.ACK_RESET
    for clock in (5, 9, 6, 10):  # 6 was decided before the reset and comes after 9, so it is a duplicate.
        feed.queue(A, clock, CONTINUE)
    feed.queue(A, 7, ACK)
    assert feed.drain() == [5, 7]


def test_a_repeated_message_after_a_restored_checkpoint_is_dropped() -> None:
    feed = Feed()
    feed.queue(A, 5, CONTINUE)
    feed.queue(A, 9, CONTINUE)
    feed.sequencer = Sequencer[JsonObject](feed.sequencer.checkpoint())
    assert feed.queue(A, 6, CONTINUE) is QueueOutcome.CONTINUE_EXTEND
    feed.queue(A, 7, ACK)
    assert feed.sequencer.replay_range == ReplayRange("j", 0, 20)
    assert feed.drain() == [5, 7]


def test_is_delivering_is_false_where_a_consumer_transaction_may_end() -> None:
    feed = Feed()
    feed.queue(A, 1, CONTINUE)
    assert not feed.sequencer.is_delivering
    feed.queue(A, 2, ACK)
    assert feed.sequencer.is_delivering
    feed.sequencer.step()
    assert feed.sequencer.is_delivering
    assert feed.drain() == [2]
    assert not feed.sequencer.is_delivering


def test_only_the_last_delivered_message_can_be_put_back() -> None:
    feed = Feed()
    with pytest.raises(InvalidInput, match="nothing to put back"):
        feed.sequencer.put_back()
    feed.queue(A, 1, CONTINUE)
    feed.queue(A, 2, CONTINUE)
    feed.queue(A, 3, ACK)
    feed.sequencer.step()
    feed.sequencer.step()
    feed.sequencer.put_back()
    with pytest.raises(InvalidInput, match="nothing to put back"):
        feed.sequencer.put_back()
    assert feed.state(A) == ProducerState(1, 10)
    assert feed.drain() == [2, 3]
    feed.sequencer.put_back()  # The acknowledgement itself.
    assert feed.sequencer.checkpoint() == {"j": Source(20, {A: ProducerState(2, 20)})}
    assert feed.drain() == [3]
    assert feed.sequencer.checkpoint() == {"j": Source(30, {A: ProducerState(3)})}
    with pytest.raises(InvalidInput, match="nothing to put back"):
        feed.sequencer.put_back()


def test_the_last_replayed_message_can_be_put_back_after_the_replay() -> None:
    feed = Feed(ring_size=1)
    for clock in (1, 2, 3):
        feed.queue(A, clock, CONTINUE)
    feed.queue(A, 4, ACK)
    assert [feed.sequencer.replay(row) for row in feed.rows[:2]] == [True, True]
    feed.sequencer.end_replay()
    feed.sequencer.put_back()
    assert feed.state(A) == ProducerState(1, 10)
    assert feed.drain() == [2, 3, 4]


def test_a_checkpoint_during_a_delivery_keeps_its_producer_at_any_age() -> None:
    feed = Feed()
    feed.queue(B, hours(30), OUTSIDE)
    feed.drain()
    feed.queue(A, hours(1), CONTINUE)
    feed.queue(A, hours(1) + 1, CONTINUE)
    feed.queue(A, hours(1) + 2, ACK)
    feed.sequencer.step()
    sources = feed.sequencer.checkpoint(pruning(30))
    restored = Sequencer[JsonObject](sources)
    rest = read_committed(feed.rows[3:], restored, feed.replay)
    assert [message.clock for message in rest] == [hours(1) + 1]


def test_invalid_calls_are_refused() -> None:
    feed = Feed(ring_size=1)
    feed.queue(A, 1, CONTINUE)
    with pytest.raises(InvalidInput, match="no replay is needed"):
        feed.sequencer.replay(feed.rows[0])
    feed.queue(A, 2, CONTINUE)
    feed.queue(A, 3, ACK)
    with pytest.raises(InvalidInput, match="committed messages remain"):
        feed.sequencer.queue(feed.rows[2])
    with pytest.raises(InvalidInput, match="replay the content of replay_range"):
        feed.sequencer.step()
    with pytest.raises(InvalidInput, match=r"not part of the replay of j at \[0, 10\)"):
        feed.sequencer.replay(feed.rows[1])
    with pytest.raises(InvalidInput, match="of k at"):
        feed.sequencer.replay(feed.rows[0]._replace(journal="k"))
    assert feed.drain() == [1, 2, 3]
    with pytest.raises(InvalidInput, match="queued before; continue from offset 30"):
        feed.sequencer.queue(feed.rows[2])
    with pytest.raises(InvalidInput, match="ring of 0 messages"):
        Sequencer(ring_size=0)


def test_journals_are_sequenced_separately_with_a_shared_ring() -> None:
    shared = Sequencer[JsonObject](ring_size=2)
    left, right = Feed("left", shared), Feed("right", shared)
    left.queue(A, 1, CONTINUE)
    right.queue(A, 5, CONTINUE)
    right.queue(A, 6, CONTINUE)
    assert left.queue(A, 2, ACK) is QueueOutcome.ACK_COMMIT_REPLAY
    assert left.drain() == [1, 2]
    assert right.queue(A, 7, ACK) is QueueOutcome.ACK_COMMIT_RING
    assert right.drain() == [5, 6, 7]
    assert shared.read_through("left") == 20
    assert shared.read_through("right") == 30
    assert shared.read_through("unknown") == 0


def test_has_pending_hints_at_transactions_begun_since_the_last_checkpoint() -> None:
    feed = Feed()
    assert not feed.sequencer.has_pending
    feed.queue(A, 1, CONTINUE)
    assert feed.sequencer.has_pending
    feed.queue(A, 2, ACK)
    feed.drain()
    assert not feed.sequencer.has_pending
    feed.queue(B, 1, CONTINUE)
    feed.sequencer.checkpoint()
    assert not feed.sequencer.has_pending
    feed.queue(A, 3, CONTINUE)
    feed.queue(A, 2, ACK)
    assert not feed.sequencer.has_pending


def hours(count: float) -> int:
    return clock_from_ns(int(10**18 + count * 3600 * 10**9))


def pruning(hour: float, distance: int = 5) -> Pruning:
    return Pruning(clock_to_ns(hours(hour)) / 1e9, distance=distance)


def test_silent_producers_are_pruned() -> None:
    feed = Feed()
    feed.queue(A, hours(0), OUTSIDE)
    feed.drain()
    feed.queue(B, hours(30), OUTSIDE)
    feed.drain()
    assert set(feed.sequencer.checkpoint()["j"].producers) == {A, B}
    assert set(feed.sequencer.checkpoint(pruning(30, distance=100))["j"].producers) == {A, B}
    assert set(feed.sequencer.checkpoint(pruning(23))["j"].producers) == {A, B}
    assert set(feed.sequencer.checkpoint(pruning(30))["j"].producers) == {B}
    assert feed.queue(A, hours(0), OUTSIDE) is QueueOutcome.OUTSIDE_COMMIT


def test_open_transactions_are_not_pruned_while_they_may_commit() -> None:
    feed = Feed()
    feed.queue(A, hours(0), CONTINUE)
    feed.queue(B, hours(30), OUTSIDE)
    feed.drain()
    sources = feed.sequencer.checkpoint(pruning(30))
    assert set(sources["j"].producers) == {A, B}
    restored = Feed(sequencer=Sequencer({"j": sources["j"]}))
    restored.rows = feed.rows
    assert set(restored.sequencer.checkpoint(pruning(900))["j"].producers) == {A, B}
    restored.queue(A, hours(31), ACK)
    assert restored.drain() == [hours(0), hours(31)]


def test_read_committed_omits_acknowledgements() -> None:
    feed = Feed()
    feed.rows = [
        Envelope("j", 10 * number, 10 * number + 10, A, clock, flags, b"{}", LINES)
        for number, (clock, flags) in enumerate([(1, CONTINUE), (2, ACK), (3, OUTSIDE), (0, ACK), (4, ACK)])
    ]
    sequencer = Sequencer[JsonObject]()
    assert [message.begin for message in read_committed(feed.rows, sequencer, feed.replay)] == [0, 20, 30]


def test_a_producer_without_pending_messages_takes_little_memory() -> None:
    """Transactions over several keys have a producer each, and producers are kept for a day."""

    def memory_of(count: int) -> int:
        """Return the memory in bytes of a sequencer that has seen `count` producers."""
        tracemalloc.start()
        try:
            sequencer = Sequencer[JsonObject]()
            for number in range(count):
                producer = ProducerId(number.to_bytes(6))
                for row, flags in enumerate((CONTINUE, ACK)):
                    begin = 20 * number + 10 * row
                    sequencer.queue(Envelope("j", begin, begin + 10, producer, 100 + row, flags, b"{}", LINES))
                while sequencer.step() is not None:
                    pass
            del sequencer._ring  # The ring has a separate bound.
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert (memory_of(2000) - memory_of(1000)) / 1000 < 500
