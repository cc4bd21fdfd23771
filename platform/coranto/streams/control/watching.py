"""Watching the metadata of a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from coranto.client.client import JournalClient
from coranto.effects import Clock
from coranto.errors import CorantoError, InvalidInput
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Segment, Stream, decode, segments_selector

_AGAIN_SECONDS = 0.02
"""The poll interval. Brokers learn of a change some hundredths of a second apart."""


async def describe(client: JournalClient, stream: str) -> Stream:
    """Return the stream as one broker knows it now. Raises StreamNotFound and CorruptData."""
    return decode(await client.list(segments_selector(stream)))


async def beginning(client: JournalClient, stream: str) -> StreamPosition:
    """Return the beginning of the stream now: after everything that truncation and retention have removed."""

    async def first(segment: Segment) -> SegmentPosition:
        async with contextlib.aclosing(client.read(segment.journal, segment.begin)) as chunks:
            async for chunk in chunks:
                return SegmentPosition(chunk.offset)
        return SegmentPosition(segment.begin)

    heads = (await describe(client, stream)).heads()
    found = await asyncio.gather(*map(first, heads))
    return StreamPosition({head.number: position for head, position in zip(heads, found, strict=True)})


class StreamWatch:
    """The newest known state of a stream. Calls `on_change` when it changes, and when the watch fails."""

    def __init__(self, client: JournalClient, stream: str, clock: Clock, on_change: Callable[[], None]) -> None:
        self._client = client
        self._name = stream
        self._clock = clock
        self._on_change = on_change
        self._stream: Stream | None = None
        self._failure: CorantoError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def stream(self) -> Stream:
        if self._stream is None:
            raise InvalidInput(f"stream {self._name} is not known yet: refresh() first")
        return self._stream

    async def refresh(self, revision: int = 0) -> Stream:
        """Fetch the stream until the broker knows etcd's `revision` or a later one. Returns the newest known state."""
        while True:
            found = await describe(self._client, self._name)
            self._take(found)
            if found.revision >= revision:
                return self.stream
            await self._clock.sleep(_AGAIN_SECONDS)

    def follow(self) -> None:
        """Begin to watch the stream in the background, until `close`."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def check(self) -> None:
        """Raise the error that ended the watch, if it has ended. This is StreamNotFound if the stream was deleted."""
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._client.watch(segments_selector(self._name))) as listings:
                async for listing in listings:
                    self._take(decode(listing))
        except CorantoError as error:
            self._failure = error
            self._on_change()

    def _take(self, found: Stream) -> None:
        # This broker may be behind the one that answered before.
        if self._stream is None or found.revision >= self._stream.revision:
            changed = self._stream is None or found != self._stream
            self._stream = found
            if changed:
                self._on_change()
