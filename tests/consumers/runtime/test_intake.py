"""The intake: committed messages in order, replays in pieces, and returned messages."""

from __future__ import annotations

import os

import pytest

from coranto.errors import InvalidInput
from coranto.messages import Envelope, Flags, JsonLines, Source, new_producer_id
from coranto_consumers.runtime.intake import Intake

PRODUCER = new_producer_id(os.urandom)
OTHER = new_producer_id(os.urandom)
SIZE = 10


def message(number: int, clock: int, flags: int, producer: bytes = PRODUCER) -> Envelope:
    """Return the message at position `number` of the journal."""
    return Envelope("a/journal", number * SIZE, (number + 1) * SIZE, producer, clock, flags, b"{}", JsonLines())


def content(number: int, clock: int, producer: bytes = PRODUCER) -> Envelope:
    return message(number, clock, Flags.CONTINUE_TXN, producer)


def ack(number: int, clock: int, producer: bytes = PRODUCER) -> Envelope:
    return message(number, clock, Flags.ACK_TXN, producer)


def pulled(intake: Intake) -> list[int]:
    """Return the positions of the messages that can be pulled now."""
    places = []
    while (envelope := intake.pull()) is not None:
        places.append(envelope.begin // SIZE)
    return places


def test_messages_can_be_pulled_once_they_are_committed():
    intake = Intake({})
    intake.add([content(0, 1), content(1, 5, OTHER), content(2, 2)])

    assert intake.is_ready
    assert pulled(intake) == []
    assert intake.has_pending
    assert not intake.is_ready
    intake.add([ack(3, 2), message(4, 9, Flags.OUTSIDE_TXN)])
    assert pulled(intake) == [0, 2, 3, 4]
    assert intake.read_through("a/journal") == 5 * SIZE


def test_messages_dropped_from_the_ring_are_replayed_in_pieces():
    intake = Intake({}, ring_size=1)
    intake.add([content(0, 1), content(1, 2), content(2, 3), ack(3, 3)])

    assert pulled(intake) == []
    assert intake.is_ready
    assert intake.replay_range == ("a/journal", 0, 2 * SIZE)
    intake.add_replayed([content(0, 1)])
    assert pulled(intake) == [0]
    intake.add_replayed([content(1, 2)])
    assert intake.replay_range is None
    assert pulled(intake) == [1]
    intake.end_replay()
    assert pulled(intake) == [2, 3]


def test_a_replay_can_end_only_after_all_its_messages_were_pulled():
    intake = Intake({}, ring_size=1)
    intake.add([content(0, 1), content(1, 2), ack(2, 2)])
    assert pulled(intake) == []
    intake.add_replayed([content(0, 1)])

    with pytest.raises(InvalidInput, match="1 replayed messages"):
        intake.end_replay()


@pytest.mark.parametrize("ring_size", [1, 100])
@pytest.mark.parametrize("consumed", range(3))
def test_a_returned_message_is_pulled_again_and_not_in_the_checkpoint(ring_size, consumed):
    """After the deferred message at position `consumed`, reading continues with it, here and after a restart."""
    history = [content(0, 1), content(1, 2), content(2, 3), ack(3, 3)]

    def drive(intake: Intake, until: int | None) -> list[int]:
        """Consume up to a position, with the requested replays, and return that message."""
        found: list[int] = []
        while True:
            envelope = intake.pull()
            if envelope is not None and envelope.begin // SIZE == until:
                intake.put_back(envelope)
                return found
            if envelope is not None:
                found.append(envelope.begin // SIZE)
            elif (wanted := intake.replay_range) is not None and found[-1:] != [wanted.end // SIZE - 1]:
                intake.add_replayed([each for each in history if wanted.begin <= each.begin < wanted.end])
            elif wanted is not None:
                intake.end_replay()
            else:
                return found

    intake = Intake({}, ring_size)
    intake.add(history)
    assert drive(intake, consumed) == list(range(consumed))
    checkpoint = intake.checkpoint(0)

    assert drive(intake, None) == list(range(consumed, 4))
    restored = Intake(checkpoint, ring_size)
    restored.add([each for each in history if each.begin >= checkpoint["a/journal"].read_through])
    assert drive(restored, None) == list(range(consumed, 4))


def test_messages_without_a_commit_count_as_skipped():
    intake = Intake({"a/journal": Source(0, {})})
    intake.add([message(0, 5, Flags.OUTSIDE_TXN), message(1, 5, Flags.OUTSIDE_TXN), ack(2, 5), ack(3, 4)])

    assert pulled(intake) == [0]
    assert intake.skipped_ends == {"a/journal": 4 * SIZE}
    assert intake.resets == 1
