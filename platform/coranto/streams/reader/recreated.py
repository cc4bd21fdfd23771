"""Positions of a stream that was deleted, and created again under the same name."""

from __future__ import annotations

from coranto.client.client import JournalClient
from coranto.errors import CorruptData, JournalNotFound, JournalRecreated, JournalSuspended
from coranto.journal_ids import is_same
from coranto.streams.model.positions import SegmentPosition
from coranto.streams.model.stream import Segment


async def require_same(client: JournalClient, segment: Segment, position: SegmentPosition) -> None:
    """Check a stored position, which may be beyond its segment's content.

    Raises JournalRecreated for one of an earlier stream of this name, and CorruptData for one without an id that is
    beyond the head. It cannot check segments that are gone or suspended; their reads do.
    """
    if not position.offset:
        return
    try:
        reported = await client.reported_head(segment.journal)
    except (JournalNotFound, JournalSuspended):
        return
    if not is_same(position.journal_id, position.offset, reported.journal_id):
        raise JournalRecreated(
            segment.journal, position.offset, position.journal_id, reported.journal_id, reported.head
        )
    if position.offset > reported.head:
        raise CorruptData(
            f"segment {segment.number} ends at {reported.head}, and is read through {position.offset}: its stream was "
            "deleted and created again, or has lost content. Begin again without a position"
        )
