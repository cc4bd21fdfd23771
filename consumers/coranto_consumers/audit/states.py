"""Comparison of a checkpoint's producer states with a replay's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from coranto.messages import ProducerId, ProducerState, Source
from coranto.messages.pruning import DEFAULT_PRUNE_DISTANCE
from coranto_consumers.audit.replay import Replayed


@dataclass(frozen=True, slots=True)
class Difference:
    """A producer whose state in the checkpoint differs from the replay's."""

    producer: ProducerId
    problem: str

    def __str__(self) -> str:
        return f"producer {self.producer.hex()}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison."""

    differences: Sequence[Difference] = ()
    unproven: int = 0
    """The number of producers that could not be compared: their content is gone, or their states may be pruned."""
    beginnings_gone: dict[ProducerId, int] = field(default_factory=dict)
    """The begin offsets of open transactions whose first messages are gone, by producer."""


def compare(expected: Source, replayed: Replayed, *, complete: bool, first_offset: int) -> Comparison:
    """Compare a checkpoint's source with its replay.

    `complete` is True if the replay began where the consumer began, or at a proven state. Otherwise, and after gaps,
    earlier messages are unknown, and the replay only has the states of producers with a later acknowledgement.
    `first_offset` is the begin offset of the journal's content.
    """
    differences: list[Difference] = []
    gone: dict[ProducerId, int] = {}
    unproven = 0
    is_exhaustive = complete and not replayed.gaps
    horizon = max([0 if complete else replayed.begin, *(end for _, end in replayed.gaps)])
    found = replayed.source.producers
    for producer, state in sorted(expected.producers.items()):
        if state.is_pending and state.begin < first_offset:
            gone[producer] = state.begin
        same = found.get(producer)
        problem = _impossible(state, expected.read_through)
        if problem is None and producer in replayed.returned:
            unproven += 1
        elif problem is None and same is None:
            if is_exhaustive or state.seen_through > horizon:
                problem = "the checkpoint knows it, and the journal has no message of it there"
            else:
                unproven += 1
        elif problem is None and same is not None:
            if is_exhaustive or producer in replayed.acknowledged:
                problem = _difference(state, same)
            else:
                unproven += 1
            if problem is None and 0 < state.seen_through < same.seen_through:
                problem = f"it was last seen through {same.seen_through}, the checkpoint says {state.seen_through}"
        if problem is not None:
            differences.append(Difference(producer, problem))
    for producer, state in sorted(found.items()):
        if producer not in expected.producers and not _may_be_forgotten(state, expected.read_through, first_offset):
            problem = f"the checkpoint does not know it, and the journal has its messages up to {state.seen_through}"
            differences.append(Difference(producer, problem))
    return Comparison(differences, unproven, gone)


def _impossible(state: ProducerState, read_through: int) -> str | None:
    if state.begin > read_through:
        return f"its open transaction begins at {state.begin}, above the checkpoint's own offset {read_through}"
    return None


def _difference(state: ProducerState, replayed: ProducerState) -> str | None:
    if state.last_ack != replayed.last_ack:
        return f"it is decided up to clock {replayed.last_ack}, the checkpoint says {state.last_ack}"
    if state.begin != replayed.begin:
        return f"its open transaction begins at {replayed.begin}, the checkpoint says {state.begin} (-1 is none)"
    return None


def _may_be_forgotten(state: ProducerState, read_through: int, first_offset: int) -> bool:
    """Return True if pruning may have removed a producer from the checkpoint."""
    if read_through - state.seen_through < DEFAULT_PRUNE_DISTANCE:
        return False
    return not (state.is_pending and state.seen_through > first_offset)
