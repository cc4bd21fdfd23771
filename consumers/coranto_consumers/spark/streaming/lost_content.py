"""Lost content that a streaming query continues without."""

from __future__ import annotations

from dataclasses import replace

from coranto.errors import OffsetJump
from coranto.messages.checkpoints import Source
from coranto_consumers.spark.journals.discovery import ContentExtent
from coranto_consumers.spark.journals.losses import LostContent, continue_after, lost_before, warn_of
from coranto_consumers.spark.streaming.batches import ReadState
from coranto_consumers.spark.streaming.offsets import Position


def lost_at(journal: str, position: Position, found: ContentExtent | None) -> LostContent | None:
    """Return the lost content between a position and a journal's next content. `found` is None without the journal."""
    if found is None:
        return LostContent(journal, position.offset, 0, made_again=True)
    if not position.is_of(found.created, found.journal_id):
        known = position.journal_id if found.journal_id else ""
        return LostContent(
            journal, position.offset, found.head, made_again=True, known=known, found=found.journal_id if known else ""
        )
    return lost_before(journal, position.offset, found.begin, found.head, is_end=found.is_end)


def beginning_at(offset: int) -> ReadState:
    """Return the state of a query that begins at an offset, and knows of nothing before it."""
    return ReadState(Position(offset), Source(offset), {})


def without_lost_part(state: ReadState, error: OffsetJump) -> ReadState | None:
    """Return a state that does not need the lost content of open transactions that caused an error.

    None if the error is about other content.
    """
    if error.expected >= state.position.offset:
        return None
    lost = LostContent(error.journal, error.expected, error.actual)
    source, partly = continue_after(state.source, lost)
    if not partly:
        return None
    warn_of(lost, partly)
    return replace(state, source=source)
