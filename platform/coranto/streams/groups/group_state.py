"""The state of a reader group, and the updates that change it. Pure.

The readers of a group share the open segments of a stream. The state is replicated by a log of updates
(`coranto.streams.groups.state_synchronizer`). Each update is decided on the newest state and applies to exactly that
state, so of two conflicting updates only one gets into the log, and the other is decided again. Invariants:

* an open segment has at most one owner, which is a member;
* positions only advance, and only owners advance them (or a process that removes the owner);
* a segment opens once all its predecessors are complete;
* a member is identified by its id and its own token. A later member with the same id replaces it. Updates by a former
  member are refused with ReaderOffline, however late they are.

Checkpoints
-----------

A checkpoint divides the stream's events into those before it and those after it. When it begins, the members are listed
in `remaining`. Each member passes its *mark* between two transactions, and reports the positions in its segments. Until
then it acquires no segment, so it reads only segments that it owned when the checkpoint began. A segment that it loses
before its mark (because it releases or completes the segment, leaves, or is presumed dead) counts with the position at
that time, and only readers past their marks can acquire it. Hence the positions always form a consistent cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, PlainSerializer

from coranto.errors import CheckpointRefused, InvalidInput, ReaderOffline
from coranto.streams.model.frontier import Completion, Frontier
from coranto.streams.model.positions import SegmentPosition, StreamPosition

MAX_OUTSTANDING: Final = 3
"""Maximum incomplete checkpoints at a time."""
KEPT_CHECKPOINTS: Final = 8
"""Maximum complete checkpoints that a group keeps."""

Positions: TypeAlias = Mapping[int, SegmentPosition]
# Sorted, so that equal states are serialized to equal bytes in every process.
Names: TypeAlias = Annotated[frozenset[str], PlainSerializer(sorted, return_type=list[str])]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A reader of the group. `beat` counts its heartbeats."""

    token: str
    beat: int = 0


@dataclass(frozen=True, slots=True)
class GroupCheckpoint:
    """A checkpoint. `remaining` are the readers that have yet to pass it; it is complete once there are none."""

    name: str
    remaining: Names
    positions: Positions

    @property
    def is_complete(self) -> bool:
        return not self.remaining

    @property
    def position(self) -> StreamPosition:
        return StreamPosition(self.positions)


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a reader group; see the module.

    `identity` is a random value that the group was created with. `generation` counts resets. `released` is a cut: the
    group's users no longer need anything before it.
    """

    frontier: Frontier = field(default_factory=Frontier)
    identity: str = ""
    generation: int = 0
    members: Mapping[str, GroupMember] = field(default_factory=dict)
    owners: Mapping[int, str] = field(default_factory=dict)
    checkpoints: tuple[GroupCheckpoint, ...] = ()
    released: Mapping[int, int] | None = None

    def owned_by(self, reader: str) -> Positions:
        """Return the segments of a reader, with the positions where it began or that it last reported."""
        return {number: self.frontier.open[number] for number, owner in self.owners.items() if owner == reader}

    def unowned(self) -> list[int]:
        return [number for number in sorted(self.frontier.open) if number not in self.owners]

    def to_pass(self, reader: str) -> str | None:
        """Return the name of the checkpoint that a reader has to pass next; None if there is none."""
        return next((each.name for each in self.checkpoints if reader in each.remaining), None)

    def checkpoint(self, name: str) -> GroupCheckpoint | None:
        return next((each for each in self.checkpoints if each.name == name), None)

    @property
    def last_checkpoint(self) -> GroupCheckpoint | None:
        """The complete checkpoint that began last."""
        return next((each for each in reversed(self.checkpoints) if each.is_complete), None)

    @property
    def released_cut(self) -> Mapping[int, int] | None:
        """The cut before which the group needs nothing: released by its users, or else the last checkpoint."""
        if self.released is not None:
            return self.released
        last = self.last_checkpoint
        return last.position if last is not None else None

    def is_member(self, reader: str, token: str) -> bool:
        member = self.members.get(reader)
        return member is not None and member.token == token

    def require(self, reader: str, token: str) -> None:
        """Raise ReaderOffline unless the reader is a member with this token."""
        if not self.is_member(reader, token):
            raise ReaderOffline(
                f"reader {reader} is not a member of its group (any more): it was silent for too long, another reader "
                "took its name, or the group was reset. Events that it delivered after its last reported position will "
                "be delivered again; create another reader to continue"
            )

    def share(self, reader: str) -> int:
        """Return the number of segments that the reader should acquire for balance; negative: that it should release.

        In a balanced group, the numbers of segments per reader differ by at most one. If some segments have no owner,
        the result is positive for some reader. If all have owners but the group is not balanced, it is negative for
        some reader.
        """
        if reader not in self.members:
            return 0
        counts = dict.fromkeys(self.members, 0)
        for owner in self.owners.values():
            counts[owner] += 1
        least, larger = divmod(len(self.frontier.open), len(counts))
        mine = counts[reader]
        if mine < least:
            return least - mine
        if mine > least + 1:
            return least + 1 - mine
        with_more = sum(count > least for count in counts.values())
        if mine == least:
            return 1 if with_more < larger else 0
        # Too many readers have one segment more than `least`. The last ones by name have to release one.
        holders = sorted(name for name, count in counts.items() if count > least)
        return -1 if reader in holders[larger:] else 0

    # -- Steps of updates --------------------------------------------------------------------------------------------

    def _advanced(self, reader: str, positions: Positions) -> GroupState:
        for number in positions:
            if self.owners.get(number) != reader:
                raise ReaderOffline(
                    f"segment {number} is not (any more) owned by reader {reader}: it cannot advance it"
                )
        return replace(self, frontier=self.frontier.advanced(positions)) if positions else self

    def _recorded(self, reader: str, positions: Positions) -> GroupState:
        """Return the state with positions recorded in the checkpoints that the reader has yet to pass."""
        if not any(reader in each.remaining for each in self.checkpoints):
            return self
        return replace(
            self,
            checkpoints=tuple(
                replace(each, positions={**each.positions, **positions}) if reader in each.remaining else each
                for each in self.checkpoints
            ),
        )

    def _without_owner(self, numbers: Iterable[int]) -> GroupState:
        gone = set(numbers)
        return replace(self, owners={each: owner for each, owner in self.owners.items() if each not in gone})

    def _passed(self, reader: str, name: str | None) -> GroupState:
        """Return the state after the reader passes one checkpoint, or all of them (`name` None).

        The oldest complete checkpoints are dropped.
        """
        checkpoints = [
            replace(each, remaining=each.remaining - {reader}) if name in (None, each.name) else each
            for each in self.checkpoints
        ]
        return replace(self, checkpoints=_kept(checkpoints))


def _kept(checkpoints: Iterable[GroupCheckpoint]) -> tuple[GroupCheckpoint, ...]:
    listed = tuple(checkpoints)
    complete = [each for each in listed if each.is_complete]
    forgotten = {each.name for each in complete[: max(0, len(complete) - KEPT_CHECKPOINTS)]}
    return tuple(each for each in listed if each.name not in forgotten)


# ------------------------------------------------------------------------------------------------------------- updates
#
# `apply` raises InvalidInput or ReaderOffline if the update cannot be applied to the state.


@dataclass(frozen=True, slots=True)
class Joined:
    """A reader becomes a member. A former member with the same id is removed first, as if it were dead."""

    reader: str
    token: str
    kind: Literal["joined"] = "joined"

    def apply(self, state: GroupState) -> GroupState:
        former = state.members.get(self.reader)
        if former is not None:
            state = Left(self.reader, former.token).apply(state)
        return replace(state, members={**state.members, self.reader: GroupMember(self.token)})


@dataclass(frozen=True, slots=True)
class Left:
    """A reader is no longer a member: it left, or others consider it dead. Its segments no longer have an owner.

    `positions` are known positions of its segments that are later than its last report.
    """

    reader: str
    token: str
    positions: Positions = field(default_factory=dict)
    kind: Literal["left"] = "left"

    def apply(self, state: GroupState) -> GroupState:
        state.require(self.reader, self.token)
        state = state._advanced(self.reader, self.positions)
        owned = state.owned_by(self.reader)
        state = state._recorded(self.reader, owned)._without_owner(owned)._passed(self.reader, None)
        return replace(state, members={id_: each for id_, each in state.members.items() if id_ != self.reader})


@dataclass(frozen=True, slots=True)
class Beat:
    """A reader's heartbeat, with its positions."""

    reader: str
    token: str
    positions: Positions = field(default_factory=dict)
    kind: Literal["beat"] = "beat"

    def apply(self, state: GroupState) -> GroupState:
        state.require(self.reader, self.token)
        member = GroupMember(self.token, state.members[self.reader].beat + 1)
        return replace(state._advanced(self.reader, self.positions), members={**state.members, self.reader: member})


@dataclass(frozen=True, slots=True)
class Acquired:
    """A reader takes segments that have no owner."""

    reader: str
    token: str
    segments: tuple[int, ...]
    kind: Literal["acquired"] = "acquired"

    def apply(self, state: GroupState) -> GroupState:
        state.require(self.reader, self.token)
        if state.to_pass(self.reader) is not None:
            raise InvalidInput(f"reader {self.reader} must pass checkpoint {state.to_pass(self.reader)} first")
        taken = {each for each in self.segments if each not in state.frontier.open or each in state.owners}
        if taken:
            raise InvalidInput(f"segments {sorted(taken)} cannot be acquired (closed or owned) by reader {self.reader}")
        return replace(state, owners={**state.owners, **dict.fromkeys(self.segments, self.reader)})


@dataclass(frozen=True, slots=True)
class Released:
    """A reader gives up segments. Others continue from these positions."""

    reader: str
    token: str
    positions: Positions
    kind: Literal["released"] = "released"

    def apply(self, state: GroupState) -> GroupState:
        state.require(self.reader, self.token)
        state = state._advanced(self.reader, self.positions)
        return state._recorded(self.reader, self.positions)._without_owner(self.positions)


@dataclass(frozen=True, slots=True)
class Completed:
    """A reader has read a segment to its end."""

    reader: str
    token: str
    completion: Completion
    kind: Literal["completed"] = "completed"

    def apply(self, state: GroupState) -> GroupState:
        state.require(self.reader, self.token)
        number = self.completion.number
        end = SegmentPosition(max(self.completion.end, state.frontier.open[number].offset), complete=True)
        state = state._advanced(self.reader, {number: end})
        state = state._recorded(self.reader, {number: end})._without_owner([number])
        return replace(state, frontier=state.frontier.completed(self.completion))


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    name: str
    kind: Literal["checkpoint-begun"] = "checkpoint-begun"

    def apply(self, state: GroupState) -> GroupState:
        if state.checkpoint(self.name) is not None:
            raise CheckpointRefused(f"there is a checkpoint {self.name} already: give this one another name")
        outstanding = [each.name for each in state.checkpoints if not each.is_complete]
        if len(outstanding) >= MAX_OUTSTANDING:
            raise CheckpointRefused(f"checkpoints {', '.join(outstanding)} are under way: wait for one of them")
        # Owned segments count when their owners pass, unowned ones now: only readers past their marks acquire them.
        settled = {n: at for n, at in state.frontier.position.segments.items() if n not in state.owners}
        begun = GroupCheckpoint(self.name, frozenset(state.members), settled)
        return replace(state, checkpoints=_kept([*state.checkpoints, begun]))


@dataclass(frozen=True, slots=True)
class CheckpointPassed:
    """A reader passes its next checkpoint. `positions` cover all its segments."""

    reader: str
    token: str
    name: str
    positions: Positions
    kind: Literal["checkpoint-passed"] = "checkpoint-passed"

    def apply(self, state: GroupState) -> GroupState:
        state.require(self.reader, self.token)
        if state.to_pass(self.reader) != self.name:
            raise InvalidInput(f"reader {self.reader} has to pass {state.to_pass(self.reader)}, not {self.name}")
        if self.positions.keys() != state.owned_by(self.reader).keys():
            raise InvalidInput(f"reader {self.reader} must report the positions of all its segments, and of no other")
        state = state._advanced(self.reader, self.positions)
        checkpoints = tuple(
            replace(each, positions={**each.positions, **self.positions}) if each.name == self.name else each
            for each in state.checkpoints
        )
        return replace(state, checkpoints=checkpoints)._passed(self.reader, self.name)


@dataclass(frozen=True, slots=True)
class Reset:
    """Reading restarts from `frontier`. All readers are removed, and incomplete checkpoints are dropped."""

    frontier: Frontier
    kind: Literal["reset"] = "reset"

    def apply(self, state: GroupState) -> GroupState:
        complete = tuple(each for each in state.checkpoints if each.is_complete)
        return GroupState(
            self.frontier, state.identity, state.generation + 1, checkpoints=complete, released=state.released
        )


@dataclass(frozen=True, slots=True)
class CutReleased:
    """The group's users no longer need anything before this cut."""

    cut: Mapping[int, int]
    kind: Literal["cut-released"] = "cut-released"

    def apply(self, state: GroupState) -> GroupState:
        return replace(state, released=dict(self.cut))


GroupUpdate: TypeAlias = Annotated[
    Joined | Left | Beat | Acquired | Released | Completed | CheckpointBegun | CheckpointPassed | Reset | CutReleased,
    Field(discriminator="kind"),
]


class Liveness:
    """Finds members that are silent for too long, by one observer's own clock. Two clocks are never compared."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[GroupMember, float]] = {}

    def silent(self, state: GroupState, now: float, timeout: float) -> list[tuple[str, str]]:
        """Return ids and tokens of members without a heartbeat for `timeout` seconds. `now` is in monotonic seconds."""
        seen = {}
        for reader, member in state.members.items():
            known = self._seen.get(reader)
            seen[reader] = known if known is not None and known[0] == member else (member, now)
        self._seen = seen
        return [(reader, member.token) for reader, (member, since) in seen.items() if now - since >= timeout]
