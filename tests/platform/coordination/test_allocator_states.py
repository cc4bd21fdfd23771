"""Plans for states of the key space: which entries they read, and which they do not read again."""

from __future__ import annotations

from collections.abc import Sequence

from coranto.coordination.allocator import StatePlanner
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import EtcdHeader, KeyValue, WatchEvent
from coranto.coordination.keyspace_state import Assignment, Entries, Item, KeySpaceState, Member
from coranto.coordination.layout import AssignmentKey, ItemKey, Layout, MemberId, MemberKey
from coranto.coordination.planning import AddAssignment, ItemChanges, MoveAssignment, RemoveAssignment
from coranto.wire import protocol_pb2 as pb

LAYOUT = Layout("/c")
ONE, TWO = MemberId("a", "broker-1"), MemberId("b", "broker-2")


class Entities(JournalEntities):
    """Records the items whose consistency was checked."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[str] = []

    def consistent(self, assignments: Sequence[tuple[AssignmentKey, pb.Route]]) -> Sequence[bool]:
        self.checked.append(assignments[0][0].item)
        return super().consistent(assignments)


class Cluster:
    def __init__(self) -> None:
        self.entities = Entities()
        self.entries = Entries.load([], self._decode)
        self.revision = 0

    def _decode(self, kv: KeyValue) -> object | None:
        if not kv.value and "/assign/" not in kv.key:
            return None
        match key := LAYOUT.decode(kv.key):
            case ItemKey():
                return Item(key.item, self.entities.decode_item(key.item, kv.value), kv)
            case MemberKey():
                return Member(key.member, self.entities.decode_member(key.member, kv.value), kv)
            case AssignmentKey():
                return Assignment(key, self.entities.decode_assignment(key, kv.value), kv)

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        kv = KeyValue(key, value, create_revision=self.revision, mod_revision=self.revision)
        self.entries = self.entries.merge([WatchEvent(kv, deleted=False)], self._decode)

    def put_journal(self, name: str, replication: int = 1) -> None:
        spec = pb.JournalSpec(name=name, replication=replication)
        spec.fragment.length = 1 << 20
        spec.fragment.compression_codec = pb.NONE
        spec.fragment.refresh_interval.FromSeconds(60)
        self.put(LAYOUT.item_key(name), spec.SerializeToString())

    def put_broker(self, member: MemberId, limit: int = 10) -> None:
        id = pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix)
        spec = pb.BrokerSpec(process_spec=pb.ProcessSpec(id=id, endpoint="http://host:80"), journal_limit=limit)
        self.put(LAYOUT.member_key(member), spec.SerializeToString())

    def assign(self, item: str, *members: MemberId, consistent: bool = True) -> None:
        route = pb.Route()
        for number, member in enumerate(sorted(members)):
            route.members.add(zone=member.zone, suffix=member.suffix)
            if member == members[0]:
                route.primary = number
        for slot, member in enumerate(members):
            self.put(LAYOUT.assignment_key(item, member, slot), route.SerializeToString() if consistent else b"")

    @property
    def state(self) -> KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]:
        return KeySpaceState(EtcdHeader(1, 1, self.revision, 1), self.entries, LAYOUT, self.entities)


def test_consistency_is_checked_only_for_items_with_new_assignments() -> None:
    cluster = Cluster()
    cluster.put_broker(ONE)
    cluster.put_broker(TWO)
    for name in ("j/one", "j/two", "j/two-more"):
        cluster.put_journal(name, 2)
        cluster.assign(name, ONE, TWO)
    planner = StatePlanner[pb.JournalSpec, pb.BrokerSpec, pb.Route]()
    assert planner.plan(cluster.state).items == ()
    assert cluster.entities.checked == ["j/one", "j/two", "j/two-more"]

    cluster.entities.checked.clear()
    cluster.assign("j/two", ONE, TWO, consistent=False)
    cluster.put_journal("j/one", 1)
    changes = planner.plan(cluster.state)
    assert cluster.entities.checked == ["j/two"]
    assert [item.item for item in changes.items] == ["j/one"]
    assert changes == StatePlanner().plan(cluster.state)

    cluster.entities.checked.clear()
    cluster.put_journal("j/two", 1)
    assert planner.plan(cluster.state) == changes, "the item is not consistent, and must keep its assignments"
    cluster.assign("j/two", ONE, TWO)
    assert [item.item for item in planner.plan(cluster.state).items] == ["j/one", "j/two"]
    assert cluster.entities.checked == ["j/two"]


def test_assignments_of_undecodable_items_and_members_are_kept() -> None:
    cluster = Cluster()
    cluster.put_broker(ONE)
    cluster.put(LAYOUT.member_key(TWO), b"")
    cluster.put(LAYOUT.item_key("j/broken"), b"")
    cluster.assign("j/broken", ONE)
    cluster.assign("j/gone", ONE)
    cluster.put_journal("j/two", 1)
    cluster.assign("j/two", TWO)
    changes = StatePlanner().plan(cluster.state)
    # A member with an undecodable spec keeps its assignments until other members have them.
    assert changes.items == (
        ItemChanges("j/gone", (RemoveAssignment("j/gone", ONE, 0),), orphaned=True),
        ItemChanges("j/two", (AddAssignment("j/two", ONE, 1),)),
    )
    cluster.assign("j/two", TWO, ONE)
    assert StatePlanner().plan(cluster.state).items[1].changes == (
        RemoveAssignment("j/two", TWO, 0),
        MoveAssignment("j/two", ONE, 1, 0),
    )
