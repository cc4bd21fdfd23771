"""The search for content that is not a message, such as pieces of appends that ended within a message.

The journal's labels define the framing. Each fragment consists of whole appends, so it begins with a message. For CSV,
only the end is checked, because the number of columns is unknown.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from uuid import UUID

from coranto import labels
from coranto.audit.findings import Fact, Finding, Kind, Severity, Subject
from coranto.errors import CorruptMessage
from coranto.messages.fixed_frame import FixedFrame
from coranto.messages.framing import Decoder, JsonLines
from coranto.messages.uuids import UuidParts
from coranto.wire import protocol_pb2 as pb

_IN_PLACE_BYTES: Final = 1 << 20
"""The maximum length of content that is searched without a thread."""
_MAX_OFFSETS: Final = 10
"""The maximum number of offsets in a finding."""


class Torn:
    """The pieces of one journal's searched content that are not messages."""

    def __init__(self, journal: str) -> None:
        self.journal = journal
        self.count = 0
        self.offsets: list[int] = []
        """The offsets where the first pieces begin."""

    def add(self, offset: int) -> None:
        self.count += 1
        if len(self.offsets) < _MAX_OFFSETS:
            self.offsets.append(offset)

    def finding(self) -> Finding:
        """Return the finding about all pieces. Call it only if `count` is above 0."""
        facts: dict[str, Fact] = {"count": self.count, "offsets": self.offsets}
        message = (
            f"{self.count} pieces of content are no messages of the journal's content type, first at offset "
            f"{self.offsets[0]}: appends ended within a message. The messages behind them are read if consumers have a "
            "policy for misfits, and readers an on_corrupt. Brokers refuse further appends that end within a line"
        )
        return Finding(Kind.MESSAGES_TORN, Severity.WARNING, Subject.journal(self.journal), message, facts)


class TornSearch:
    """A search through the content of one fragment, fed in order. It adds pieces to `torn`."""

    def __init__(self, spec: pb.JournalSpec, begin: int, torn: Torn) -> None:
        self._torn = torn
        self._end = begin
        self._ends_line = True
        self._whole_lines = labels.takes_whole_lines(spec.labels)
        kind = labels.value_of(spec.labels, labels.CONTENT_TYPE)
        self._decoder: Decoder[Any] | None = None
        if kind == labels.JSON_LINES:
            self._decoder = JsonLines().decoder(spec.name, begin)
        elif kind == labels.FIXED_FRAMES:
            self._decoder = FixedFrame(_Opaque(), kind).decoder(spec.name, begin)

    def feed(self, content: bytes) -> None:
        if not content:
            return
        self._end += len(content)
        self._ends_line = content.endswith(b"\n")
        while self._decoder is not None:
            try:
                for _ in self._decoder.feed(content):
                    pass
                return
            except CorruptMessage as error:
                self._torn.add(error.offset)
                content = b""

    def finish(self) -> None:
        """Check that the content ends with a whole message, because another append begins after it."""
        tail = self._decoder.finish() if self._decoder is not None else None
        if tail is not None:
            self._torn.add(tail.offset)
        elif self._decoder is None and self._whole_lines and not self._ends_line:
            self._torn.add(self._end)


async def search(spec: pb.JournalSpec, begin: int, content: bytes, torn: Torn) -> None:
    """Search the whole content of a fragment that begins at `begin`."""

    def examine() -> None:
        found = TornSearch(spec, begin, torn)
        found.feed(content)
        found.finish()

    if len(content) <= _IN_PLACE_BYTES:
        examine()
    else:
        await asyncio.to_thread(examine)


class _Opaque:
    """The codec of opaque payloads."""

    def encode(self, message: object, uuid: UUID) -> bytes:
        return b""

    def decode(self, payload: bytes) -> object:
        return payload

    def uuid_parts(self, payload: bytes) -> UuidParts | None:
        return None
