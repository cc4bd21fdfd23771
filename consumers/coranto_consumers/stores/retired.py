"""Retired consumers: rows of a store whose names cannot be taken over any more.

Raising the fence stops a process, but its runtime or a supervisor restarts it, and that raises the fence again. So a
consumer that has ended keeps its row, and instead of a checkpoint this has a note. A process that starts under its
name is refused. No protobuf message begins as the note does, so Gazette's consumers and other versions refuse it as
well, as a checkpoint that they cannot read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import Checkpoint

_BEGIN: Final = b"\x07coranto: this consumer is retired; its successor: "
"""Field 0 of wire type 7: protobuf has neither."""


@dataclass(frozen=True, slots=True)
class Retired:
    """The note in the row of a consumer that was promoted, and continues as its `successor`, or that was dropped."""

    successor: str = ""
    """The consumer's new name. Empty if it was dropped."""

    def to_bytes(self) -> bytes:
        """Return the text that replaces a checkpoint."""
        return _BEGIN + self.successor.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Retired | None:
        """Return the note, or None for anything else."""
        return cls(content.removeprefix(_BEGIN).decode(errors="replace")) if content.startswith(_BEGIN) else None

    def refusal(self, name: str) -> InvalidInput:
        """Return the error for a process that wants to run the consumer `name`."""
        if self.successor:
            return InvalidInput(
                f"{name!r} is promoted already: it continues as {self.successor!r}, with the live journals. Stop "
                "processes that still read the forks, and start it under that name",
                field="consumer",
            )
        return InvalidInput(
            f"{name!r} was a forked consumer, and is dropped. Stop its processes, or fork a consumer under that name",
            field="consumer",
        )


def checkpoint_of(name: str, content: bytes) -> Checkpoint:
    """Return the checkpoint in a consumer's row. Raises InvalidInput for a retired consumer, and CorruptData."""
    if (retired := Retired.from_bytes(content)) is not None:
        raise retired.refusal(name)
    return Checkpoint.from_bytes(content)
