"""The intakes of batches and of single messages return the same messages, with interchangeable checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coranto.errors import InvalidInput
from coranto.messages import Envelope, Flags, JsonLines, ProducerId, Source
from coranto_consumers.runtime import column_intake, intake
from coranto_consumers.runtime.column_intake import ColumnIntake
from coranto_consumers.runtime.intake import Intake
from tests.platform.messages.envelope_batches import envelope_batch

JOURNAL = "a/journal"
SIZE = 10
PRODUCERS = [ProducerId(bytes([1, 0, 0, 0, 0, number])) for number in range(3)]


def message(number: int, clock: int, flags: int, producer: int = 0) -> Envelope[Any]:
    """Return the message at position `number` of the journal."""
    return Envelope(JOURNAL, number * SIZE, (number + 1) * SIZE, PRODUCERS[producer], clock, flags, b"{}", JsonLines())


class Consumed(NamedTuple):
    places: list[int]
    checkpoint: dict[str, Source]


def by_message(
    sources: dict[str, Source], history: Sequence[Envelope[Any]], most: int = 1 << 30, ring: int = 1000
) -> Consumed:
    """Consume up to `most` messages one by one, and return the next one to the intake."""
    taken = Intake(sources, ring)
    taken.add(_unread(sources, history))
    places: list[int] = []
    while taken.is_ready:
        envelope = taken.pull()
        if envelope is None:
            if (wanted := taken.replay_range) is not None:
                taken.add_replayed(_between(history, wanted))
                places += _drained(taken.pull)
                taken.end_replay()
            continue
        if envelope.flags != Flags.ACK_TXN or not envelope.clock:
            if len(places) == most:
                taken.put_back(envelope)
                break
            places.append(envelope.begin // SIZE)
    return Consumed(places, taken.checkpoint(None))


def _drained(pull: Callable[[], Envelope[Any] | None]) -> list[int]:
    found = []
    while (envelope := pull()) is not None:
        found.append(envelope.begin // SIZE)
    return found


def by_batch(
    sources: dict[str, Source],
    history: Sequence[Envelope[Any]],
    most: int = 1 << 30,
    ring: int = 1000,
    reads: int = 1000,
) -> Consumed:
    """Consume up to `most` batches, read in pieces of `reads` messages, and return the next one to the intake."""
    taken = ColumnIntake(sources, ring)
    unread = _unread(sources, history)
    arriving = [unread[at : at + reads] for at in range(0, len(unread), reads)]
    places: list[int] = []
    batches = 0
    while True:
        pulled = taken.pull()
        if pulled is not None:
            if batches == most:
                taken.put_back(pulled)
                break
            batches += pulled.rows.num_rows > 0
            places += [offset // SIZE for offset in pulled.rows.column("offset").to_pylist()]
        elif (wanted := taken.replay_range) is not None:
            replayed = _between(history, wanted)
            if (fresh := [each for each in replayed if each.begin >= _replayed_to(taken, wanted.begin)])[:1]:
                taken.add_replayed(envelope_batch(fresh[:reads]))
                _REPLAYED[id(taken)] = fresh[:reads][-1].end
            else:
                _REPLAYED.pop(id(taken), None)
                taken.end_replay()
        elif arriving:
            taken.add(JOURNAL, envelope_batch(arriving.pop(0)))
        else:
            assert not taken.is_ready
            break
    _REPLAYED.pop(id(taken), None)
    return Consumed(places, taken.checkpoint(None))


_REPLAYED: dict[int, int] = {}
"""The offset of a running replay, by intake."""


def _replayed_to(taken: ColumnIntake, begin: int) -> int:
    return _REPLAYED.get(id(taken), begin)


def _unread(sources: dict[str, Source], history: Sequence[Envelope[Any]]) -> list[Envelope[Any]]:
    return [each for each in history if each.begin >= sources.get(JOURNAL, Source()).read_through]


def _between(history: Sequence[Envelope[Any]], wanted: Any) -> list[Envelope[Any]]:
    return [each for each in history if wanted.begin <= each.begin < wanted.end]


@st.composite
def histories(draw: Any) -> list[Envelope[Any]]:
    """Draw any messages of three producers: transactions, duplicates, rollbacks, resets, messages without a UUID."""
    clocks = [1, 1, 1]
    history = []
    for number in range(draw(st.integers(1, 40))):
        producer = draw(st.integers(0, 2))
        flags = draw(st.sampled_from([Flags.CONTINUE_TXN] * 5 + [Flags.ACK_TXN] * 2 + [Flags.OUTSIDE_TXN]))
        by = draw(st.sampled_from([1, 1, 1, 1, 2, 0, -1, -3]))
        clock = max(1, clocks[producer] + by) if draw(st.integers(0, 19)) else 0
        clocks[producer] = max(clock, 1)
        history.append(message(number, clock, flags, producer))
    return history


@given(histories(), st.integers(1, 12), st.sampled_from([1, 3, 1000]), st.sampled_from([1, 4, 1 << 16]))
def test_batches_contain_the_same_messages_as_single_reads(history, reads, ring, max_rows):
    expected = by_message({}, history)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_intake, "MAX_ROWS", max_rows)
        found = by_batch({}, history, ring=ring, reads=reads)
    assert found.places == expected.places
    states = {producer: (state.last_ack, state.begin) for producer, state in _producers(found).items()}
    assert states == {producer: (state.last_ack, state.begin) for producer, state in _producers(expected).items()}
    assert found.checkpoint.get(JOURNAL, Source()).read_through == expected.checkpoint[JOURNAL].read_through


@given(
    histories(), st.integers(1, 12), st.sampled_from([1, 3, 1000]), st.sampled_from([1, 4, 1 << 16]), st.integers(0, 8)
)
def test_a_restart_from_a_checkpoint_reads_exactly_the_remaining_messages(history, reads, ring, max_rows, consumed):
    """The restart may be inside an acknowledged set, and may switch between batches and single messages."""
    everything = by_message({}, history).places
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_intake, "MAX_ROWS", max_rows)
        first = by_batch({}, history, consumed, ring, reads)
        assert first.places == everything[: len(first.places)]
        rest = sorted(everything[len(first.places) :])
        assert sorted(by_batch(first.checkpoint, history, ring=ring, reads=reads).places) == rest
        assert sorted(by_message(first.checkpoint, history).places) == rest
        one = by_message({}, history, consumed)
        assert sorted(by_batch(one.checkpoint, history, ring=ring, reads=reads).places) == sorted(
            everything[len(one.places) :]
        )


def _producers(consumed: Consumed) -> Any:
    return consumed.checkpoint.get(JOURNAL, Source()).producers


def test_a_replay_can_end_only_after_all_its_messages_were_pulled():
    taken = ColumnIntake({}, 1)
    history = [message(0, 1, Flags.CONTINUE_TXN), message(1, 2, Flags.CONTINUE_TXN), message(2, 2, Flags.ACK_TXN)]
    for each in history:
        taken.add(JOURNAL, envelope_batch([each]))
        while taken.pull() is not None:
            pass
    wanted = taken.replay_range
    assert wanted is not None
    taken.add_replayed(envelope_batch(history[:2]))
    with pytest.raises(InvalidInput, match="1 replayed batches"):
        taken.end_replay()


def test_messages_without_a_commit_count_as_skipped():
    taken = ColumnIntake({JOURNAL: Source(0, {})})
    taken.add(JOURNAL, envelope_batch([message(0, 5, Flags.OUTSIDE_TXN)]))
    assert taken.pull() is not None
    assert taken.pull() is None
    taken.add(JOURNAL, envelope_batch([message(1, 5, Flags.OUTSIDE_TXN), message(2, 7, Flags.CONTINUE_TXN)]))

    assert taken.pull() is None
    assert taken.skipped_ends == {JOURNAL: 2 * SIZE}
    assert taken.has_pending
    taken.add(JOURNAL, envelope_batch([message(3, 4, Flags.ACK_TXN)]))
    assert taken.pull() is None
    assert taken.skipped_ends == {JOURNAL: 4 * SIZE}
    assert taken.resets == 1
    assert not taken.has_pending


def test_too_many_producers_are_refused(monkeypatch):
    monkeypatch.setattr(intake, "MAX_PRODUCERS", 2)
    taken = ColumnIntake({})
    taken.add(JOURNAL, envelope_batch([message(number, 1, Flags.OUTSIDE_TXN, number) for number in range(3)]))
    with pytest.raises(InvalidInput, match="more than 2 producers"):
        taken.pull()
