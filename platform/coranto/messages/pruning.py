"""Which producers a reader forgets: one rule, for every sequencer.

A reader remembers each producer of a journal so as to know its repeated messages and its open transactions. It cannot
remember all for ever. Each producer is judged by itself: by its own clock against the reader's, and by how much of the
journal was read since its last message. No clock of a producer decides about another's state
(docs/decisions/0007-pruning-producers.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import ProducerState
from coranto.messages.uuids import ProducerId, clock_to_ns

DEFAULT_PRUNE_HORIZON_S: Final = 24 * 3600.0
"""A producer whose last clock is within this many seconds of the reader's is remembered."""
DEFAULT_PRUNE_DISTANCE: Final = 1 << 30
"""A producer is remembered until this many bytes of the journal were read behind its last message."""


@dataclass(frozen=True, slots=True)
class Pruning:
    """When producers are forgotten.

    `now` is the reader's time in seconds since the Unix epoch, `distance` in bytes. `first_offsets` are the offsets at
    which the content of journals begins, of those for which that is known.
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
        """Whether a producer is forgotten, in a journal that was read through this offset.

        One is when the journal was read for `distance` bytes behind its last message, unless its clock is within
        `horizon_s` of the reader's. A clock further off, ahead or behind, says nothing of the producer's silence.
        One with an open transaction is remembered, besides, until all of its messages are gone from the journal. One
        of which it is not known where it was seen is remembered.
        """
        if not state.seen_through or read_through - state.seen_through < self.distance:
            return False
        if state.is_pending and state.seen_through > first_offset:
            return False
        return abs(self.now - clock_to_ns(state.last_ack) / 1e9) > self.horizon_s

    def prune(
        self, journal: str, producers: Mapping[ProducerId, ProducerState], read_through: int
    ) -> dict[ProducerId, ProducerState]:
        """The states of the journal's producers that are remembered."""
        first_offset = self.first_offsets.get(journal, 0)
        return {
            producer: state
            for producer, state in producers.items()
            if not self.forgets(state, read_through, first_offset)
        }
