"""The state of a reader that has read everything before an offset of a journal.

A position is more than an offset. Transactions that are open there have messages before it, and are committed by an
acknowledgement behind it. A reader that begins with the state at an offset delivers such a transaction as a whole, and
none that was acknowledged before. So no transaction is ever delivered in half.
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
    """Walks over the messages of one journal, to find states at its offsets."""

    def __init__(self, client: JournalClient, framing: Framing[Any], journal: str) -> None:
        self._client = client
        self._framing = framing
        self._journal = journal

    async def to(self, start: Source, end: int) -> Replayed:
        """Return the result of reading on from `start` up to `end`: the state there, and the messages in between.

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
        """Return the last offset up to `end` where a message may begin. One begins at `begin`."""
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

    async def is_amid_delivery(self, source: Source, first: int) -> bool:
        """Return True if a checkpoint's state has delivered a part of the messages that one acknowledgement commits.

        Content before `first` is gone. It reads the journal from there if the next message acknowledges pending ones;
        no other state can be such a one.
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
