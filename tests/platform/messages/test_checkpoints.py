"""The wire format of checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import CorruptData
from coranto.messages.checkpoints import Checkpoint, Identity, ProducerState, Source, SourceReset
from coranto.messages.uuids import ProducerId
from coranto.wire import consumer_pb2

A = ProducerId(bytes.fromhex("010203040506"))
B = ProducerId(bytes.fromhex("aabbccddeeff"))

# Bytes written by another Gazette implementation, with producers in the former form, a map keyed by text.
UPSTREAM = bytes.fromhex(
    "0a210a03626172121a08de0112150a06aabbccddeeff120b091503000000000000"
    "10650a210a03666f6f121a086f12160a06010203040506120c09c801000000000000"
    "10950612 0d0a0362617a1206696e74656e7412140a0462696e67120c6f746865722d696e74656e74"
)

FIXTURE = Checkpoint(
    sources={"foo": Source(111, {A: ProducerState(456, 789)}), "bar": Source(222, {B: ProducerState(789, 101)})},
    ack_intents={"baz": b"intent", "bing": b"other-intent"},
)


def test_the_upstream_fixture_round_trips() -> None:
    assert Checkpoint.from_bytes(UPSTREAM) == FIXTURE
    assert Checkpoint.from_bytes(FIXTURE.to_bytes()) == FIXTURE
    assert len(FIXTURE.to_bytes()) == len(UPSTREAM)


states = st.builds(ProducerState, st.integers(0, 2**64 - 1), st.integers(-1, 2**62), st.integers(0, 2**62))
sources = st.builds(
    Source, st.integers(0, 2**62), st.dictionaries(st.binary(min_size=6, max_size=6).map(ProducerId), states)
)


@given(st.dictionaries(st.text(), sources, max_size=3), st.dictionaries(st.text(), st.binary(), max_size=3))
def test_checkpoints_round_trip(journals: dict[str, Source], intents: dict[str, bytes]) -> None:
    checkpoint = Checkpoint(journals, intents)
    assert Checkpoint.from_bytes(checkpoint.to_bytes()) == checkpoint
    assert Checkpoint.from_bytes(checkpoint.to_bytes()).to_bytes() == checkpoint.to_bytes()
    reordered = Checkpoint(dict(reversed(journals.items())), dict(reversed(intents.items())))
    assert reordered.to_bytes() == checkpoint.to_bytes()


def test_an_empty_checkpoint_means_a_new_consumer() -> None:
    assert Checkpoint.from_bytes(b"") == Checkpoint()


def test_invalid_checkpoints_are_corrupt() -> None:
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


def test_resets_round_trip_and_describe_themselves() -> None:
    back, forward = SourceReset("a", 20, 5, 3, 1_795_845_600.0), SourceReset("b", 5, 20, 3, 1_795_845_600.0)
    made = Checkpoint(identity=Identity(resets=(back, forward)))
    assert Checkpoint.from_bytes(made.to_bytes()) == made
    assert str(back) == "a was reset from 20 to 5 at 2026-11-28T06:00:00+00:00: [5, 20) is repeated"
    assert str(forward).endswith("[5, 20) is omitted")
    assert str(SourceReset("c", -1, 0, 3, 0.0)).endswith("to 0, from an earlier journal with that name")


@pytest.mark.parametrize(
    "reset",
    [
        SourceReset("a", -2, 0, 1, 0.0),
        SourceReset("a", 0, -1, 1, 0.0),
        SourceReset("a", 0, 0, -1, 0.0),
        SourceReset("a", 0, 0, 1, float("nan")),
        SourceReset("a", 0, 0, 1, 1e300),
    ],
)
def test_impossible_resets_are_corrupt(reset: SourceReset) -> None:
    with pytest.raises(CorruptData, match="checkpoint: a reset of a"):
        Checkpoint.from_bytes(Checkpoint(identity=Identity(resets=(reset,))).to_bytes())


def test_replay_begins_at_the_earliest_pending_message() -> None:
    assert Source(100).replay_from == 100
    assert Source(100, {A: ProducerState(1), B: ProducerState(1, 70)}).replay_from == 70


def test_offsets_of_producers_are_stored_next_to_gazettes_fields() -> None:
    state = ProducerState(7, 40, seen_through=60)
    wire = Checkpoint({"j": Source(100, {A: state})}).to_wire()
    assert Checkpoint.from_wire(wire).sources["j"].producers[A].seen_through == 60
    # Gazette ignores unknown fields. Its own checkpoints have none of them.
    wire.sources["j"].producers[0].state.ClearField("seen_through")
    restored = Checkpoint.from_wire(wire).sources["j"]
    assert restored.producers[A] == state
    assert restored.producers[A].seen_through == 0
    assert restored.seen_producers[A].seen_through == 100, "no message read so far ends after the position"
    wire.sources["j"].producers[0].state.seen_through = -1
    with pytest.raises(CorruptData, match="seen through -1"):
        Checkpoint.from_wire(wire)
