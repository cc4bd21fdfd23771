"""Detection of positions in an earlier stream that was deleted and recreated under the same name."""

from __future__ import annotations

from coranto.client.client import JournalClient
from coranto.errors import CorruptData, JournalNotFound, JournalRecreated, JournalSuspended
from coranto.journal_ids import is_same
from coranto.streams.model.positions import SegmentPosition
from coranto.streams.model.stream import Segment


async def require_same(client: JournalClient, segment: Segment, position: SegmentPosition) -> None:
    """Check that a stored position is in its segment's content.

    Raises JournalRecreated if the position is from an earlier stream of this name, and CorruptData if it is beyond the
    head and its journal id is the same or unknown. Segments that are gone or suspended are checked by their reads.
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
            f"segment {segment.number} ends at {reported.head}, before the position {position.offset}: its stream was "
            "deleted and created again, or has lost content. Begin again without a position"
        )
