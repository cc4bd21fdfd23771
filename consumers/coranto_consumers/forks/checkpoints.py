"""Checkpoints of forked consumers. Pure.

A fork has the bytes of its source at the same offsets, up to the fork offset. Up to there, a checkpoint's offsets and
producer states are valid for both: pending messages are replayed from their begin offsets, which both journals have.
Only the names of journals change.

Acknowledgements (ACK intents) are not copied to a fork. They commit messages that the original consumer has published
under its own producers, and the original appends them. The forked consumer has published nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coranto.errors import InvalidInput
from coranto.fragments.forks import Fork
from coranto.messages.checkpoints import Checkpoint, Source


def fork_checkpoint(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint for the forks of its sources, without acknowledgements. `names` maps sources to forks.

    Raises InvalidInput for a source without a fork.
    """
    if missing := sorted(checkpoint.sources.keys() - names.keys()):
        raise InvalidInput(f"the checkpoint has read {missing[0]}, which has no fork", field="checkpoint")
    return Checkpoint({names[journal]: _without_id(source) for journal, source in checkpoint.sources.items()})


def require_shared(checkpoint: Checkpoint, forks: Mapping[str, Fork]) -> None:
    """Check that forks have all content that a consumer needs after a forked checkpoint. Raises InvalidInput.

    A fork must begin at or before the first pending message, and share all content that was read with its source.
    """
    for journal, source in checkpoint.sources.items():
        fork = forks[journal]
        if source.read_through > fork.offset:
            raise InvalidInput(
                f"ends the source's content at {fork.offset}, and the consumer has read up to {source.read_through}; "
                "drop this fork, and fork again",
                field=journal,
            )
        if source.replay_from < fork.begin:
            raise InvalidInput(
                f"begins at {fork.begin}, and the consumer reads on from {source.replay_from}: retention has removed "
                "the content in between",
                field=journal,
            )


def promote_checkpoint(checkpoint: Checkpoint, forks: Mapping[str, Fork]) -> Checkpoint:
    """Return the checkpoint of a forked consumer for the sources of `forks`, which were made for it.

    Its acknowledgements stay, because the consumer must append them. Raises InvalidInput unless the consumer has read
    only forks, and none of them beyond its fork offset, where its content differs from its source's.
    """
    if not checkpoint.sources:
        raise InvalidInput("the consumer has read nothing yet; let it read its forks first", field="checkpoint")
    if strangers := sorted(checkpoint.sources.keys() - forks.keys()):
        raise InvalidInput(
            f"the consumer has read {strangers[0]}, which is not a complete fork that was made for it",
            field="checkpoint",
        )
    sources: dict[str, Source] = {}
    for journal, source in checkpoint.sources.items():
        fork = forks[journal]
        if fork.forming:
            raise InvalidInput("does not have all of its source's content yet; fork it again", field=journal)
        if source.read_through > fork.offset:
            raise InvalidInput(
                f"differs from {fork.source} beyond {fork.offset}, and the consumer has read up to "
                f"{source.read_through}: its tables have messages that {fork.source} has not. Only a consumer that "
                "has read nothing but the source's content can be promoted",
                field=journal,
            )
        if fork.source in sources:
            raise InvalidInput(f"and another fork of {fork.source} are both read by the consumer", field=journal)
        sources[fork.source] = _without_id(source)
    return Checkpoint(sources, checkpoint.ack_intents)


def _without_id(source: Source) -> Source:
    """Return the source without a journal id. The next commit records the id of the other journal."""
    return replace(source, journal_id="")
