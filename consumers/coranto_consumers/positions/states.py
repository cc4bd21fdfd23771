"""The state of a reader that has read everything before an offset of a journal.

A position is more than an offset. An open transaction has messages before the offset, and its acknowledgement after it.
A reader that begins with the state at an offset delivers such a transaction as a whole, and no transaction that was
acknowledged before. So no transaction is delivered partly.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from coranto.client import JournalClient
from coranto.errors import InvalidInput
from coranto.messages import Flags, Framing, Source
from coranto.messages.reading import AsyncReadUncommitted
from coranto_consumers.audit.replay import Replay, Replayed


class JournalWalk:
    """Reads the messages of one journal to find states at its offsets."""

    def __init__(self, client: JournalClient, framing: Framing[Any], journal: str) -> None:
        self._client = client
        self._framing = framing
        self._journal = journal

    async def to(self, start: Source, end: int) -> Replayed:
        """Return the replay from `start` to `end`: the state there, and the number of messages in between.

        Raises InvalidInput for an `end` within a message, which names the offsets around it, OffsetJump if a pending
        message is gone, and the client's errors.
        """
        found = await Replay(self._client, self._framing, self._journal, start, Source(end)).run()
        boundary = await self.boundary(found.reached, end)
        if boundary != end:
            beyond = await self._next_boundary(boundary)
            raise InvalidInput(
                f"offset {end} of {self._journal} is within a message: give {boundary}, where it begins"
                + (f", or {beyond}, where it ends" if beyond else ""),
                field="--to",
            )
        found.source = replace(found.source, read_through=end)
        return found

    async def count(self, start: Source, end: Source) -> int:
        """Return the number of messages that are committed between two states."""
        return (await Replay(self._client, self._framing, self._journal, start, end).run()).messages

    async def boundary(self, begin: int, end: int) -> int:
        """Return the last message boundary that is not after `end`. `begin` is a boundary."""
        if begin >= end:
            return begin
        async with contextlib.aclosing(self._client.read(self._journal, begin, end_offset=end)) as chunks:
            reader = AsyncReadUncommitted(self._framing, self._journal, chunks, begin, on_corrupt=lambda error: None)
            async for _ in reader:
                pass
        return max(reader.offset, begin)

    async def _next_boundary(self, begin: int) -> int | None:
        async with contextlib.aclosing(self._client.read(self._journal, begin)) as chunks:
            reader = AsyncReadUncommitted(self._framing, self._journal, chunks, begin, on_corrupt=lambda error: None)
            async for _ in reader:
                return reader.offset
        return None

    async def in_partial_delivery(self, source: Source, first: int) -> bool:
        """Return True if a checkpoint was taken during the delivery of one acknowledgement's messages.

        That is possible only if the next message acknowledges pending messages. Then the journal is read from `first`,
        the begin offset of its content.
        """
        pending = {producer for producer, state in source.producers.items() if state.is_pending}
        if not pending:
            return False
        async with contextlib.aclosing(self._client.read(self._journal, source.read_through)) as chunks:
            reader = AsyncReadUncommitted(
                self._framing, self._journal, chunks, source.read_through, on_corrupt=lambda error: None
            )
            async for message in reader:
                if message.flags != Flags.ACK_TXN or message.producer not in pending:
                    return False
                break
        start = Source(min(first, source.read_through))
        found = await Replay(self._client, self._framing, self._journal, start, source).run()
        return found.partly_delivered
