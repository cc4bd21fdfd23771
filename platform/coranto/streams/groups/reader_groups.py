"""Reader groups: processes that share the segments of a stream.

Each segment is read by one reader of the group at a time, which says now and then how far it is. When readers come, go
or fall silent, segments pass to others, which go on from there. What a group promises:

* The events of each routing key are delivered in order, and none is left out, whatever happens to readers. A reader
  that was taken for dead but lives may deliver again what others deliver too, until it hears of it.
* Without such an end of a reader each event is delivered once: segments pass on at the position up to which their
  events are consumed. When a reader ends otherwise, what it delivered since it last said how far it is is delivered
  again, to others. It says so every `beat` seconds, at checkpoints, in `commit` and in `close`.
* An event is consumed once the next one is asked for. With `auto_commit=False` it is only when `commit` says so.
* A checkpoint is a place that every reader has passed, so what all of them made of the events before it can be kept as
  one. After `reset` to it, exactly the events behind it are delivered.

The state is in the journal `<stream>/readers/<group>` (see `coranto.streams.groups.state_synchronizer` and
`group_state`). There is no coordinator: each reader takes and gives up segments by itself, and each one notices when
another is silent.
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
    Checkpoint,
    CheckpointBegun,
    CutReleased,
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
    """How a group's state is kept."""

    states: Final[TypeAdapter[GroupState]] = TypeAdapter(GroupState)
    updates: Final[TypeAdapter[GroupUpdate]] = TypeAdapter(GroupUpdate)

    def apply(self, state: GroupState, update: GroupUpdate) -> GroupState:
        return update.apply(state)


class ReaderGroup:
    """A group of readers of a stream. Any number of processes may have objects of the same group."""

    def __init__(
        self,
        client: JournalClient,
        stream: str,
        name: str,
        *,
        clock: Clock | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        """Nothing is read or created yet. Raises InvalidInput for names that cannot be."""
        self.stream: Final = validate_stream(stream)
        self.name: Final = validate_token("reader group", name, 1, 64)
        self._client = client
        self._clock: Clock = clock or SystemClock()
        self._entropy = entropy
        self._state = self._synchronizer()

    async def create(self, begin: Mapping[int, int] | None = None) -> bool:
        """Create the group, to begin at a position or a cut, or else where the stream begins.

        A group that is there is left as it is. Returns whether this call has created it. Raises StreamNotFound,
        StreamTruncated and InvalidInput.
        """
        stream = await describe(self._client, self.stream)
        frontier = frontier_at(stream, await self._place(begin))
        streams = Streams(self._client, clock=self._clock, entropy=self._entropy)
        # What retention would remove may be all there is.
        await streams.ensure_part(self.stream, self._state.journal, for_good=True)
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
        """A reader of the group, to be used as `async with group.reader() as reader:`.

        `reader` is its id, by default a random one. Who joins with the id of a reader takes that one's place at once,
        as a process does that starts again; others are missed `timeout` seconds after their last sign of life, which
        they give every `beat` seconds. `format` says what events are; by default the stream's content type does.

        With `auto_commit` an event is consumed when the next one is asked for, otherwise when `commit` is called:
        iteration then also ends when it takes a commit to go on.

        `on_checkpoint` is awaited when the reader is at the mark of a checkpoint, for it to keep what it made of all
        that was delivered so far; when it returns the checkpoint is passed, and all of that consumed.
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
        """Who reads what, and how far everything is. Raises StreamNotFound when there is no such group."""
        await self._loaded()
        return await self._state.fetch()

    # -- Checkpoints -------------------------------------------------------------------------------------------------

    async def begin_checkpoint(self, name: str) -> None:
        """Begin a checkpoint, which is complete when every reader has passed it.

        Raises CheckpointRefused when there is one of this name, or as many as may be are under way.
        """
        validate_token("checkpoint", name, 1, 128)
        await self._loaded()
        await self._state.update(lambda state: CheckpointBegun(name))

    async def initiate_checkpoint(self, name: str) -> StreamPosition:
        """Begin a checkpoint and wait for it. Returns the place in the stream, to keep or to `reset` to.

        Give it a time-out: a reader that does not ask for events does not pass it. Cancelling leaves it under way;
        `checkpoint` finds it later. Raises as `begin_checkpoint`, and CheckpointRefused when the group is reset.
        """
        await self.begin_checkpoint(name)
        async with contextlib.aclosing(self._state.states()) as states:
            async for state in states:
                found = state.checkpoint(name)
                if found is None:
                    raise CheckpointRefused(f"group {self.name} was reset before checkpoint {name} was complete")
                if found.is_complete:
                    return found.position
        raise AssertionError("states go on for ever")

    async def checkpoint(self, name: str | None = None) -> Checkpoint | None:
        """A checkpoint, by default the last complete one. Groups keep the last eight that are complete."""
        state = await self.state()
        return state.last_checkpoint if name is None else state.checkpoint(name)

    # -- Who operates the group --------------------------------------------------------------------------------------

    async def reader_offline(self, reader: str, position: StreamPosition | None = None) -> None:
        """Say that a reader has ended, so that others take its segments at once.

        `position` is how far it had come, if more is known than it said itself; segments that it does not own count
        for nothing. Does nothing when there is no such reader. Raises InvalidInput for a position before what it said.
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
        """Have the group begin again at a position or a cut, or else where the stream begins.

        Its readers get ReaderOffline, and checkpoints under way are dropped. Raises StreamTruncated and InvalidInput.
        """
        await self._loaded()
        frontier = frontier_at(await describe(self._client, self.stream), await self._place(begin))
        await self._state.update(lambda state: Reset(frontier))

    async def release(self, cut: Mapping[int, int]) -> None:
        """Say that the group's users need nothing before this cut any more."""
        await self._loaded()
        await self._state.update(lambda state: CutReleased(dict(cut)))

    async def released_cut(self) -> Mapping[int, int] | None:
        """What precedes it need not be kept for this group: as `release` said, otherwise as of the last checkpoint.

        None when there is neither. `coranto.streams.model.frontier.earliest` finds the cut that suits several groups.
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

    async def _place(self, begin: Mapping[int, int] | None) -> StreamPosition:
        if begin is not None:
            return StreamPosition.of(begin)
        return await beginning(self._client, self.stream)
