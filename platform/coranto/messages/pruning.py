"""Pruning: the rule for forgetting producers, which all sequencers share.

A reader remembers each producer of a journal, to detect duplicates and to track open transactions. It cannot remember
all producers forever. The decision depends only on the producer itself: on the difference between its clock and the
reader's, and on the bytes of the journal read since its last message. The clock of one producer never affects the state
of another (docs/decisions/0007-pruning-producers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import ProducerState
from coranto.messages.uuids import ProducerId, clock_to_ns

DEFAULT_PRUNE_HORIZON_S: Final = 24 * 3600.0
"""The reader remembers producers whose last clock is within this many seconds of its own."""
DEFAULT_PRUNE_DISTANCE: Final = 1 << 30
"""The reader remembers a producer until it has read this many bytes of the journal after its last message."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """The parameters of pruning.

    `now` is the reader's time in seconds since the Unix epoch. `distance` is in bytes. `first_offsets` maps journals to
    the begin offsets of their content, where known.
    """

    now: float
    horizon_s: float = DEFAULT_PRUNE_HORIZON_S
    distance: int = DEFAULT_PRUNE_DISTANCE
    first_offsets: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.horizon_s < 0 or self.distance < 0:
            raise InvalidInput(
                f"a prune horizon of {self.horizon_s} seconds and {self.distance} bytes is negative; 0 is the least"
            )

    def forgets(self, state: ProducerState, read_through: int, first_offset: int = 0) -> bool:
        """Return True if a producer is forgotten in a journal that was read up to `read_through`.

        A producer is forgotten when the journal was read for `distance` bytes after its last message, unless its clock
        is within `horizon_s` of the reader's. A clock further off, ahead or behind, does not show how long the producer
        has been silent. A producer with an open transaction is remembered until all of its messages are gone from the
        journal. A producer with an unknown `seen_through` is also remembered.
        """
        if not state.seen_through or read_through - state.seen_through < self.distance:
            return False
        if state.is_pending and state.seen_through > first_offset:
            return False
        return abs(self.now - clock_to_ns(state.last_ack) / 1e9) > self.horizon_s

    def prune(
        self, journal: str, producers: Mapping[ProducerId, ProducerState], read_through: int
    ) -> dict[ProducerId, ProducerState]:
        """Return the states of the journal's remembered producers."""
        first_offset = self.first_offsets.get(journal, 0)
        return {
            producer: state
            for producer, state in producers.items()
            if not self.forgets(state, read_through, first_offset)
        }
