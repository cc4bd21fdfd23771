"""Retired consumers: tombstones in a store for consumer names that must not be used again.

Raising the fence stops a process, but its runtime or a supervisor restarts the process, which raises the fence again.
So a consumer that has ended keeps its row, with a tombstone instead of a checkpoint. A process that starts under the
name is rejected. The tombstone is not a valid protobuf message, so Gazette's consumers and other versions also reject
it, as an unreadable checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coranto.errors import InvalidInput
from coranto.messages.checkpoints import Checkpoint

_BEGIN: Final = b"\x07coranto: this consumer is retired; its successor: "
"""The first byte is a tag with field number 0 and wire type 7, which are both invalid in protobuf."""


@dataclass(frozen=True, slots=True)
class Retired:
    """The tombstone of a consumer that was promoted, and continues as its `successor`, or that was dropped."""

    successor: str = ""
    """The consumer's new name. Empty if the consumer was dropped."""

    def to_bytes(self) -> bytes:
        """Return the bytes that replace the checkpoint."""
        return _BEGIN + self.successor.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Retired | None:
        """Parse a tombstone. Returns None for other content."""
        return cls(content.removeprefix(_BEGIN).decode(errors="replace")) if content.startswith(_BEGIN) else None

    def error(self, name: str) -> InvalidInput:
        """Return the error for a process that tries to run the consumer `name`."""
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
        raise retired.error(name)
    return Checkpoint.from_bytes(content)
