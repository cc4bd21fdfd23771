"""`GroupReader`: one reader of a group, in one process.

The reader's segments change only between two transactions, in the task that requests events: this task acquires,
releases and completes segments, and passes checkpoints. Of two background tasks, one follows the group's state, and the
other sends heartbeats and removes silent readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Final, Generic, Self, TypeAlias, TypeVar, cast

import structlog

from coranto.client.client import JournalClient
from coranto.effects import Clock
from coranto.errors import (
    CorantoError,
    InvalidInput,
    JournalRecreated,
    ReaderOffline,
    StreamTruncated,
)
from coranto.messages.framing import Framing
from coranto.streams.control.watching import StreamWatch
from coranto.streams.groups.group_state import (
    Acquired,
    CheckpointPassed,
    Completed,
    GroupState,
    GroupUpdate,
    Joined,
    Left,
    Positions,
    Released,
)
from coranto.streams.groups.presence import Presence
from coranto.streams.groups.state_synchronizer import StateSynchronizer
from coranto.streams.model.events import format_of
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Stream
from coranto.streams.model.watermarks import TimeWindow, TimeWindows
from coranto.streams.reader.delivery import Event, SegmentPool, SegmentSource, StreamTransaction
from coranto.streams.reader.recreated import require_same

E = TypeVar("E")

OnCheckpoint: TypeAlias = Callable[[str], Awaitable[None]]
"""Called with a checkpoint's name when the reader is at its mark. The checkpoint is passed once this returns."""

DEFAULT_BEAT: Final = 5.0
DEFAULT_TIMEOUT: Final = 20.0

_RECREATED: Final = (
    "Reset the group (ReaderGroup.reset): it then begins at the present stream's beginning, without the unread "
    "content of the earlier one."
)
_log = structlog.get_logger(__name__)


class GroupReader(Generic[E]):
    """A reader of a group. Use as `async with group.reader("name") as reader:`, by one task.

    `async for event in reader` yields single events, and `async for transaction in reader.transactions()` yields whole
    transactions. Both wait for more until the stream is sealed and the group has read it (`is_finished`). A cancelled
    call (such as by a timeout) takes no event; simply call again. `ReaderGroup.reader` creates readers.

    Without `auto_commit`, iteration also ends when it needs a commit to continue. This happens if a segment is read to
    its end, whose successors open only once it is consumed, or if a segment must pass to another reader. Commit, and
    iterate again.

    Leaving the block releases the reader's segments. With `auto_commit`, everything delivered then counts as consumed,
    unless an exception leaves the block.
    """

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        group: StateSynchronizer[GroupState, GroupUpdate],
        reader: str,
        token: str,
        *,
        format: Framing[E] | None,
        auto_commit: bool,
        on_checkpoint: OnCheckpoint | None,
        beat: float,
        timeout: float,
        skip_truncated: bool,
        read_ahead: int,
        clock: Clock,
    ) -> None:
        if not 0 < beat < timeout:
            raise InvalidInput(
                f"a reader with a heartbeat every {beat:g} s cannot be considered dead after {timeout:g} s: "
                "give a timeout of several heartbeats",
                field="timeout",
            )
        self.id: Final = reader
        self._token = token
        self._client = client
        self._group = group
        self._format = format
        self._auto_commit = auto_commit
        self._on_checkpoint = on_checkpoint
        self._beat = beat
        self._timeout = timeout
        self._skip_truncated = skip_truncated
        self._read_ahead = read_ahead
        self._clock = clock
        self._pool: SegmentPool[E] = SegmentPool()
        self._watch = StreamWatch(client, stream, clock, self._pool.woken.set)
        self._windows = TimeWindows(client, stream)
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: CorantoError | None = None
        self._rest: deque[Event[E]] = deque()
        self._committed: dict[int, SegmentPosition] = {}  # Consumed positions, from `commit` and checkpoints.
        self._flushed: str | None = None  # The last checkpoint that `on_checkpoint` has completed.
        self._applied: tuple[GroupState, Stream] | None = None
        self._presence: Presence | None = None  # While it is open.

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(consumed=kind is None)

    async def open(self) -> None:
        """Join the group, as entering the block does. A reader with the same id is replaced.

        Raises StreamNotFound if there is no stream or no group, and errors of the client's calls. After a
        cancellation, the reader may be a member until others find it silent.
        """
        await self._group.load()
        stream = await self._watch.refresh()
        if self._format is None:
            self._format = cast(Framing[E], format_of(stream.content_type))
        await self._group.update(lambda state: Joined(self.id, self._token))
        self._presence = Presence(
            self._group,
            self.id,
            self._token,
            self._advances,
            beat=self._beat,
            timeout=self._timeout,
            clock=self._clock,
        )
        self._watch.follow()
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._live(self._presence))]

    async def close(self, *, consumed: bool = True) -> None:
        """Leave the group, so that others continue with the reader's segments.

        With `consumed` and `auto_commit`, they continue after all delivered events. Otherwise they continue after the
        events that were consumed before. After a cancellation, the reader may stay a member until others find it
        silent.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        joined, self._presence, self._tasks = self._presence is not None, None, []
        if consumed and self._auto_commit and not self._rest:
            self._pool.consume()
        if joined and self._failure is None:

            def leave(state: GroupState) -> Left | None:
                if not state.is_member(self.id, self._token):
                    return None
                return Left(self.id, self._token, self._advances(state))

            try:
                await self._group.update(leave)
            except CorantoError as error:
                _log.warning("reader_group.leave_failed", reader=self.id, reason=str(error))
        await self._pool.close()
        await self._watch.close()

    # -- Events ------------------------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Event[E]]:
        return self

    async def __anext__(self) -> Event[E]:
        """Return the next event.

        Raises ReaderOffline if the reader is no longer in the group; StreamTruncated; JournalRecreated, until the group
        is reset; CorruptMessage, after which reading can continue; errors of `on_checkpoint`, which the next call
        retries; and errors of the client's calls.
        """
        if not self._rest:
            transaction = await self._next()
            if transaction is None:
                raise StopAsyncIteration
            self._rest.extend(transaction.events)
        return self._rest.popleft()

    async def transactions(self) -> AsyncIterator[StreamTransaction[E]]:
        """Yield whole transactions. A plain event is a transaction of one event."""
        while (transaction := await self.next_transaction()) is not None:
            yield transaction

    async def next_transaction(self) -> StreamTransaction[E] | None:
        """Return the next whole transaction; None at the end of the stream, or if reading needs a commit to continue.

        Raises the errors of `anext`.
        """
        if self._rest:
            raise InvalidInput("a transaction is being read event by event: read its other events first")
        return await self._next()

    async def commit(self) -> StreamPosition:
        """Commit all delivered events as consumed, so that they are not delivered again. Returns the position.

        Within a transaction, this commits up to its beginning. Raises ReaderOffline if the reader is no longer in the
        group: then nothing was recorded, and other readers deliver the events since the last commit again. Raises
        AppendOutcomeUnknown. After a cancellation, the next heartbeat still commits the position.
        """
        presence = self._check()
        if not self._rest:
            self._pool.consume()
        self._committed = self._pool.positions()
        await presence.confirm()
        position = StreamPosition(self._committed)
        if not self._rest:
            await self._apply_state(between=True)
        return position

    def position(self) -> StreamPosition:
        """Return the reader's position in its segments: after the delivered events, but never within a transaction."""
        positions = self._pool.positions()
        if not self._rest:
            positions.update((number, self._pool.sources[number].position) for number in positions)
        return StreamPosition(positions)

    @property
    def is_finished(self) -> bool:
        """True if the stream is sealed, and the group has read and consumed all of it."""
        frontier = self._group.state.frontier
        return not frontier.open and not frontier.waiting

    async def time_window(self) -> TimeWindow:
        """Return the window of writers' times that the reader has reached in its segments, from the marks up to now."""
        return await self._windows.at(self.position(), self._watch.stream)

    # -- Between transactions ----------------------------------------------------------------------------------------

    async def _next(self) -> StreamTransaction[E] | None:
        """Return the next transaction; None at the end of the stream, or if reading needs a commit to continue."""
        self._pool.consume()  # Without `auto_commit`, only `_committed` counts anyway.
        while True:
            presence = self._check()
            await presence.check()
            self._pool.woken.clear()
            await self._apply_state()
            if await self._complete():
                continue
            try:
                transaction = await self._pool.take()
            except StreamTruncated as error:
                if not self._skip_truncated:
                    raise
                await self._skip(error)
                continue
            except JournalRecreated as error:
                raise error.with_advice(_RECREATED) from error
            if transaction is not None:
                return transaction
            if self._pool.finished() and self._may_pass_on(between=False):
                continue
            if self.is_finished or self._awaits_commit():
                return None
            await self._pool.woken.wait()

    def _check(self) -> Presence:
        if self._presence is None:
            raise InvalidInput(f"reader {self.id} is not open: use it in `async with`")
        self._watch.check()
        if self._failure is not None:
            raise self._failure
        return self._presence

    async def _apply_state(self, *, between: bool = False) -> None:
        """Apply the group's and the stream's state. `between` also allows changes that have to wait for a commit."""
        while between or not self._is_applied():
            state, stream = self._group.state, self._watch.stream
            state.require(self.id, self._token)
            await self._follow_ownership(state, stream)
            if await self._pass_checkpoint(state):
                continue
            if between:
                await self._complete(between=True)
            if await self._balance(self._group.state, between):
                continue
            between = False
            self._applied = state, stream

    def _is_applied(self) -> bool:
        if self._applied is None:
            return False
        state, stream = self._applied
        return state is self._group.state and stream is self._watch.stream

    async def _follow_ownership(self, state: GroupState, stream: Stream) -> None:
        """Read exactly the segments that are owned, and stop at the final offsets of sealed ones."""
        owned = state.owned_by(self.id)
        for number in self._pool.sources.keys() - owned.keys():
            self._pool.remove(number)
            self._committed.pop(number, None)
        for number, position in owned.items():
            if number not in self._pool.sources:
                await self._read(number, position)
        for source in self._pool.sources.values():
            segment = stream.segments.get(source.number)
            if source.end is None and segment is not None and segment.sealed_at is not None:
                source.limit(segment.sealed_at)

    async def _read(self, number: int, position: SegmentPosition) -> None:
        segment = self._watch.stream.segments.get(number)
        if segment is None:
            # The segment is new and only other processes know it yet, or it is gone.
            segments = self._watch.stream.segments
            _, revision = await self._client.head_and_revision(segments[max(segments)].journal)
            segment = (await self._watch.refresh(revision)).segments.get(number)
            if segment is None:
                error = StreamTruncated(f"segment {number} is gone, but was to be read from {position}", number)
                if not self._skip_truncated:
                    raise error
                await self._skip(error)
                return
        assert self._format is not None
        try:
            await require_same(self._client, segment, position)
        except JournalRecreated as error:
            raise error.with_advice(_RECREATED) from error
        source = SegmentSource(
            self._client,
            segment,
            self._format,
            position,
            end=None if segment.sealed_at is None else max(segment.sealed_at, position.offset),
            wake=self._pool.wake,
            read_ahead=self._read_ahead,
            now=self._clock.now,
        )
        self._pool.add(source)
        self._committed[number] = position

    async def _pass_checkpoint(self, state: GroupState) -> bool:
        name = state.to_pass(self.id)
        if name is None:
            return False
        if self._on_checkpoint is not None and self._flushed != name:
            await self._on_checkpoint(name)
        self._flushed = name
        # Everything delivered is before the mark, and `on_checkpoint` has stored the results.
        self._committed = self._pool.positions()

        def passed(now: GroupState) -> CheckpointPassed | None:
            now.require(self.id, self._token)
            if now.to_pass(self.id) != name:
                return None
            owned = now.owned_by(self.id)
            positions = {number: self._committed.get(number, position) for number, position in owned.items()}
            return CheckpointPassed(self.id, self._token, name, positions)

        await self._group.update(passed)
        return True

    async def _complete(self, *, between: bool = False) -> bool:
        """Complete the segments that are consumed to their ends. Returns True if there were any."""
        finished = self._pool.finished()
        if not finished or not self._may_pass_on(between):
            return False
        for source in finished:
            await self._completed(source.number, source.position.offset)
        return bool(finished)

    async def _completed(self, number: int, end: int) -> None:
        stream = self._watch.stream

        def completed(state: GroupState) -> Completed | None:
            state.require(self.id, self._token)
            if state.owners.get(number) != self.id:
                return None  # An earlier, cancelled attempt has succeeded.
            return Completed(self.id, self._token, state.frontier.completion(number, end, stream))

        await self._group.update(completed)
        if number in self._pool.sources:
            self._pool.remove(number)
        self._committed.pop(number, None)

    async def _balance(self, state: GroupState, between: bool) -> bool:
        """Acquire or release segments to reach a fair share. Returns True if it tried to."""
        share = state.share(self.id)
        if share > 0 and state.unowned() and state.to_pass(self.id) is None:

            def acquire(now: GroupState) -> Acquired | None:
                now.require(self.id, self._token)
                wanted = now.unowned()[: max(0, now.share(self.id))]
                if not wanted or now.to_pass(self.id) is not None:
                    return None
                return Acquired(self.id, self._token, tuple(wanted))

            await self._group.update(acquire)
            return True
        if share < 0 and self._may_pass_on(between):

            def release(now: GroupState) -> Released | None:
                now.require(self.id, self._token)
                here = [number for number in sorted(now.owned_by(self.id)) if number in self._pool.sources]
                too_many = max(0, -now.share(self.id))
                positions = {number: self._pool.position(number) for number in here[len(here) - too_many :]}
                return Released(self.id, self._token, positions) if positions else None

            await self._group.update(release)
            return True
        return False

    async def _skip(self, error: StreamTruncated) -> None:
        """Skip content that is gone."""
        _log.warning("reader_group.content_skipped", reader=self.id, reason=str(error))
        number = error.segment
        stream = await self._watch.refresh()
        position = (
            self._pool.remove(number) if number in self._pool.sources else self._group.state.frontier.open[number]
        )
        if number not in stream.segments:
            await self._completed(number, position.offset)
            return
        behind = max(position.offset, error.available or 0, stream.segments[number].begin)
        await self._read(number, SegmentPosition(behind))

    def _may_pass_on(self, between: bool) -> bool:
        """Return True if segments may be released and completed: everything delivered counts as consumed."""
        if self._auto_commit or between:
            return True
        return all(self._committed[number] == source.position for number, source in self._pool.sources.items())

    def _awaits_commit(self) -> bool:
        """Return True if reading needs a commit to continue."""
        behind = self._pool.finished() or self._group.state.share(self.id) < 0
        return bool(behind) and not self._may_pass_on(between=False)

    def _advances(self, state: GroupState) -> Positions:
        """Return the consumed positions of the reader's segments that are ahead of the group's state."""
        found = {}
        for number, known in state.owned_by(self.id).items():
            if number in self._pool.sources:
                position = self._pool.position(number) if self._auto_commit else self._committed[number]
                if position.offset > known.offset:
                    found[number] = position
        return found

    # -- In the background -------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Wake the reader whenever the group's state changes."""
        try:
            async with contextlib.aclosing(self._group.states()) as states:
                async for _ in states:
                    self._pool.woken.set()
        except CorantoError as error:
            self._fail(error)

    async def _live(self, presence: Presence) -> None:
        """Keep the reader in the group."""
        try:
            await presence.run()
        except CorantoError as error:
            self._fail(error)

    def _fail(self, error: CorantoError) -> None:
        if self._failure is None:
            self._failure = error
            if isinstance(error, ReaderOffline):
                _log.warning("reader_group.reader_evicted", reader=self.id)
        self._pool.woken.set()
