"""Registers of writers that number their batches: each writer's last batch, and the digest of its content. Pure.

    `coranto.dev/batch/<writer>`          =  `<batch>.<private>`; only the writer reads the private part
    `coranto.dev/batch-content/<writer>`  =  `<batch>.<digest>`

A number alone does not identify a batch: a writer that was restored from an older checkpoint reuses numbers for other
content. Earlier versions update only the first register. So the second one repeats the number, and a digest of another
batch is ignored.
"""

from __future__ import annotations

import re
from typing import Final

from coranto import labels
from coranto.errors import BatchChanged, CorantoError, Fenced, InvalidInput
from coranto.wire import protocol_pb2 as pb

BATCH_REGISTER: Final = "coranto.dev/batch/"
_PREFIX: Final = "coranto.dev/batch-content/"
_WRITER: Final = re.compile(r"[0-9A-Za-z_-]{1,40}")


def validate_batch_writer(name: str) -> str:
    """Return `name` if it can name a writer of batches of any kind. Raises InvalidInput."""
    if not _WRITER.fullmatch(name):
        raise InvalidInput(f"{name[:100]!r} cannot name a writer of batches; use 1 to 40 letters, digits, - and _")
    return name


def content_register(writer: str, batch: int, digest: str) -> dict[str, str]:
    """Return the register to set for a batch; none without a digest."""
    return {_PREFIX + writer: f"{batch}.{digest}"} if digest else {}


def require_same_content(
    registers: pb.LabelSet, writer: str, batch: int, digest: str, messages: int | None = None
) -> None:
    """Raise BatchChanged if the batch was decided with another digest. `messages` is its number of messages, if known.

    If either digest is missing, the contents count as equal.
    """
    number, _, known = (labels.value_of(registers, _PREFIX + writer) or "").partition(".")
    if not digest or number != str(batch) or known == digest:
        return
    count = "other content" if messages is None else f"{messages} messages that are not the same"
    raise BatchChanged(
        f"batch {batch} of {writer} is written already, with {count}: the writer's checkpoint is older than its last "
        "batch, as after a restoration or a crash of the machine."
    )


def last_batches(registers: pb.LabelSet) -> dict[str, int]:
    """Return the number of the last batch of each writer."""
    found = {
        each.name.removeprefix(BATCH_REGISTER): each.value.partition(".")[0]
        for each in registers.labels
        if each.name.startswith(BATCH_REGISTER)
    }
    return {writer: int(number) for writer, number in found.items() if number.isdecimal()}


def old_batch(writer: str, batch: int, last: int, planned_after: int | None) -> CorantoError:
    """Return the error for a batch that arrives after the decision of its writer's later batch `last`.

    `planned_after` is the writer's last batch when this batch was planned; None if there was none, or it is unknown.
    It distinguishes a process that another process has overtaken (Fenced) from a process with an old checkpoint
    (BatchChanged).
    """
    if planned_after is None or planned_after <= batch:
        return Fenced(
            f"batch {batch} of {writer} is old: batch {last} is written already. Another process with the same "
            "checkpoint has continued with its work; stop this one"
        )
    older = last - batch + 1
    return BatchChanged(
        f"batch {batch} of {writer} is written already, and batches up to {last} are: the writer's checkpoint is "
        f"{older} batches older than the last written one, as after a restoration or a crash of the machine. "
        f"The batches {batch} to {last}, as it plans them now, would be skipped. Content that is already written, but "
        f"planned again in batch {last + 1} or later, would be duplicated.",
        batches=older,
    )
