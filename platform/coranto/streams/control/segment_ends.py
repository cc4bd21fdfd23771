"""Ends of segments, as returned by empty appends. Read-only journals accept these, too."""

from __future__ import annotations

from coranto import labels
from coranto.client.client import JournalClient
from coranto.errors import IndexHasGreaterOffset, RegisterMismatch
from coranto.streams.model.stream import HELD_LABEL
from coranto.wire import protocol_pb2 as pb


async def final_offset(client: JournalClient, journal: str, revision: int) -> int:
    """Return the final end of a journal that is read-only since `revision`, once no append can commit any more."""
    held = labels.label_selector(include={HELD_LABEL: ""})
    try:
        return await end_of(client, journal, revision, held)
    except RegisterMismatch:
        # No stream writer has written to it, or its registers were lost, perhaps with content.
        end = await end_of(client, journal, revision)
        if await client.head(journal) > end:
            raise IndexHasGreaterOffset(f"sealing of {journal}") from None
        return end


async def end_of(client: JournalClient, journal: str, revision: int, check: pb.LabelSelector | None = None) -> int:
    """Return the write head of an empty append at a broker that knows of `revision`."""
    nothing = client.append(journal, b"", check_registers=check, min_etcd_revision=revision, retry_unknown=True)
    return (await nothing).end
