"""Local replicas of shards follow assignments; the cost of a change does not depend on the number of shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from coranto.coordination.etcd import EtcdHeader, KeyValue, WatchEvent
from coranto.coordination.keyspace_state import Assignment, Entries, Item, KeySpaceState
from coranto.coordination.layout import AssignmentKey, ItemKey, Layout, MemberId
from coranto.wire import consumer_pb2 as pc
from coranto_consumers.runtime.resolver import ShardResolver, ShardState
from coranto_consumers.runtime.specs import ShardEntities
from coranto_consumers.runtime.testing import shard_spec

LAYOUT, ENTITIES = Layout("/consumers"), ShardEntities()
ME, OTHER = MemberId("zone", "me"), MemberId("zone", "other")


class Counted(KeySpaceState[pc.ShardSpec, pc.ConsumerSpec, pc.ReplicaStatus]):
    """A state that counts the reads of each item."""

    reads: ClassVar[Counter[str]] = Counter()

    def item(self, name: str) -> Item[pc.ShardSpec] | None:
        self.reads[name] += 1
        return super().item(name)


def decoded(kv: KeyValue) -> object:
    match LAYOUT.decode(kv.key):
        case ItemKey(item):
            return Item(item, ENTITIES.decode_item(item, kv.value), kv)
        case AssignmentKey() as key:
            return Assignment(key, ENTITIES.decode_assignment(key, kv.value), kv)
    raise AssertionError(kv.key)


class Space:
    """A key space that tests change."""

    def __init__(self) -> None:
        self.revision = 1
        self.state: ShardState = Counted(EtcdHeader(1, 2, 1, 4), Entries([], []), LAYOUT, ENTITIES)
        self.observers: list[Callable[[ShardState], None]] = []

    def observe(self, observer: Callable[[ShardState], None]) -> Callable[[], None]:
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def change(self, values: dict[str, bytes | None], *, recorded: bool = True) -> None:
        """Write or delete keys. Without `recorded`, the change does not name its items."""
        self.revision += 1
        events = []
        for key, value in values.items():
            entry = self.state.entries.get(key)
            created = entry.kv.create_revision if entry is not None else self.revision
            events.append(WatchEvent(KeyValue(key, value or b"", created, self.revision), value is None))
        items = frozenset(filter(None, map(LAYOUT.item_of, values)))
        entries = self.state.entries.merge(events, decoded)
        header = EtcdHeader(1, 2, self.revision, 4)
        self.state = Counted(header, entries, LAYOUT, ENTITIES, changed=items if recorded else None)
        for observer in tuple(self.observers):
            observer(self.state)


class Replica:
    def __init__(self, spec: pc.ShardSpec) -> None:
        self.spec = spec
        self.promoted = False

    def promote(self) -> None:
        self.promoted = True

    def update(self, spec: pc.ShardSpec) -> None:
        self.spec = spec


class World:
    def __init__(self, space: Space) -> None:
        self.space = space
        self.log: list[str] = []
        self.replicas: dict[str, Replica] = {}
        self.failing = ""
        keyspace: Any = space
        self.resolver = ShardResolver(keyspace, ME, self.start, self.stop)

    def start(self, spec: pc.ShardSpec) -> Any:
        if spec.id == self.failing:
            raise RuntimeError("by the test")
        self.log.append(f"start {spec.id}")
        self.replicas[spec.id] = Replica(spec)
        return self.replicas[spec.id]

    def stop(self, replica: Any) -> None:
        self.log.append(f"stop {replica.spec.id}")

    def recorded(self) -> list[str]:
        log, self.log = self.log, []
        return log


def spec(shard: str, seconds: float = 1.0) -> dict[str, bytes | None]:
    return {LAYOUT.item_key(shard): shard_spec(shard, ["in/one"], max_seconds=seconds).SerializeToString()}


def assigned(shard: str, slot: int = 0, member: MemberId = ME, *, gone: bool = False) -> dict[str, bytes | None]:
    return {LAYOUT.assignment_key(shard, member, slot): None if gone else b""}


@pytest.fixture
def space() -> Space:
    return Space()


def test_replicas_follow_assignments(space: Space) -> None:
    space.change(
        spec("shard-a")
        | spec("shard-b")
        | spec("shard-c")
        | assigned("shard-a")
        | assigned("shard-b", 1)
        | assigned("shard-c", 0, OTHER)
    )
    world = World(space)
    assert world.recorded() == ["start shard-a", "start shard-b"]
    assert world.replicas["shard-a"].promoted
    assert not world.replicas["shard-b"].promoted
    space.change(assigned("shard-b", 1, gone=True) | assigned("shard-b", 0))
    assert world.recorded() == []
    assert world.replicas["shard-b"].promoted
    space.change(spec("shard-a", 2.0))
    assert world.replicas["shard-a"].spec.max_txn_duration.seconds == 2
    space.change(assigned("shard-a", gone=True))
    assert not world.resolver.has("shard-a")
    space.change(assigned("shard-a"))
    assert world.recorded() == ["stop shard-a", "start shard-a"]
    # It was unassigned and reassigned between two observations.
    space.change(assigned("shard-b", gone=True) | assigned("shard-b", 1))
    space.change({LAYOUT.item_key("shard-a"): None} | assigned("shard-a", gone=True), recorded=False)
    assert world.recorded() == ["stop shard-b", "start shard-b", "stop shard-a"]
    world.resolver.stop()
    space.change(assigned("shard-a"))
    assert world.recorded() == ["stop shard-b"]
    assert not world.resolver.has("shard-b")


def test_a_change_reads_no_other_shard(space: Space) -> None:
    names = [f"shard-{number:04d}" for number in range(1000)]
    space.change({key: value for name in names for key, value in (spec(name) | assigned(name)).items()})
    world = World(space)
    assert len(world.recorded()) == 1000
    Counted.reads.clear()
    space.change(spec("shard-0007", 2.0))
    assert Counted.reads.keys() == {"shard-0007"}
    space.change(assigned("shard-0008", 0, OTHER), recorded=False)
    assert len(Counted.reads) == 1000


def test_replicas_not_started_after_an_error_start_at_the_next_change(space: Space) -> None:
    world = World(space)
    world.failing = "shard-a"
    with pytest.raises(RuntimeError):
        space.change(spec("shard-a") | spec("shard-b") | assigned("shard-a") | assigned("shard-b"))
    assert world.recorded() == []
    world.failing = ""
    space.change(spec("shard-c"))
    assert world.recorded() == ["start shard-a", "start shard-b"]
