"""Checkpoints on the wire, and the pruning of silent producers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptData, InvalidInput
from coranto.messages.checkpoints import Checkpoint, ProducerState, Source, prune
from coranto.messages.uuids import ProducerId, clock_from_ns
from coranto.wire import consumer_pb2

A = ProducerId(bytes.fromhex("010203040506"))
B = ProducerId(bytes.fromhex("aabbccddeeff"))
HOUR_NS = 3600 * 10**9

# Bytes that another Gazette implementation wrote, with producers in its former form, a map keyed by text.
UPSTREAM = bytes.fromhex(
    "0a210a03626172121a08de0112150a06aabbccddeeff120b091503000000000000"
    "10650a210a03666f6f121a086f12160a06010203040506120c09c801000000000000"
    "10950612 0d0a0362617a1206696e74656e7412140a0462696e67120c6f746865722d696e74656e74"
)

FIXTURE = Checkpoint(
    sources={"foo": Source(111, {A: ProducerState(456, 789)}), "bar": Source(222, {B: ProducerState(789, 101)})},
    ack_intents={"baz": b"intent", "bing": b"other-intent"},
)


def test_the_upstream_fixture_is_read_and_written_alike() -> None:
    assert Checkpoint.from_bytes(UPSTREAM) == FIXTURE
    assert Checkpoint.from_bytes(FIXTURE.to_bytes()) == FIXTURE
    assert len(FIXTURE.to_bytes()) == len(UPSTREAM)


states = st.builds(ProducerState, st.integers(0, 2**64 - 1), st.integers(-1, 2**62))
sources = st.builds(
    Source, st.integers(0, 2**62), st.dictionaries(st.binary(min_size=6, max_size=6).map(ProducerId), states)
)


@given(st.dictionaries(st.text(), sources, max_size=3), st.dictionaries(st.text(), st.binary(), max_size=3))
def test_checkpoints_survive_the_wire(journals: dict[str, Source], intents: dict[str, bytes]) -> None:
    checkpoint = Checkpoint(journals, intents)
    assert Checkpoint.from_bytes(checkpoint.to_bytes()) == checkpoint
    reordered = Checkpoint(dict(reversed(journals.items())), dict(reversed(intents.items())))
    assert reordered.to_bytes() == checkpoint.to_bytes()


def test_an_empty_checkpoint_is_a_new_consumer() -> None:
    assert Checkpoint.from_bytes(b"") == Checkpoint()


def test_what_no_checkpoint_holds_is_corrupt() -> None:
    with pytest.raises(CorruptData, match="not a serialised checkpoint"):
        Checkpoint.from_bytes(b"\xff\xff")
    wire = consumer_pb2.Checkpoint()
    wire.sources["j"].producers.add(id=b"short")
    with pytest.raises(CorruptData, match="has 5 bytes, not 6"):
        Checkpoint.from_wire(wire)
    wire = consumer_pb2.Checkpoint()
    wire.sources["j"].producers.add(id=A).state.begin = -2
    with pytest.raises(CorruptData, match="begins at -2"):
        Checkpoint.from_wire(wire)
    wire = consumer_pb2.Checkpoint()
    wire.sources["j"].read_through = -5
    with pytest.raises(CorruptData, match="offset -5"):
        Checkpoint.from_wire(wire)


def test_replay_begins_at_the_earliest_pending_message() -> None:
    assert Source(100).replay_from == 100
    assert Source(100, {A: ProducerState(1), B: ProducerState(1, 70)}).replay_from == 70


def hours(count: float) -> int:
    return clock_from_ns(int(1_000_000 * HOUR_NS + count * HOUR_NS))


def test_silent_producers_are_pruned_by_the_journals_own_clock() -> None:
    recent, silent = ProducerState(hours(30)), ProducerState(hours(5))
    assert prune({A: recent, B: silent}) == {A: recent}
    assert prune({A: recent, B: silent}, 0) == {A: recent, B: silent}
    assert prune({A: recent, B: silent}, 26 * 3600) == {A: recent, B: silent}
    assert prune({}) == {}
    with pytest.raises(InvalidInput):
        prune({}, -1)


def test_pruning_never_forgets_a_transaction_that_may_be_recent() -> None:
    recent = ProducerState(hours(30))
    active = ProducerState(hours(1), 500, newest=hours(29))
    unknown = ProducerState(hours(1), 500)
    abandoned = ProducerState(hours(1), 500, newest=hours(2))
    assert B in prune({A: recent, B: active})
    assert B in prune({A: recent, B: unknown})
    assert B not in prune({A: recent, B: abandoned})
