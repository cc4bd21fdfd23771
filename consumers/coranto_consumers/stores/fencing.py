"""The error of an owner that was fenced off, with the reason."""

from __future__ import annotations

from typing import NamedTuple

from coranto.errors import Fenced
from coranto.messages.checkpoints import Checkpoint


class Restored(NamedTuple):
    """A consumer's row in a store: the fence, and the last committed checkpoint (empty before the first)."""

    fence: int
    checkpoint: Checkpoint


def fenced_off(shard: str, fence: int, found: Restored | None) -> Fenced:
    """Return the error for the owner of `fence`. `found` is the current row in the store; None if unknown."""
    resets = [each for each in found.checkpoint.identity.resets if each.fence > fence] if found is not None else []
    if not resets:
        return Fenced(f"consumer {shard}: fence {fence} was raised by a later owner; stop this one")
    more = f" (and {len(resets) - 1} more)" if len(resets) > 1 else ""
    return Fenced(
        f"consumer {shard}: fence {fence} was raised by `coranto consumer reset` or `skip`: {resets[0]}{more}. This "
        "instance has ended, and nothing of its transaction was committed. Start the consumer again to continue from "
        "the new position",
        is_moved=True,
    )
