"""In which order a writer was given what it was given, and with which sequences: pure."""

from __future__ import annotations

from coranto.errors import InvalidInput
from coranto.streams.model.events import MAX_SEQUENCE


class Numbering:
    """Numbers all that one writer is given, from 1 on. A `stable` writer has an id, and its user may give sequences."""

    def __init__(self, *, stable: bool) -> None:
        self.last = 0
        self._stable = stable
        self._numbers_itself: bool | None = None  # Whether sequences are ours or the user's: by the first write.

    def next(self, sequence: int | None) -> int:
        """The number of something that is given now, with this sequence or none. Raises InvalidInput."""
        if sequence is not None:
            self.check(sequence)
        if self._numbers_itself is None:
            self._numbers_itself = sequence is None
        elif self._numbers_itself is not (sequence is None):
            raise InvalidInput("either all that a writer is given has a sequence, or nothing", field="sequence")
        self.last += 1
        return self.last

    def check(self, sequence: int) -> None:
        """Raises InvalidInput for what cannot be a sequence here."""
        if not self._stable:
            raise InvalidInput("a sequence means something only for a writer with an id", field="sequence")
        if not 0 <= sequence <= MAX_SEQUENCE:
            raise InvalidInput(f"{sequence} is no sequence: 0 to {MAX_SEQUENCE}", field="sequence")
