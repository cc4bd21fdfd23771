"""Checkpoints of forked consumers. Pure.

A fork of a journal has its source's bytes at its source's offsets, up to the fork offset. So up to there a checkpoint's
offsets mean the same in both, and so do the states of producers: their pending messages are read again from where they
began, which both have. Only the names of journals change.

Acknowledgements (ACK intents) are never copied. They end messages that the original consumer has published under its
own producers, and the original appends them. The copy has published nothing yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coranto.errors import InvalidInput
from coranto.fragments.forks import Fork
from coranto.messages.checkpoints import Checkpoint, Source


def forked(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint for the forks of its sources, by `names` from source to fork. It has no acknowledgements.

    Raises InvalidInput for a source without a fork.
    """
    if missing := sorted(checkpoint.sources.keys() - names.keys()):
        raise InvalidInput(f"the checkpoint has read {missing[0]}, which has no fork", field="checkpoint")
    return Checkpoint({names[journal]: _of_another(source) for journal, source in checkpoint.sources.items()})


def require_shared(checkpoint: Checkpoint, forks: Mapping[str, Fork]) -> None:
    """Check that forks have all content that a consumer reads after a forked checkpoint. Raises InvalidInput.

    The consumer reads from the first pending message on. At least its read content is the source's, too.
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


def promoted(checkpoint: Checkpoint, forks: Mapping[str, Fork]) -> Checkpoint:
    """Return the checkpoint of a forked consumer for the sources of `forks`, which were made for it.

    Its acknowledgements stay: they are its own, and have to be appended. Raises InvalidInput unless the consumer has
    read only forks, and none of them beyond the fork offset, where it has other content than its source.
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
        sources[fork.source] = _of_another(source)
    return Checkpoint(sources, checkpoint.ack_intents)


def _of_another(source: Source) -> Source:
    """Return the source for a journal with the same content up to there. Its id is recorded by the next commit."""
    return replace(source, journal_id="")
