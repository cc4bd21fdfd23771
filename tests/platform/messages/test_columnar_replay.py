"""The rows that an acknowledgement commits are those that the message sequencer replays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages import Envelope, Flags, JsonLines, ProducerId, ReplayRange, Sequencer, Source
from coranto.messages.checkpoints import ProducerState
from coranto.messages.columnar_replay import ReplayedRows
from tests.platform.messages.envelope_batches import envelope_batch

PRODUCERS = [ProducerId(bytes([1, 0, 0, 0, 0, number])) for number in range(2)]
PLACES = st.tuples(st.integers(0, 1), st.integers(0, 12), st.sampled_from(list(Flags)[:2]))


@given(st.lists(PLACES, min_size=1, max_size=25), st.integers(1, 12), st.integers(0, 5), st.integers(1, 25))
def test_committed_rows_are_those_the_message_sequencer_replays(history, clock, last_ack, piece):
    messages = [
        Envelope("j", at * 10, at * 10 + 10, PRODUCERS[producer], number, flags, b"{}", JsonLines())
        for at, (producer, number, flags) in enumerate(history)
    ]
    end = len(messages) * 10
    state = ProducerState(last_ack, 0)
    clock = max(clock, last_ack + 1)
    sequencer = Sequencer({"j": Source(end, {PRODUCERS[0]: state})})
    sequencer.queue(Envelope("j", end, end + 10, PRODUCERS[0], clock, Flags.ACK_TXN, b"{}", JsonLines()))
    expected = [each.begin for each in messages if sequencer.replay(each)]

    replayed = ReplayedRows(ReplayRange("j", 0, end), PRODUCERS[0], state, clock)
    found = []
    for at in range(0, len(messages), piece):
        found += replayed.committed(envelope_batch(messages[at : at + piece])).column("offset").to_pylist()
    assert found == expected


def test_rows_outside_the_replay_are_refused():
    replayed = ReplayedRows(ReplayRange("j", 0, 10), PRODUCERS[0], ProducerState(1, 0), 5)
    beyond = Envelope("j", 10, 20, PRODUCERS[0], 3, Flags.CONTINUE_TXN, b"{}", JsonLines())
    with pytest.raises(InvalidInput, match="not part of the replay of j"):
        replayed.committed(envelope_batch([beyond]))
