"""`StreamReader`: reads a stream in one process.

It reads all open segments in turn, and begins a segment once all its predecessors have been read to their ends. So the
events of each routing key arrive in order of writing, across splits and merges. Events of different keys arrive in no
particular order. Only committed events are read, each of them once.

To resume later, store `position()` together with the results of the events, and begin there. Then no event is skipped
or read twice. `coranto.streams.groups.reader_groups` shares a stream between processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Final, Generic, Self, TypeVar, cast

import structlog

from coranto.client.client import JournalClient
from coranto.effects import Clock, SystemClock
from coranto.errors import InvalidInput, JournalNotFound, JournalRecreated, StreamTruncated
from coranto.messages.framing import Framing
from coranto.streams.control.watching import StreamWatch
from coranto.streams.model.events import format_of
from coranto.streams.model.frontier import Frontier, ancestors, frontier_at, graph_of
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Segment, Stream
from coranto.streams.model.watermarks import TimeWindow, TimeWindows
from coranto.streams.reader.delivery import DEFAULT_READ_AHEAD, Event, SegmentPool, SegmentSource, StreamTransaction
from coranto.streams.reader.recreated import require_same

E = TypeVar("E")

_RECREATED: Final = "Begin again without a position, or skip the missing content (skip_truncated)."
_log = structlog.get_logger(__name__)


class StreamReader(Generic[E]):
    """Reads the events of a stream. Use as `async with StreamReader(client, "name") as reader:`, by one task.

    `async for event in reader` yields single events, and `async for transaction in reader.transactions()` yields whole
    transactions. A cancelled call (such as by a timeout) takes no event; simply call again.
    """

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        *,
        format: Framing[E] | None = None,
        begin: Mapping[int, int] | None = None,
        end: Mapping[int, int] | None = None,
        block: bool = False,
        skip_truncated: bool = False,
        read_ahead: int = DEFAULT_READ_AHEAD,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to read a stream. Nothing is read yet.

        `format` is the format of events, by default the one of the stream's content type (JSON objects, or bytes).

        `begin` is a `position()` or a `StreamCut`. By default, reading begins at the stream's beginning. From a plain
        cut, multi-key transactions that were open there are read in part or not at all. From a position, they are read
        completely.

        Reading ends at `end` (exclusive), and waits for content up to there. Without `end`, reading ends after
        everything that was committed before it began; with `block`, it ends only when the stream is sealed and read.

        If content is gone, StreamTruncated is raised; with `skip_truncated`, reading continues after it instead. If
        the position is from an earlier stream of this name, which was deleted, JournalRecreated is raised; with
        `skip_truncated`, reading continues at the current stream's beginning, and a warning is logged.
        `read_ahead` is in bytes per segment.
        """
        self._client = client
        self._format = format
        self._begin = None if begin is None else StreamPosition.of(begin)
        self._end = None if end is None else dict(end)
        self._block = block
        self._skip_truncated = skip_truncated
        self._read_ahead = read_ahead
        self._pool: SegmentPool[E] = SegmentPool()
        self._clock: Clock = clock or SystemClock()
        self._watch = StreamWatch(client, stream, self._clock, self._pool.woken.set)
        self._windows = TimeWindows(client, stream)
        self._frontier: Frontier | None = None
        self._seen: Stream | None = None  # The newest stream that was compared with the sources.
        self._opened: deque[int] = deque()  # Open segments that are not being read yet.
        self._began: dict[int, int] = {}  # Begins of segments by metadata; retention may have removed more.
        self._done: dict[int, SegmentPosition] = {}  # Open segments that are not being read any more.
        self._rest: deque[Event[E]] = deque()  # Remaining events of a transaction that is delivered event by event.

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop reading. `position` keeps its value."""
        self._done.update(self._pool.positions())
        await self._pool.close()
        await self._watch.close()

    def __aiter__(self) -> AsyncIterator[Event[E]]:
        return self

    async def __anext__(self) -> Event[E]:
        """Return the next event.

        Raises StreamNotFound; StreamTruncated; JournalRecreated; CorruptMessage, after which reading can continue; and
        errors of the client's reads.
        """
        if not self._rest:
            transaction = await self._next()
            if transaction is None:
                raise StopAsyncIteration
            self._rest.extend(transaction.events)
        event = self._rest.popleft()
        if not self._rest:
            self._pool.consume()
        return event

    async def transactions(self) -> AsyncIterator[StreamTransaction[E]]:
        """Yield the remaining events as whole transactions. A plain event is a transaction of one event."""
        while (transaction := await self.next_transaction()) is not None:
            yield transaction

    async def next_transaction(self) -> StreamTransaction[E] | None:
        """Return the next whole transaction; None at the end. Raises the errors of `anext`."""
        if self._rest:
            raise InvalidInput("a transaction is being read event by event: read its other events first")
        transaction = await self._next()
        self._pool.consume()
        return transaction

    def position(self) -> StreamPosition:
        """Return the position to resume from: after everything delivered, and before everything else.

        It is never within a transaction: it is before the transaction until all its events are delivered. It can be
        stored as text (see `StreamPosition`), and used as a `StreamCut`.
        """
        if self._frontier is None:
            return self._begin if self._begin is not None else StreamPosition({})
        return self._frontier.advanced({**self._done, **self._pool.positions()}).position

    async def time_window(self) -> TimeWindow:
        """Return the window of writers' times that the reader has reached, from the marks up to now.

        See `coranto.streams.model.watermarks`.
        """
        if self._frontier is None:
            await self._open()
        return await self._windows.at(self.position(), self._watch.stream)

    def cut(self) -> Mapping[int, int]:
        """Return `position()`, for uses as a `StreamCut`."""
        return self.position()

    # ----------------------------------------------------------------------------------------------------------------

    async def _next(self) -> StreamTransaction[E] | None:
        # A call may be cancelled at any await; its earlier effects stay valid.
        if self._frontier is None:
            await self._open()
        while True:
            self._watch.check()
            self._pool.woken.clear()
            try:
                while self._opened:
                    await self._read_segment(self._opened[0])
                    self._opened.popleft()
                if self._move_on():
                    continue
                transaction = await self._pool.take()
            except StreamTruncated as error:
                if not self._skip_truncated and self._began.pop(error.segment, -1) != self._offset_of(error.segment):
                    raise
                await self._skip(error)
                continue
            except JournalRecreated as error:
                if not self._skip_truncated:
                    raise error.with_advice(_RECREATED) from error
                await self._begin_again(error)
                continue
            if transaction is not None:
                return transaction
            if self._pool.finished():
                continue
            if not self._pool.sources:
                return None
            await self._pool.woken.wait()

    async def _open(self) -> None:
        stream = await self._watch.refresh()
        if self._end is not None and not self._end.keys() <= stream.segments.keys():
            _, revision = await self._client.head_and_revision(stream.heads()[0].journal)
            stream = await self._watch.refresh(revision)
            if unknown := self._end.keys() - stream.segments.keys():
                raise InvalidInput(
                    f"the stream has no segment {min(unknown)} to read up to; give a cut of this stream's segments",
                    field="end",
                )
        if self._block or self._end is not None:
            self._watch.follow()
        if self._format is None:
            self._format = cast(Framing[E], format_of(stream.content_type))
        self._frontier = frontier_at(stream, self._begin, skip_truncated=self._skip_truncated)
        if self._begin is None:
            self._began = {number: at.offset for number, at in self._frontier.open.items()}
        self._opened.extend(self._frontier.open)

    def _move_on(self) -> bool:
        """Complete the segments that are read, and open their successors. Returns False if there are none."""
        segments, moved = self._watch.stream.segments, False
        if self._seen is not self._watch.stream:
            self._seen = self._watch.stream
            for source in self._pool.sources.values():
                segment = segments.get(source.number)
                if source.end is None and segment is not None and segment.sealed_at is not None:
                    source.limit(segment.sealed_at)
        for source in self._pool.finished():
            moved = True
            position = self._pool.remove(source.number)
            self._done[source.number] = position
            segment = segments.get(source.number)
            if segment is not None and segment.sealed_at == position.offset and not self._ends_in(source.number):
                self._complete(source.number, position.offset)
        return moved

    def _complete(self, number: int, end: int) -> None:
        """Complete a segment that is read to its end, and queue the segments that this opens."""
        assert self._frontier is not None
        completion = self._frontier.completion(number, end, self._watch.stream)
        self._done.pop(number, None)
        self._frontier = self._frontier.completed(completion)
        self._opened.extend(completion.opened)

    async def _skip(self, error: StreamTruncated) -> None:
        """Skip content that is gone."""
        _log.info("stream_reader.content_skipped", reason=str(error))
        number = error.segment
        stream = await self._watch.refresh()
        assert self._frontier is not None
        if number in self._pool.sources:
            self._done[number] = self._pool.remove(number)
        at = self._done.pop(number, self._frontier.open[number])
        if number in self._opened:
            self._opened.remove(number)
        if number not in stream.segments:
            self._complete(number, at.offset)
            return
        behind = max(at.offset, error.available or 0, stream.segments[number].begin)
        self._frontier = self._frontier.advanced({number: SegmentPosition(behind)})
        self._opened.append(number)

    async def _begin_again(self, error: JournalRecreated) -> None:
        """Continue at the beginning of the recreated stream, or at the offset where a segment's head was reset."""
        _log.warning(
            "stream_reader.stream_recreated",
            journal=error.journal,
            begin=error.offset,
            end=error.head,
            journal_id_before=error.known,
            journal_id=error.found,
        )
        stream = await self._watch.refresh()
        fallen = [each.number for each in stream.segments.values() if each.journal == error.journal]
        if error.same_through and fallen:
            self._begin_segment_again(fallen[0], SegmentPosition(error.same_through, journal_id=error.found))
            return
        await self._pool.close()
        self._pool.consume()
        self._done.clear()
        self._opened.clear()
        self._rest.clear()
        self._begin = None
        self._frontier = frontier_at(stream)
        self._opened.extend(self._frontier.open)

    def _begin_segment_again(self, number: int, position: SegmentPosition) -> None:
        """Continue in an open segment at the offset where its content differs from the content that was read."""
        assert self._frontier is not None
        if number in self._pool.sources:
            self._pool.remove(number)
        self._done.pop(number, None)
        self._frontier = replace(self._frontier, open={**self._frontier.open, number: position})
        if number not in self._opened:
            self._opened.append(number)

    def _offset_of(self, number: int) -> int:
        """Return the read offset of an open segment."""
        if number in self._pool.sources:
            return self._pool.position(number).offset
        assert self._frontier is not None
        return self._frontier.open[number].offset

    def _ends_in(self, number: int) -> bool:
        """Return True if reading ends in this segment, so that its successors are not read."""
        return self._end is not None and number in self._end

    async def _read_segment(self, number: int) -> None:
        """Begin to read an open segment, up to its bound."""
        assert self._frontier is not None
        assert self._format is not None
        segment = self._watch.stream.segments.get(number)
        if segment is None:
            raise StreamTruncated(
                f"segment {number} is gone; start over, or skip the missing content (skip_truncated)", number
            )
        position = self._frontier.open[number]
        if self._begin is not None and number in self._begin:
            await require_same(self._client, segment, position)
        end = await self._bound(segment)
        self._seen = None
        if end is not None and end < position.offset:
            end = position.offset  # Nothing is left to read.
        source = SegmentSource(
            self._client,
            segment,
            self._format,
            position,
            end=end,
            wake=self._pool.wake,
            read_ahead=self._read_ahead,
            now=self._clock.now,
        )
        self._pool.add(source)

    async def _bound(self, segment: Segment) -> int | None:
        """Return the offset where reading of a segment ends; None while it is unknown."""
        if self._end is not None:
            if segment.number in self._end:
                return self._end[segment.number]
            if segment.number not in ancestors(graph_of(self._watch.stream), self._end):
                return 0
            return segment.sealed_at
        if segment.sealed_at is not None or self._block:
            return segment.sealed_at
        # Everything committed before now is below the head, or in successors that the primary must know of.
        try:
            head, revision = await self._client.head_and_revision(segment.journal)
        except JournalNotFound as error:
            raise StreamTruncated(f"segment {segment.number} is gone: {error}", segment.number) from error
        stream: Stream = self._watch.stream
        if stream.revision < revision:
            stream = await self._watch.refresh(revision)
        now = stream.segments.get(segment.number, segment)
        if now.sealing and now.sealed_at is None:
            self._watch.follow()  # The process that seals it will record its end.
        return now.sealed_at if now.sealing else head
