"""Reader groups as values: any order of updates by readers that join, leave, die and return as zombies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from coranto.errors import CheckpointRefused, InvalidInput, ReaderOffline
from coranto.streams.groups.group_state import (
    MAX_OUTSTANDING,
    Acquired,
    Beat,
    CheckpointBegun,
    CheckpointPassed,
    Completed,
    GroupMember,
    GroupState,
    GroupUpdate,
    Joined,
    Left,
    Liveness,
    Released,
    Reset,
)
from coranto.streams.model.frontier import Frontier, ancestors, earliest, frontier_at, graph_of
from coranto.streams.model.keys import KeyRange
from coranto.streams.model.positions import SegmentPosition, StreamPosition
from coranto.streams.model.stream import Stream
from tests.platform.streams.random_streams import random_stream, segment

UPDATES: TypeAdapter[GroupUpdate] = TypeAdapter(GroupUpdate)
STATES = TypeAdapter(GroupState)


@dataclass
class Reader:
    """The actual state of a reading process, which the group does not see."""

    id: str
    token: str
    at: dict[int, int] = field(default_factory=dict)  # Its actual offsets in the segments that it believes it owns.
    delivered: list[tuple[int, int]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)  # Events delivered before each passed checkpoint.
    dead: bool = False


class Simulation:
    def __init__(self, stream: Stream, rng: random.Random) -> None:
        self.stream = stream
        self.rng = rng
        self.state = GroupState(frontier_at(stream))
        self.readers: list[Reader] = []
        self.begun: dict[str, int] = {}  # The number of readers so far at each checkpoint.
        self.refused = 0

    def apply(self, update: GroupUpdate) -> None:
        """Apply an update as the log does, and check all invariants."""
        decoded = UPDATES.validate_json(UPDATES.dump_json(update))
        assert decoded == update
        before, after = self.state, decoded.apply(self.state)
        assert STATES.validate_json(STATES.dump_json(after)) == after
        for number, owner in after.owners.items():
            assert number in after.frontier.open
            assert owner in after.members
        for number in before.frontier.open.keys() & after.frontier.open.keys():
            assert after.frontier.open[number].offset >= before.frontier.open[number].offset
        graph = graph_of(self.stream)
        for number in after.frontier.open:
            for predecessor in graph[number]:
                assert predecessor not in after.frontier.open
                assert predecessor not in after.frontier.waiting
        covered = [self.stream.segments[number].range for number in after.frontier.position]
        assert sum(each.width for each in covered) == KeyRange.FULL.width
        assert KeyRange.merge(covered) == KeyRange.FULL
        self.state = after

    def step(self) -> None:
        kind = self.rng.choices(
            ["join", "die", "leave", "expire", "read", "beat", "balance", "complete", "checkpoint", "pass"],
            [1, 0.3, 0.3, 0.5, 8, 2, 4, 4, 0.5, 3],
        )[0]
        if kind == "join" or not self.readers:
            name = f"r{self.rng.randrange(4)}"
            reader = Reader(name, f"t{len(self.readers)}")
            self.readers.append(reader)
            self.apply(Joined(reader.id, reader.token))
            return
        reader = self.rng.choice(self.readers)
        if kind == "expire":
            # Any reader may be taken for dead, dead or not.
            member = self.state.members.get(reader.id)
            if member is not None:
                self.apply(Left(reader.id, member.token))
        elif kind == "die":
            reader.dead = True
        elif kind == "checkpoint":
            name = f"c{len(self.begun)}"
            if sum(not each.is_complete for each in self.state.checkpoints) < MAX_OUTSTANDING:
                self.begun[name] = len(self.readers)
                self.apply(CheckpointBegun(name))
            else:
                with pytest.raises(CheckpointRefused):
                    CheckpointBegun(name).apply(self.state)
        elif not reader.dead:
            try:
                getattr(self, f"_{kind}")(reader)
            except ReaderOffline:
                # A zombie. It continues until it reads the state.
                assert not self.state.is_member(reader.id, reader.token)
                self.refused += 1
                reader.dead = True

    def _read(self, reader: Reader) -> None:
        for number, at in reader.at.items():
            if at < self.end(number):
                reader.delivered.append((number, at))
                reader.at[number] += 1
                return

    def _beat(self, reader: Reader) -> None:
        self.apply(Beat(reader.id, reader.token, self.positions(reader)))

    def _leave(self, reader: Reader) -> None:
        self.apply(Left(reader.id, reader.token, self.positions(reader)))
        reader.dead = True

    def _balance(self, reader: Reader) -> None:
        self.state.require(reader.id, reader.token)
        share = self.state.share(reader.id)
        if share > 0 and self.state.to_pass(reader.id) is None:
            wanted = tuple(self.state.unowned()[:share])
            self.apply(Acquired(reader.id, reader.token, wanted))
            reader.at.update((number, self.state.frontier.open[number].offset) for number in wanted)
        elif share > 0 and self.state.unowned():
            with pytest.raises(InvalidInput):
                Acquired(reader.id, reader.token, (self.state.unowned()[0],)).apply(self.state)
        elif share < 0:
            given_up = self.rng.sample(sorted(reader.at), -share)
            self.apply(Released(reader.id, reader.token, {n: SegmentPosition(reader.at.pop(n)) for n in given_up}))

    def _complete(self, reader: Reader) -> None:
        for number, at in list(reader.at.items()):
            if at == self.end(number):
                self.state.require(reader.id, reader.token)
                completion = self.state.frontier.completion(number, at, self.stream)
                self.apply(Completed(reader.id, reader.token, completion))
                del reader.at[number]
                return

    def _pass(self, reader: Reader) -> None:
        self.state.require(reader.id, reader.token)
        name = self.state.to_pass(reader.id)
        if name is not None:
            self.apply(CheckpointPassed(reader.id, reader.token, name, self.positions(reader)))
            reader.marks[name] = len(reader.delivered)

    def finish(self) -> None:
        """All other readers are dead; one reader reads the rest."""
        for id_, member in list(self.state.members.items()):
            self.apply(Left(id_, member.token))
        last = Reader("last", "last")
        self.readers.append(last)
        self.apply(Joined(last.id, last.token))
        while self.state.frontier.open:
            for act in (self._balance, self._read, self._complete):
                act(last)

    def positions(self, reader: Reader) -> dict[int, SegmentPosition]:
        return {number: SegmentPosition(at) for number, at in reader.at.items()}

    def end(self, number: int) -> int:
        end = self.stream.segments[number].sealed_at
        assert end is not None
        return end


def events(stream: Stream, frontier: Frontier) -> Iterator[tuple[int, int]]:
    """Yield all events from a frontier, in one valid order."""
    while frontier.open:
        number, position = next(iter(frontier.open.items()))
        end = stream.segments[number].sealed_at
        assert end is not None
        yield from ((number, offset) for offset in range(position.offset, end))
        frontier = frontier.completed(frontier.completion(number, end, stream))
    assert not frontier.waiting


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_any_order_of_updates_reads_all_in_order_with_consistent_checkpoints(seed: int) -> None:
    rng = random.Random(seed)
    stream = random_stream(rng)
    simulation = Simulation(stream, rng)
    for _ in range(100):
        simulation.step()
    simulation.finish()

    everything = {(n, offset) for n, each in stream.segments.items() for offset in range(each.sealed_at or 0)}
    assert {event for reader in simulation.readers for event in reader.delivered} == everything
    assert all(each.is_complete for each in simulation.state.checkpoints)
    for checkpoint in simulation.state.checkpoints:
        restored = list(events(stream, frontier_at(stream, checkpoint.position)))
        after = set(restored)
        assert len(restored) == len(after)
        before = everything - after
        counted: set[tuple[int, int]] = set()
        for index, reader in enumerate(simulation.readers):
            if checkpoint.name in reader.marks:
                mark = reader.marks[checkpoint.name]
                assert set(reader.delivered[:mark]) <= before
                assert set(reader.delivered[mark:]) <= after
                counted |= set(reader.delivered[:mark])
            elif index < simulation.begun[checkpoint.name]:
                # It was removed before it passed, so its events count up to its last reported position.
                counted |= set(reader.delivered)
            else:
                assert set(reader.delivered) <= after
        assert before <= counted


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_each_key_is_read_in_order_from_any_frontier(seed: int) -> None:
    rng = random.Random(seed)
    stream = random_stream(rng, scalings=6)
    graph = graph_of(stream)
    seen: list[int] = []
    for number, _ in events(stream, frontier_at(stream)):
        assert number not in ancestors(graph, seen), "a predecessor was read after its successor"
        seen.append(number)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_balancing_ends_with_fair_shares_and_all_segments_owned(seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(random_stream(rng, scalings=0), rng)
    simulation.state = GroupState(Frontier({n: SegmentPosition(0) for n in range(rng.randint(0, 20))}))
    simulation.stream = Stream("s", {n: segment(n, part) for n, part in enumerate(KeyRange.FULL.split(20))})
    for index in range(rng.randint(1, 6)):
        simulation.readers.append(Reader(f"r{index}", "t"))
        simulation.state = Joined(f"r{index}", "t").apply(simulation.state)
    if rng.random() < 0.5:  # Start from arbitrary shares.
        for number in simulation.state.frontier.open:
            reader = rng.choice(simulation.readers)
            reader.at[number] = 0
            simulation.state = Acquired(reader.id, "t", (number,)).apply(simulation.state)
    rounds = 0
    while True:
        before = simulation.state
        for reader in rng.sample(simulation.readers, len(simulation.readers)):
            share = simulation.state.share(reader.id)
            if share < 0:
                given_up = {n: SegmentPosition(0) for n in sorted(reader.at)[share:]}
                simulation.state = Released(reader.id, "t", given_up).apply(simulation.state)
                for number in given_up:
                    del reader.at[number]
            elif wanted := simulation.state.unowned()[: max(share, 0)]:
                simulation.state = Acquired(reader.id, "t", tuple(wanted)).apply(simulation.state)
                reader.at.update(dict.fromkeys(wanted, 0))
        rounds += 1
        if simulation.state == before:
            break
        assert rounds < 10, "balancing does not end"
    shares = [len(reader.at) for reader in simulation.readers]
    assert not simulation.state.unowned()
    assert max(shares) - min(shares) <= 1


def two_readers() -> GroupState:
    """A state of two segments: r0 owns segment 0, r1 owns segment 1."""
    state = GroupState(Frontier({0: SegmentPosition(0), 1: SegmentPosition(0)}))
    for update in (Joined("r0", "a"), Joined("r1", "b"), Acquired("r0", "a", (0,)), Acquired("r1", "b", (1,))):
        state = update.apply(state)
    return state


@pytest.mark.parametrize(
    "late",
    [
        Beat("r0", "a", {0: SegmentPosition(9)}),
        Released("r0", "a", {0: SegmentPosition(9)}),
        Left("r0", "a", {0: SegmentPosition(9)}),
        CheckpointPassed("r0", "a", "c", {0: SegmentPosition(9)}),
        Acquired("r0", "a", (0,)),
    ],
)
def test_every_update_of_a_zombie_is_refused(late: GroupUpdate) -> None:
    state = Left("r0", "a").apply(CheckpointBegun("c").apply(two_readers()))
    with pytest.raises(ReaderOffline):
        late.apply(state)
    with pytest.raises(ReaderOffline):
        late.apply(Joined("r0", "anew").apply(state))


def test_a_reader_cannot_advance_segments_of_others() -> None:
    with pytest.raises(ReaderOffline, match="segment 1"):
        Beat("r0", "a", {1: SegmentPosition(9)}).apply(two_readers())
    forward = Beat("r0", "a", {0: SegmentPosition(9)}).apply(two_readers())
    with pytest.raises(InvalidInput):
        Beat("r0", "a", {0: SegmentPosition(8)}).apply(forward)


def test_a_reader_replaces_its_predecessor_of_the_same_id() -> None:
    state = CheckpointBegun("c").apply(Beat("r0", "a", {0: SegmentPosition(5)}).apply(two_readers()))
    state = Joined("r0", "anew").apply(state)
    assert state.unowned() == [0]
    assert state.members["r0"] == GroupMember("anew")
    checkpoint = state.checkpoint("c")
    assert checkpoint is not None
    assert checkpoint.remaining == {"r1"}
    assert checkpoint.positions == {0: SegmentPosition(5)}


def test_a_checkpoint_without_readers_completes_immediately() -> None:
    state = CheckpointBegun("c").apply(GroupState(Frontier({3: SegmentPosition(7)})))
    assert state.last_checkpoint is not None
    assert dict(state.last_checkpoint.position) == {3: 7}
    assert state.released_cut == {3: 7}


def test_a_reset_removes_all_readers() -> None:
    state = Reset(Frontier({0: SegmentPosition(1)})).apply(CheckpointBegun("c").apply(two_readers()))
    assert (state.generation, state.members, state.checkpoints) == (1, {}, ())
    with pytest.raises(ReaderOffline):
        state.require("r0", "a")


def test_silence_is_measured_by_the_observers_own_clock() -> None:
    liveness, state = Liveness(), two_readers()
    assert liveness.silent(state, 100.0, 10) == []
    assert liveness.silent(state, 109.9, 10) == []
    state = Beat("r1", "b").apply(state)
    assert liveness.silent(state, 110.0, 10) == [("r0", "a")]
    state = Joined("r0", "anew").apply(state)
    assert liveness.silent(state, 119.9, 10) == []
    assert liveness.silent(state, 120.0, 10) == [("r1", "b")]


def test_the_earliest_cut_is_at_or_before_every_position() -> None:
    left, right = KeyRange.FULL.split(2)
    stream = Stream(
        "s",
        {
            0: segment(0, KeyRange.FULL),
            1: segment(1, left, frozenset([0]), 1),
            2: segment(2, right, frozenset([0]), 1),
            3: segment(3, KeyRange.FULL, frozenset([1, 2]), 2),
        },
    )
    assert earliest(stream, [{1: 5, 2: 7}, {1: 3, 2: 9}]) == {1: 3, 2: 7}
    assert earliest(stream, [{3: 5}, {1: 3, 2: 9}]) == {1: 3, 2: 9}
    assert earliest(stream, [{3: 5}, {0: 4}, {1: 3, 2: 9}]) == {0: 4}
    with pytest.raises(InvalidInput):
        earliest(stream, [])


def test_a_position_is_a_cut_before_everything_that_is_still_needed() -> None:
    text = '{"1":{"offset":90,"pending":[{"producer":"010203040506","last_ack":7,"begin":40}]},"2":{"offset":5}}'
    position = StreamPosition.from_json(text)
    assert dict(position) == {1: 40, 2: 5}
    assert position.to_json() == text
    assert StreamPosition.of(position) is position
    assert position.segments[1].source().replay_from == 40
