"""Reader groups: processes that share the segments of a stream.

Each segment is read by one reader of the group at a time, which reports its position from time to time. When readers
join, leave or fall silent, segments pass to other readers, which continue from the reported positions. Guarantees of a
group:

* The events of each routing key are delivered in order and without gaps, whatever happens to readers. A reader that was
  presumed dead but still runs may deliver events that others deliver too, until it learns of its removal.
* As long as no reader crashes or is presumed dead, each event is delivered once: a segment passes to another reader at
  its consumed position. Otherwise, the events that the reader delivered since its last report are delivered again, by
  other readers. A reader reports every `beat` seconds, at checkpoints, in `commit` and in `close`.
* An event is consumed once the next one is requested. With `auto_commit=False` it is consumed only by `commit`.
* A checkpoint is a cut that every reader has passed, so the results of all readers for the events before it can be
  stored together. After `reset` to it, exactly the events after it are delivered.

The state is in the journal `<stream>/readers/<group>` (see `coranto.streams.groups.state_synchronizer` and
`group_state`). There is no coordinator: each reader acquires and releases segments itself, and detects silent readers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Final, TypeVar

from pydantic import TypeAdapter

from coranto.client.client import JournalClient
from coranto.effects import Clock, Entropy, SystemClock
from coranto.errors import CheckpointRefused, JournalNotFound, StreamNotFound
from coranto.messages.framing import Framing
from coranto.names import validate_token
from coranto.streams.control.lifecycle import Streams
from coranto.streams.control.watching import beginning, describe
from coranto.streams.groups.group_reader import DEFAULT_BEAT, DEFAULT_TIMEOUT, GroupReader, OnCheckpoint
from coranto.streams.groups.group_state import (
    CheckpointBegun,
    CutReleased,
    GroupCheckpoint,
    GroupState,
    GroupUpdate,
    Left,
    Reset,
)
from coranto.streams.groups.state_synchronizer import StateSynchronizer
from coranto.streams.model.frontier import frontier_at
from coranto.streams.model.positions import StreamPosition
from coranto.streams.model.stream import readers_journal, validate_stream
from coranto.streams.reader.delivery import DEFAULT_READ_AHEAD

E = TypeVar("E")


class _GroupModel:
    """The model of a group's state for `StateSynchronizer`."""

    states: Final[TypeAdapter[GroupState]] = TypeAdapter(GroupState)
    updates: Final[TypeAdapter[GroupUpdate]] = TypeAdapter(GroupUpdate)

    def apply(self, state: GroupState, update: GroupUpdate) -> GroupState:
        return update.apply(state)


class ReaderGroup:
    """A group of readers of a stream. Any number of processes may use the same group.

    A cancelled call that only reads leaves nothing behind. After other cancelled calls, the group may or may not have
    changed.
    """

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        name: str,
        *,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        """Refer to a group; nothing is read or created yet. Raises InvalidInput for invalid names."""
        self.stream: Final = validate_stream(stream)
        self.name: Final = validate_token("reader group", name, 1, 64)
        self._client = client
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy
        self._state = self._synchronizer()

    async def create(self, begin: Mapping[int, int] | None = None) -> bool:
        """Create the group, to begin at a position or a cut, or by default at the stream's beginning.

        An existing group is not changed. Returns True if this call created it. Raises StreamNotFound,
        StreamTruncated and InvalidInput.
        """
        stream = await describe(self._client, self.stream)
        frontier = frontier_at(stream, await self._begin_position(begin))
        streams = Streams(self._client, clock=self._clock, entropy=self._entropy)
        # The journal has no retention, because an idle group has only old records.
        await streams.ensure_part(self.stream, self._state.journal, unlimited_retention=True)
        begun = GroupState(frontier, identity=self._entropy(8).hex())
        return (await self._state.initialize(begun)).identity == begun.identity

    def reader(
        self,
        reader: str | None = None,
        *,
        format: Framing[E] | None = None,
        auto_commit: bool = True,
        on_checkpoint: OnCheckpoint | None = None,
        beat: float = DEFAULT_BEAT,
        timeout: float = DEFAULT_TIMEOUT,
        skip_truncated: bool = False,
        read_ahead: int = DEFAULT_READ_AHEAD,
    ) -> GroupReader[E]:
        """Return a reader of the group, to be used as `async with group.reader() as reader:`.

        `reader` is its id, by default a random one. A reader that joins with the id of another replaces it immediately,
        as when a process restarts. Readers send a heartbeat every `beat` seconds, and are presumed dead `timeout`
        seconds after their last one. `format` is the format of events, by default the one of the stream's content type.

        With `auto_commit`, an event is consumed when the next one is requested. Otherwise it is consumed when `commit`
        is called, and iteration also ends whenever it needs a commit to continue.

        `on_checkpoint` is awaited at the mark of a checkpoint, to store the results of everything delivered so far.
        When it returns, the checkpoint is passed, and everything delivered so far is consumed.
        """
        if reader is not None:
            validate_token("reader", reader, 1, 128)
        return GroupReader(
            self._client,
            self.stream,
            self._synchronizer(),
            reader or self._entropy(6).hex(),
            self._entropy(8).hex(),
            format=format,
            auto_commit=auto_commit,
            on_checkpoint=on_checkpoint,
            beat=beat,
            timeout=timeout,
            skip_truncated=skip_truncated,
            read_ahead=read_ahead,
            clock=self._clock,
        )

    async def state(self) -> GroupState:
        """Return the group's members, their segments and all positions. Raises StreamNotFound if there is no group."""
        await self._loaded()
        return await self._state.fetch()

    # -- Checkpoints -------------------------------------------------------------------------------------------------

    async def begin_checkpoint(self, name: str) -> None:
        """Begin a checkpoint. It is complete when every reader has passed it.

        Raises CheckpointRefused if there is one of this name, or too many are under way. After a cancellation, the
        checkpoint may have begun.
        """
        validate_token("checkpoint", name, 1, 128)
        await self._loaded()
        await self._state.update(lambda state: CheckpointBegun(name))

    async def initiate_checkpoint(self, name: str) -> StreamPosition:
        """Begin a checkpoint and wait until it is complete. Returns its position, to store or to `reset` to.

        Use a timeout: a reader that does not request events does not pass a checkpoint. After a cancellation the
        checkpoint continues; `checkpoint` returns it later. Raises the errors of `begin_checkpoint`, and
        CheckpointRefused if the group is reset.
        """
        await self.begin_checkpoint(name)
        async with contextlib.aclosing(self._state.states()) as states:
            async for state in states:
                found = state.checkpoint(name)
                if found is None:
                    raise CheckpointRefused(f"group {self.name} was reset before checkpoint {name} was complete")
                if found.is_complete:
                    return found.position
        raise AssertionError("watching states never ends")

    async def checkpoint(self, name: str | None = None) -> GroupCheckpoint | None:
        """Return a checkpoint, by default the last complete one; None if there is none.

        Groups keep the last eight complete checkpoints.
        """
        state = await self.state()
        return state.last_checkpoint if name is None else state.checkpoint(name)

    # -- Operating the group -----------------------------------------------------------------------------------------

    async def reader_offline(self, reader: str, position: StreamPosition | None = None) -> None:
        """Remove a reader that has ended, so that others take its segments immediately.

        `position` is its position, if known to be later than its last report. Segments that it does not own are
        ignored. Does nothing if there is no such reader. Raises InvalidInput for a position before the reported one.
        """
        await self._loaded()

        def leave(state: GroupState) -> Left | None:
            member = state.members.get(reader)
            if member is None:
                return None
            known = {} if position is None else position.segments
            return Left(reader, member.token, {n: known[n] for n in state.owned_by(reader) if n in known})

        await self._state.fetch()
        await self._state.update(leave)

    async def reset(self, begin: Mapping[int, int] | None = None) -> None:
        """Restart the group at a position or a cut, or by default at the stream's beginning.

        Its readers raise ReaderOffline, and incomplete checkpoints are dropped. Raises StreamTruncated and
        InvalidInput. After a cancellation, the group may have been reset.
        """
        await self._loaded()
        frontier = frontier_at(await describe(self._client, self.stream), await self._begin_position(begin))
        await self._state.update(lambda state: Reset(frontier))

    async def release(self, cut: Mapping[int, int]) -> None:
        """Declare that the group's users no longer need anything before this cut."""
        await self._loaded()
        await self._state.update(lambda state: CutReleased(dict(cut)))

    async def released_cut(self) -> Mapping[int, int] | None:
        """Return the cut before which this group needs nothing: from `release`, or else from the last checkpoint.

        Returns None if there is neither. `coranto.streams.model.frontier.earliest` finds the cut for several groups.
        """
        return (await self.state()).released_cut

    # ----------------------------------------------------------------------------------------------------------------

    def _synchronizer(self) -> StateSynchronizer[GroupState, GroupUpdate]:
        return StateSynchronizer(
            self._client,
            readers_journal(self.stream, self.name),
            _GroupModel(),
            clock=self._clock,
            entropy=self._entropy,
        )

    async def _loaded(self) -> None:
        if not self._state.is_loaded:
            try:
                await self._state.load()
            except JournalNotFound:
                raise StreamNotFound(
                    f"stream {self.stream} has no reader group {self.name}: create() it first"
                ) from None

    async def _begin_position(self, begin: Mapping[int, int] | None) -> StreamPosition:
        if begin is not None:
            return StreamPosition.of(begin)
        return await beginning(self._client, self.stream)
