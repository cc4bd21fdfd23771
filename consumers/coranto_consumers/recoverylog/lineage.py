"""Checks that a log holds a recorder's content. A recorder runs them if its fence is missing."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass

from coranto.client import JournalClient
from coranto.errors import ContentGone, CorruptData, Fenced, OffsetJump, OffsetNotYetAvailable
from coranto_consumers.recoverylog.decoder import DecodedOperation, LogDecoder
from coranto_consumers.recoverylog.operations import Author, crc32c


@dataclass(frozen=True, slots=True)
class HistoryPosition:
    """A place in a history: the sequence number and checksum of its next operation."""

    seq_no: int
    checksum: int

    def after(self, payload: bytes) -> HistoryPosition:
        """Return the place after an operation whose frame holds `payload`."""
        return HistoryPosition(self.seq_no + 1, crc32c(self.checksum, payload))


@dataclass(frozen=True, slots=True)
class Proven:
    """Content [begin, end) that this author appended to the log, its SHA-1 `sum`, and the place after it."""

    begin: int
    end: int
    sum: bytes
    chain: HistoryPosition


async def require_content(client: JournalClient, log: str, proven: Proven) -> None:
    """Check that appended content is still in the log. Raises CorruptData when it is missing or different."""
    digest = hashlib.sha1(usedforsecurity=False)
    lost = f"{log}: content appended at [{proven.begin}, {proven.end}) is not there any more. The log lost content"
    position = proven.begin
    try:
        async with contextlib.aclosing(
            client.read(log, proven.begin, end_offset=proven.end, fail_on_jump=True)
        ) as chunks:
            async for chunk in chunks:
                digest.update(chunk.content)
                position = chunk.end
    except (ContentGone, OffsetJump, OffsetNotYetAvailable) as error:
        raise CorruptData(lost) from error
    if position != proven.end or digest.digest() != proven.sum:
        raise CorruptData(lost)


async def follow(
    client: JournalClient, log: str, begin: int, end: int, author: Author, start: HistoryPosition, goal: HistoryPosition
) -> bool:
    """Return True if operations of `author` in [begin, end) lead the history from `start` to `goal`.

    Like players, it skips repeated operations, and operations of other authors that do not continue the history. Raises
    Fenced when another author's operation continues the history before the goal is reached (or anywhere in the range,
    if the goal is the start).
    """
    decoder, chain = LogDecoder(log, begin), start
    if begin == end:
        return chain == goal
    async with contextlib.aclosing(client.read(log, begin, end_offset=end, fail_on_jump=True)) as chunks:
        async for chunk in chunks:
            for event in decoder.feed(chunk.content):
                if (
                    not isinstance(event, DecodedOperation)
                    or HistoryPosition(event.op.seq_no, event.op.checksum) != chain
                ):
                    continue
                if event.op.author != author:
                    raise Fenced(
                        f"recovery log {log} was taken over by author {event.op.author:#x} at offset "
                        f"{event.op.begin}; stop this one"
                    )
                decoder.accept()
                chain = chain.after(event.payload)
                if chain == goal:
                    return True
    return chain == goal
