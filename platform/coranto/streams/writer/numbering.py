"""The order of a writer's events and transactions, and the rules of their sequences. Pure."""

from __future__ import annotations

from coranto.errors import InvalidInput
from coranto.streams.model.events import MAX_SEQUENCE


class Numbering:
    """Numbers the events and transactions of one writer from 1. Only a `stable` writer, with an id, has sequences."""

    def __init__(self, *, stable: bool) -> None:
        self.last = 0
        self._stable = stable
        self._is_automatic: bool | None = None  # True if the user gives no sequences. The first write determines it.

    def next(self, sequence: int | None) -> int:
        """Return the number of the next event or transaction, whose `sequence` is the user's. Raises InvalidInput."""
        if sequence is not None:
            self.check(sequence)
        if self._is_automatic is None:
            self._is_automatic = sequence is None
        elif self._is_automatic is not (sequence is None):
            raise InvalidInput(
                "either all events and transactions of a writer have a sequence, or none; give one always or never",
                field="sequence",
            )
        self.last += 1
        return self.last

    def check(self, sequence: int) -> None:
        """Raise InvalidInput if this is not a valid sequence for the writer."""
        if not self._stable:
            raise InvalidInput(
                "a sequence requires a writer with an id; give the writer an id, or omit the sequence",
                field="sequence",
            )
        if not 0 <= sequence <= MAX_SEQUENCE:
            raise InvalidInput(f"{sequence} is not a sequence; give 0 to {MAX_SEQUENCE}", field="sequence")
