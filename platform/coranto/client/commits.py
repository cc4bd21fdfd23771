"""Detection of messages that were committed after a position."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final

from coranto import labels
from coranto.client.client import JournalClient
from coranto.client.positions import JournalPosition
from coranto.client.values import Chunk
from coranto.messages.framing import Envelope, JsonLines
from coranto.messages.reading import AsyncReadUncommitted
from coranto.messages.uuids import Flags, ProducerId

_LOOKBACK: Final = 1 << 20
"""The bytes before a position that are also read, to learn the state of producers."""
_MAX_PRODUCERS: Final = 10_000


class Producers:
    """The known producers of one journal, by the rules of `coranto.messages.sequencer`.

    `whole` means that the journal is read from its first message on. Otherwise an acknowledgement of an unknown
    producer counts as a commit, because its messages may precede the content that was read.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._known: dict[ProducerId, tuple[int, int]] = {}
        """For each producer: the clocks of its last decided message, and of its first pending one (0: none)."""

    def commits(self, message: Envelope[Any]) -> bool:
        """Process a message, and return True if it commits itself or earlier messages."""
        clock = message.clock
        if not clock:
            return True
        known = self._known.pop(message.producer, None)
        decided, pending = known or (clock - 1, 0)
        if message.flags == Flags.CONTINUE_TXN:
            commits, after = False, (decided, pending or (clock if clock > decided else 0))
        elif message.flags == Flags.ACK_TXN:
            commits = clock > decided and (0 < pending <= clock or (known is None and not self._whole))
            after = (clock, 0)
        else:
            commits = clock > decided
            after = (clock, 0) if commits else (decided, pending)
        self._known[message.producer] = after
        if len(self._known) > _MAX_PRODUCERS:  # Forget the producer with the oldest message.
            del self._known[next(iter(self._known))]
            self._whole = False
        return commits


class CommitWatch:
    """Detects commits of messages. Reads journals of JSON lines; in other journals, any growth counts as a commit."""

    def __init__(self) -> None:
        self._scans: dict[str, _Scan] = {}

    async def since(
        self, client: JournalClient, before: Mapping[str, JournalPosition], now: Mapping[str, JournalPosition]
    ) -> bool:
        """Return True if messages became committed in any journal between two vectors of positions.

        Raises the errors of the client's reads.
        """
        found = False
        for journal, at in now.items():
            known = before.get(journal)
            begin = known.clamped_to(at).head if known is not None else 0
            if at.head > begin:
                scan = await self._scan(client, journal, at, begin)
                await scan.read(client, at.head)
                found = found or scan.last_commit > begin
        return found

    async def _scan(self, client: JournalClient, journal: str, at: JournalPosition, begin: int) -> _Scan:
        scan = self._scans.get(journal)
        if scan is None or replace(scan.position, head=scan.offset).clamped_to(at).head < scan.offset:
            listed = (await client.list(labels.label_selector(include={labels.NAME: journal}))).journals
            kind = labels.value_of(listed[0].spec.labels, labels.CONTENT_TYPE) if listed else ""
            scan = self._scans[journal] = _Scan(journal, at, begin, is_json=kind == labels.JSON_LINES)
        return scan


class _Scan:
    """The content of one journal, read up to `offset`."""

    def __init__(self, journal: str, position: JournalPosition, begin: int, *, is_json: bool) -> None:
        self.journal = journal
        self.position = position
        self.offset = max(0, begin - _LOOKBACK)
        self.last_commit = 0
        """The end of the last message that committed itself or earlier messages."""
        self._is_json = is_json
        self._within_line = self.offset > 0
        self._producers = Producers(whole=not self.offset)

    async def read(self, client: JournalClient, end: int) -> None:
        """Read up to `end`. Missing content, and content that is not a message, counts as committed."""
        if not self._is_json:
            self.offset = self.last_commit = end
        if self.offset >= end:
            return
        chunks = self._whole_lines(client, end)
        messages = AsyncReadUncommitted(
            JsonLines(tolerant=True), self.journal, chunks, self.offset, on_corrupt=lambda _: self._gone(end)
        )
        async with contextlib.aclosing(messages):
            async for message in messages:
                if self._producers.commits(message):
                    self.last_commit = max(self.last_commit, message.end)
        self.offset = messages.offset

    def _gone(self, through: int) -> None:
        self.last_commit = max(self.last_commit, through)

    async def _whole_lines(self, client: JournalClient, end: int) -> AsyncIterator[Chunk]:
        """Yield content from `offset` on, without a partial first line."""
        at = self.offset
        async with contextlib.aclosing(client.read(self.journal, self.offset, end_offset=end)) as chunks:
            async for chunk in chunks:
                if chunk.offset > at and not self._within_line:
                    self._gone(chunk.offset)
                at = chunk.offset + len(chunk.content)
                content = chunk.content
                if self._within_line:
                    behind = content.find(b"\n") + 1
                    content = content[behind:] if behind else b""
                    self._within_line = not behind
                if content:
                    yield Chunk(at - len(content), content, end)
