"""Delivery of events: turning segments into transactions, and merging several segments into one sequence.

`SegmentSource` turns a segment's journal into whole committed transactions. It reads some content ahead, but determines
commits only when the next transaction is requested. So its position is always just after the last transaction that it
delivered. `SegmentPool` takes transactions from several sources in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from coranto.client.client import JournalClient
from coranto.client.values import Chunk
from coranto.errors import CorantoError, CorruptMessage, InvalidInput, JournalNotFound, OffsetJump, StreamTruncated
from coranto.messages.framing import Envelope, Framing
from coranto.messages.pruning import Pruning
from coranto.messages.sequencer import DEFAULT_RING_SIZE, QueueOutcome, Sequencer
from coranto.messages.skew import SkewWatch
from coranto.messages.uuids import Flags, ProducerId, clock_to_ns
from coranto.streams.model.positions import PendingMessages, SegmentPosition
from coranto.streams.model.stream import Segment

E = TypeVar("E")

DEFAULT_READ_AHEAD: Final = 1 << 20
"""Approximate bytes that are read ahead in each segment."""

_PRUNE_EVERY = 1 << 16  # Number of messages after which silent producers are forgotten.
_FIRST_PRUNE = 1 << 10  # The first time sooner, because pruning also reports clocks that are far off.
_IN_A_ROW = 64  # Transactions taken from one segment before the next one gets its turn.


@dataclass(frozen=True, slots=True)
class Event(Generic[E]):
    """An event and its place in a segment."""

    segment: int
    envelope: Envelope[E]

    @property
    def data(self) -> E:
        """The event itself, decoded at each access. Raises CorruptMessage."""
        return self.envelope.message

    @property
    def journal(self) -> str:
        return self.envelope.journal

    @property
    def begin(self) -> int:
        """The offset of its first byte in the journal."""
        return self.envelope.begin

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.envelope.end

    @property
    def uuid(self) -> str:
        return self.envelope.uuid

    @property
    def clock(self) -> int:
        """The clock of its UUID, which orders the events of one writer."""
        return self.envelope.clock

    @property
    def time(self) -> float:
        """The time of writing by its writer's clock, in seconds since the Unix epoch."""
        return clock_to_ns(self.envelope.clock) / 1e9


class StreamTransaction(NamedTuple, Generic[E]):
    """Events of one segment that were committed together. A plain event is a transaction of its own.

    `end` is the offset after the message that committed the transaction: its acknowledgement, or the plain event.
    """

    segment: int
    journal: str
    producer: ProducerId
    clock: int
    end: int
    events: tuple[Event[E], ...]
    """The events in order of writing; never empty."""

    @property
    def begin(self) -> int:
        """The offset of the first event."""
        return self.events[0].begin


class SegmentSource(Generic[E]):
    """The committed transactions of one segment from a position. Close it at the end.

    `end` is the offset to stop at (exclusive). If it is not known yet (see `limit`), the source waits for more content.
    `wake` is called whenever `take` may return a new transaction. `now` is the reader's clock, in seconds since the
    Unix epoch.
    """

    def __init__(
        self,
        client: JournalClient,
        segment: Segment,
        framing: Framing[E],
        position: SegmentPosition,
        *,
        end: int | None,
        wake: Callable[[int], None],
        read_ahead: int = DEFAULT_READ_AHEAD,
        ring_size: int = DEFAULT_RING_SIZE,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.number: Final = segment.number
        self.journal: Final = segment.journal
        self._client = client
        self._framing = framing
        self._wake = wake
        self._read_ahead = read_ahead
        self._now = now
        self._end = end
        self._sequencer: Sequencer[E] = Sequencer({self.journal: position.source()}, ring_size)
        self._pending = {ProducerId(bytes.fromhex(each.producer)): each for each in position.pending}
        self._decoder = framing.decoder(self.journal, position.offset)
        self._decoded: Iterator[Envelope[E]] = iter(())
        self._committing: ProducerId | None = None
        self._until_prune = _FIRST_PRUNE
        self._skew = SkewWatch(self.journal, position.source())
        # The content that is read ahead.
        self._chunks: deque[Chunk] = deque()
        self._buffered = 0
        self._fetched = position.offset
        self._journal_id = position.journal_id if position.offset else ""
        self._has_capacity = asyncio.Event()
        self._failure: CorantoError | None = None
        self._fetching = asyncio.ensure_future(self._fetch())

    @property
    def position(self) -> SegmentPosition:
        """The position after all transactions that were taken."""
        return SegmentPosition(self._offset, tuple(self._pending.values()), journal_id=self._journal_id)

    @property
    def is_finished(self) -> bool:
        """True if everything up to the end was taken."""
        return self._end is not None and self._offset >= self._end

    @property
    def end(self) -> int | None:
        return self._end

    @property
    def _offset(self) -> int:
        return self._sequencer.read_through(self.journal)

    def limit(self, end: int) -> None:
        """Set the offset to stop at, unless it is already known."""
        if self._end is not None:
            return
        self._end = end
        self._fetching.cancel()
        self._fetching = asyncio.ensure_future(self._fetch())
        self._wake(self.number)

    def close(self) -> asyncio.Task[None]:
        """Stop reading. Returns the cancelled task, which may not have ended yet."""
        self._fetching.cancel()
        return self._fetching

    async def take(self) -> StreamTransaction[E] | None:
        """Return the next transaction, or None if there is none yet. A cancelled call takes nothing.

        Raises StreamTruncated if the next content is gone; JournalRecreated if the stream was deleted, and created
        again; CorruptMessage, after which reading can continue; and errors of the client's reads.
        """
        while True:
            if self._sequencer.replay_range is None:
                envelope = self._next_envelope()
                if envelope is None:
                    return None
                self._queue(envelope)
            messages = await self._replayed() if self._sequencer.replay_range is not None else []
            last = None
            while (committed := self._sequencer.step()) is not None:
                last = committed
                if committed.flags != Flags.ACK_TXN or committed.clock == 0:
                    messages.append(committed)
            if last is not None and last.clock:
                self._pending.pop(last.producer, None)
            if messages and last is not None:
                events = tuple(Event(self.number, message) for message in messages)
                return StreamTransaction(self.number, self.journal, last.producer, last.clock, last.end, events)

    def _next_envelope(self) -> Envelope[E] | None:
        while True:
            try:
                envelope = next(self._decoded, None)
            except CorruptMessage:
                self._decoded = self._decoder.feed(b"")  # Continue after the corrupt message.
                raise
            if envelope is not None:
                return envelope
            if not self._chunks:
                break
            chunk = self._chunks.popleft()
            self._buffered -= len(chunk.content)
            self._has_capacity.set()
            self._decoded = self._decoder.feed(chunk.content, chunk.offset)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._fetching = asyncio.ensure_future(self._fetch())  # The next call retries.
            if isinstance(failure, OffsetJump | JournalNotFound):
                raise StreamTruncated(
                    f"segment {self.number} cannot be read from offset {self._fetched}: {failure}",
                    self.number,
                    failure.actual if isinstance(failure, OffsetJump) else None,
                ) from failure
            raise failure
        if self._end is not None and self._fetched >= self._end > self._offset and self._decoder.finish() is not None:
            raise InvalidInput(
                f"offset {self._end} of segment {self.number} is within an event, so it is not a cut; "
                "give the offset of an event's beginning"
            )
        return None

    def _queue(self, envelope: Envelope[E]) -> None:
        outcome = self._sequencer.queue(envelope)
        producer = envelope.producer
        if outcome is QueueOutcome.CONTINUE_BEGIN:
            self._pending[producer] = PendingMessages(producer.hex(), envelope.clock - 1, envelope.begin)
        elif outcome in (QueueOutcome.ACK_ROLLBACK, QueueOutcome.ACK_RESET):
            self._pending.pop(producer, None)
        self._committing = producer
        self._until_prune -= 1
        if self._until_prune <= 0 and not self._sequencer.is_delivering:
            self._until_prune = _PRUNE_EVERY
            now = self._now()
            source = self._sequencer.checkpoint(Pruning(now))[self.journal]
            self._skew.check(source, now)
            self._pending = {each: known for each, known in self._pending.items() if each in source.producers}

    async def _replayed(self) -> list[Envelope[E]]:
        """Read again the committed messages that are no longer held in memory."""
        wanted = self._sequencer.replay_range
        assert wanted is not None
        decoder = self._framing.decoder(self.journal, wanted.begin)
        found: list[Envelope[E]] = []
        chunks = self._client.read(
            self.journal, wanted.begin, end_offset=wanted.end, fail_on_jump=True, journal_id=self._journal_id
        )
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    decoded = decoder.feed(chunk.content, chunk.offset)
                    found.extend(each for each in decoded if each.producer == self._committing)
        except OffsetJump as error:
            raise StreamTruncated(
                f"segment {self.number}: a transaction that began at offset {wanted.begin} was truncated: {error}",
                self.number,
                error.actual,
            ) from error
        # Only after all reads, so that a cancelled call changes nothing.
        committed = [each for each in found if self._sequencer.replay(each)]
        self._sequencer.end_replay()
        return committed

    async def _fetch(self) -> None:
        try:
            while self._end is None or self._fetched < self._end:
                chunks = self._client.read(
                    self.journal,
                    self._fetched,
                    end_offset=self._end or 0,
                    block=True,
                    fail_on_jump=True,
                    journal_id=self._journal_id,
                )
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        self._chunks.append(chunk)
                        self._buffered += len(chunk.content)
                        self._fetched = chunk.end
                        self._journal_id = chunk.journal_id or self._journal_id
                        self._wake(self.number)
                        while self._buffered >= self._read_ahead:
                            self._has_capacity.clear()
                            await self._has_capacity.wait()
        except CorantoError as error:
            self._failure = error
        self._wake(self.number)


class SegmentPool(Generic[E]):
    """Takes transactions from segments in turn, and tracks the transaction that is being consumed.

    The transaction that `take` returned last is *current* until `consume`. Positions do not include it.
    """

    def __init__(self) -> None:
        self.sources: dict[int, SegmentSource[E]] = {}
        self._closing: list[asyncio.Task[None]] = []
        self.woken = asyncio.Event()
        self._ready: dict[int, None] = {}  # Segments that may have transactions, in the order of their turns.
        self._ended: dict[int, None] = {}
        self._in_a_row = 0
        self._current: tuple[int, SegmentPosition] | None = None

    def add(self, source: SegmentSource[E]) -> None:
        self.sources[source.number] = source
        self.wake(source.number)

    def remove(self, number: int) -> SegmentPosition:
        """Remove a segment, even if a transaction of it is current. Returns its consumed position."""
        position = self.position(number)
        self._ready.pop(number, None)
        self._ended.pop(number, None)
        if self._current is not None and self._current[0] == number:
            self._current = None
        self._closing = [task for task in self._closing if not task.done()]
        self._closing.append(self.sources.pop(number).close())
        return position

    async def close(self) -> None:
        for number in list(self.sources):
            self.remove(number)
        closing, self._closing = self._closing, []
        await asyncio.gather(*closing, return_exceptions=True)

    def wake(self, number: int) -> None:
        self._ready[number] = None
        self.woken.set()

    def consume(self) -> None:
        """Mark the current transaction as consumed."""
        self._current = None

    def position(self, number: int) -> SegmentPosition:
        """Return the consumed position of a segment."""
        if self._current is not None and self._current[0] == number:
            return self._current[1]
        return self.sources[number].position

    def positions(self) -> dict[int, SegmentPosition]:
        return {number: self.position(number) for number in self.sources}

    def finished(self) -> list[SegmentSource[E]]:
        """Return the segments that are consumed to their ends, once `take` has found no more transactions in them."""
        if not self._ended:
            return []
        current = self._current[0] if self._current is not None else None
        return [self.sources[number] for number in self._ended if number != current]

    async def take(self) -> StreamTransaction[E] | None:
        """Return the next transaction of any segment; None if there is none yet. Raises the errors of the sources."""
        while self._ready:
            number = next(iter(self._ready))
            source = self.sources.get(number)
            if source is None:
                del self._ready[number]
                continue
            before = source.position
            # The call may be cancelled, so a source stays ready until it has returned None.
            transaction = await source.take()
            if transaction is None:
                self._ready.pop(number, None)
                self._in_a_row = 0
                if source.is_finished:
                    self._ended[number] = None
                continue
            self._current = number, before
            self._in_a_row += 1
            if self._in_a_row >= _IN_A_ROW:
                self._in_a_row = 0
                del self._ready[number]
                self._ready[number] = None
            return transaction
        return None
