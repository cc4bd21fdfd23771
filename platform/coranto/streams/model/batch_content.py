"""Digests of the batches that a writer has numbered, in registers beside the one of its last batch. Pure.

    `coranto.dev/batch-content/<writer>`  =  `<batch>.<digest>`

A number alone does not identify a batch: a writer that was restored from an older checkpoint gives the same number to
other content. Earlier versions neither write nor read these registers. So the register names the batch, and is of no
use for another one.
"""

from __future__ import annotations

from typing import Final

from coranto import labels
from coranto.errors import BatchChanged
from coranto.wire import protocol_pb2 as pb

_PREFIX: Final = "coranto.dev/batch-content/"


def content_register(writer: str, batch: int, digest: str) -> dict[str, str]:
    """Return the register to set for a batch; none without a digest."""
    return {_PREFIX + writer: f"{batch}.{digest}"} if digest else {}


def require_same_content(
    registers: pb.LabelSet, writer: str, batch: int, digest: str, messages: int | None = None
) -> None:
    """Raise BatchChanged if a batch was decided with a content of another digest. `messages` is their number then.

    Without a digest, now or then, the content counts as the same.
    """
    number, _, known = (labels.value_of(registers, _PREFIX + writer) or "").partition(".")
    if not digest or number != str(batch) or known == digest:
        return
    count = "other content" if messages is None else f"{messages} messages that are not the same"
    raise BatchChanged(
        f"batch {batch} of {writer} is written already, with {count}: the writer's checkpoint is older than what it "
        "has written, as after a restoration or a crash of the machine."
    )
