"""Offsets of a query: the number of listed producers, and their pruning."""

import pytest

from coranto.messages.checkpoints import ProducerState
from coranto.messages.uuids import ProducerId
from coranto_consumers.spark.streaming.offsets import MAX_RESCAN, Position, begin_of, bounded


def producers(count: int) -> list[ProducerId]:
    return [ProducerId(bytes([1, 0, 0, 0, 0, n])) for n in range(count)]


def test_the_least_recently_decided_producers_are_listed_and_others_rescanned():
    one, two, three = producers(3)
    states = {one: ProducerState(1), two: ProducerState(2, 150), three: ProducerState(3)}

    shown, others, rescan = bounded(states, {one: 300, two: 100, three: 200}, 1000, 1)

    assert (set(shown), set(others), rescan) == ({two}, {one, three}, 200)


def test_unlisted_idle_producers_are_forgotten_but_never_open_transactions():
    one, two, three = producers(3)
    states = {one: ProducerState(1), two: ProducerState(2, 150), three: ProducerState(3)}

    shown, others, rescan = bounded(states, {one: 300, two: 301, three: 302}, MAX_RESCAN + 5000, 0)

    assert (shown, set(others), rescan) == ({}, {two}, 301)


def test_producers_with_an_unknown_last_decision_stay_listed():
    one, two, _ = producers(3)

    shown, others, rescan = bounded({one: ProducerState(1), two: ProducerState(2)}, {two: 5}, 10, 0)

    assert (set(shown), set(others), rescan) == ({one}, {two}, 5)


@pytest.mark.parametrize(
    ("begun", "ended", "begin"),
    [
        (Position(5), Position(9), 5),
        (Position(9), Position(9), 9),
        (None, Position(9, since=3), 3),
        (Position(7), Position(9, since=3), 3),  # `latest` was 3 when the batch was planned, and is 7 now.
        (Position(12), Position(9), 9),
        (None, Position(9), 9),
        (Position(9, 4, since=3), Position(9, 4, since=3), 9),
    ],
)
def test_a_batch_begins_at_its_originally_planned_position(begun, ended, begin):
    assert begin_of(begun, ended) == begin
