"""A stream as it is at one revision, with the specs of its journals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.values import JournalInfo, Listing
from coranto.errors import StreamNotFound
from coranto.streams.control.segment_specs import owner_of
from coranto.streams.model.stream import Segment, Stream, decode, transactions_journal, validate_stream


@dataclass(frozen=True, slots=True)
class StreamView:
    """A stream at one revision, with the specs of its journals by name."""

    stream: Stream
    infos: Mapping[str, JournalInfo]

    @property
    def transactions(self) -> JournalInfo | None:
        return self.infos.get(transactions_journal(self.stream.name))

    def of(self, segment: Segment) -> JournalInfo:
        return self.infos[segment.journal]


async def view_of(client: JournalClient, name: str) -> StreamView:
    """Return a stream and its specs. Raises StreamNotFound, and CorruptData if its labels are invalid."""
    listing = await client.list(labels.label_selector(include=[("name:prefix", f"{validate_stream(name)}/")]))
    mine = [info for info in listing.journals if owner_of(info) == name]
    try:
        stream = decode(Listing(listing.header, tuple(mine)))
    except StreamNotFound:
        raise not_found(name) from None
    return StreamView(stream, {info.name: info for info in mine})


def not_found(name: str) -> StreamNotFound:
    """Return the error for a stream that does not exist."""
    return StreamNotFound(f"there is no stream {name}: check the name, or create it (`coranto streams create`)")
