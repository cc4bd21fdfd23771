"""The resolver: brokers of journals, statuses, and the replicas of this broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import EtcdHeader, KeyValue
from coranto.coordination.keyspace_state import Assignment, Entries, Item, KeySpaceEntry, KeySpaceState, Member
from coranto.coordination.layout import AssignmentKey, ItemKey, Layout, MemberId, MemberKey
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from coranto_broker.replication.resolver import JournalState, Resolver

J = "test/journal"
SELF, OTHER = MemberId("local", "self"), MemberId("local", "other")
LAYOUT = Layout("/test")
ENTITIES = JournalEntities()


def decode(kv: KeyValue) -> object | None:
    key = LAYOUT.decode(kv.key)
    try:
        match key:
            case ItemKey():
                return Item(key.item, ENTITIES.decode_item(key.item, kv.value), kv)
            case MemberKey():
                return Member(key.member, ENTITIES.decode_member(key.member, kv.value), kv)
            case AssignmentKey():
                return Assignment(key, ENTITIES.decode_assignment(key, kv.value), kv)
    except InvalidInput:
        return None


class Cluster:
    """A key space that the test writes, and the replicas that the resolver has requested."""

    def __init__(self) -> None:
        self.revision = 100
        self.kvs: dict[str, KeyValue] = {}
        self.observers: list[Callable[[JournalState], None]] = []
        self.layout = LAYOUT
        self.running: list[Any] = []
        self.log: list[str] = []
        self.wants: list[str] = []
        for member in (SELF, OTHER):
            spec = pb.BrokerSpec(
                process_spec=pb.ProcessSpec(
                    id=pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix), endpoint=f"http://{member.suffix}:80"
                )
            )
            self.put(LAYOUT.member_key(member), spec.SerializeToString())

    # -- The key space -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> JournalState:
        entries = Entries.load(self.kvs.values(), decode)
        return KeySpaceState(self.header, entries, LAYOUT, ENTITIES)

    @property
    def header(self) -> EtcdHeader:
        return EtcdHeader(7, 8, self.revision, 9)

    @property
    def known_revision(self) -> int:
        return self.revision

    def observe(self, observer: Callable[[JournalState], None]) -> Callable[[], None]:
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    async def wait_for_revision(self, revision: int) -> None:
        self.revision = revision
        self.log.append(f"waited for {revision}")

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        old = self.kvs.get(key)
        self.kvs[key] = KeyValue(key, value, old.create_revision if old else self.revision, self.revision)

    def delete(self, key: str) -> None:
        self.revision += 1
        del self.kvs[key]

    def journal(
        self,
        name: str = J,
        *,
        stores: tuple[str, ...] = (),
        suspend: int = 0,
        replication: int = 1,
        flags: int = 0,
    ) -> None:
        spec = pb.JournalSpec(name=name, replication=replication)
        spec.flags = flags  # type: ignore[assignment]
        spec.fragment.length, spec.fragment.compression_codec = 1 << 20, pb.NONE
        spec.fragment.refresh_interval.FromSeconds(60)
        spec.fragment.stores.extend(stores)
        spec.suspend.level = suspend  # type: ignore[assignment]
        self.put(LAYOUT.item_key(name), spec.SerializeToString())

    def assign(self, member: MemberId, slot: int, name: str = J) -> None:
        self.put(LAYOUT.assignment_key(name, member, slot), b"")

    def unassign(self, member: MemberId, slot: int, name: str = J) -> None:
        self.delete(LAYOUT.assignment_key(name, member, slot))

    def report(self, state: JournalState) -> None:
        for observer in self.observers:
            observer(state)

    def apply(self) -> list[str]:
        """Let observers see the state; return the resolver's actions."""
        self.report(self.state)
        log, self.log = self.log, []
        return log

    # -- The replicas ------------------------------------------------------------------------------------------------

    def start_replica(self, item: Item[pb.JournalSpec], *, primary: bool) -> Any:
        replica = SimpleNamespace(journal=item.id, promoted=lambda: self.log.append("promoted"))
        self.log.append(f"start {'primary' if primary else 'replica'}")
        return replica

    def spec_changed(self, replica: Any, spec: pb.JournalSpec) -> None:
        return

    def stop_replica(self, replica: Any, *, drop: bool) -> None:
        self.log.append("drop" if drop else "stop")

    def wanted(self, journal: str) -> None:
        self.wants.append(journal)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def resolver(cluster: Cluster) -> Resolver:
    keyspace: Any = cluster
    return Resolver(keyspace, SELF, cluster)


PRIMARY = {"may_proxy": True, "require_primary": True}
ANY = {"may_proxy": True, "require_primary": False}
STRICT_PRIMARY = {"may_proxy": False, "require_primary": True}
STRICT_ANY = {"may_proxy": False, "require_primary": False}
FULL = pb.JournalSpec.Suspend.FULL


@pytest.mark.parametrize(
    ("setup", "options", "status", "served_by"),
    [
        ([], PRIMARY, pb.JOURNAL_NOT_FOUND, "self"),
        (["journal"], PRIMARY, pb.NO_JOURNAL_PRIMARY_BROKER, "self"),
        (["journal"], ANY, pb.INSUFFICIENT_JOURNAL_BROKERS, "self"),
        (["suspended"], PRIMARY, pb.SUSPENDED, "self"),
        (["suspended"], ANY, pb.SUSPENDED, "self"),
        (["journal", "self 0"], PRIMARY, pb.OK, "self"),
        (["journal", "self 0"], STRICT_ANY, pb.OK, "self"),
        (["journal", "self 1"], PRIMARY, pb.NO_JOURNAL_PRIMARY_BROKER, "self"),
        (["journal", "self 1"], STRICT_ANY, pb.OK, "self"),
        (["journal", "other 0"], PRIMARY, pb.OK, "other"),
        (["journal", "other 0"], STRICT_PRIMARY, pb.NOT_JOURNAL_PRIMARY_BROKER, "self"),
        (["journal", "other 0"], ANY, pb.OK, ""),
        (["journal", "other 0"], STRICT_ANY, pb.NOT_JOURNAL_BROKER, "self"),
        (["journal", "other 0", "self 1"], PRIMARY, pb.OK, "other"),
        (["journal", "other 0", "self 1"], ANY, pb.OK, "self"),
    ],
)
async def test_statuses(
    cluster: Cluster, resolver: Resolver, setup: list[str], options: dict[str, bool], status: int, served_by: str
) -> None:
    for each in setup:
        if each == "journal":
            cluster.journal()
        elif each == "suspended":
            cluster.journal(suspend=FULL)
        else:
            name, slot = each.split()
            cluster.assign(MemberId("local", name), int(slot))
    cluster.apply()
    resolution = await resolver.resolve(f"{J};metadata", **options)
    assert (resolution.status, resolution.header.process_id.suffix) == (status, served_by)
    assert resolution.header.etcd.revision == cluster.revision
    assert len(resolution.header.route.members) == len(resolution.header.route.endpoints)
    assert (resolution.replica is not None) == any(each.startswith("self") for each in setup)


async def test_a_broker_that_is_missing_in_etcd_serves_nothing_but_may_proxy(
    cluster: Cluster, resolver: Resolver
) -> None:
    cluster.journal()
    cluster.assign(OTHER, 0)
    cluster.delete(LAYOUT.member_key(SELF))
    cluster.apply()
    assert (await resolver.resolve(J, **PRIMARY)).header.process_id.suffix == "other"
    refused = await resolver.resolve(J, **STRICT_PRIMARY)
    assert refused.header.process_id.suffix == "missing-from-etcd"


async def test_headers_of_peers(cluster: Cluster, resolver: Resolver) -> None:
    cluster.journal()
    cluster.assign(SELF, 0)
    cluster.apply()
    header = (await resolver.resolve(J, **PRIMARY)).header
    later = pb.Header()
    later.CopyFrom(header)
    later.etcd.revision += 10
    await resolver.resolve(J, **PRIMARY, proxy_header=later)
    assert cluster.log == [f"waited for {later.etcd.revision}"]

    wrong = pb.Header()
    wrong.CopyFrom(header)
    wrong.process_id.suffix = "else"
    with pytest.raises(InvalidInput, match="meant for broker local#else"):
        await resolver.resolve(J, **PRIMARY, proxy_header=wrong)
    wrong.CopyFrom(header)
    wrong.etcd.cluster_id = 1
    with pytest.raises(InvalidInput, match="from etcd cluster 0x1"):
        await resolver.resolve(J, **PRIMARY, proxy_header=wrong)


async def test_replicas_follow_assignments(cluster: Cluster, resolver: Resolver) -> None:
    cluster.journal()
    assert cluster.apply() == []
    cluster.assign(SELF, 1)
    assert cluster.apply() == ["start replica"]
    assert cluster.apply() == []
    # Promotion keeps the replica; demotion replaces it.
    cluster.unassign(SELF, 1)
    cluster.assign(SELF, 0)
    assert cluster.apply() == ["promoted"]
    cluster.unassign(SELF, 0)
    cluster.assign(SELF, 1)
    assert cluster.apply() == ["stop", "start replica"]
    cluster.unassign(SELF, 1)
    assert cluster.apply() == ["stop"]


async def test_content_is_dropped_only_with_its_journal(cluster: Cluster, resolver: Resolver) -> None:
    cluster.journal()
    cluster.assign(SELF, 0)
    cluster.apply()
    # Deleted and recreated between two observations.
    cluster.delete(LAYOUT.item_key(J))
    cluster.journal()
    assert cluster.apply() == ["drop", "start primary"]
    # An unreadable spec changes nothing.
    cluster.put(LAYOUT.item_key(J), b"\xff not a spec")
    assert cluster.apply() == []
    assert (await resolver.resolve(J, **PRIMARY)).status == pb.JOURNAL_NOT_FOUND
    cluster.journal()
    assert cluster.apply() == []
    assert (await resolver.resolve(J, **PRIMARY)).status == pb.OK
    cluster.delete(LAYOUT.item_key(J))
    assert cluster.apply() == ["drop"]


async def test_only_changes_of_assignments_and_stores_invalidate_resolutions(
    cluster: Cluster, resolver: Resolver
) -> None:
    cluster.journal(stores=("file:///one/",))
    cluster.assign(SELF, 0)
    cluster.apply()

    async def fires(change: Callable[[], None]) -> bool:
        signal = (await resolver.resolve(J, **PRIMARY)).invalidated
        assert signal is not None
        change()
        cluster.apply()
        return signal.fired

    assert not await fires(lambda: cluster.put(LAYOUT.member_key(MemberId("local", "third")), b""))
    assert not await fires(lambda: cluster.journal(stores=("file:///one/",)))
    assert await fires(lambda: cluster.journal(stores=("file:///two/",)))
    assert await fires(lambda: cluster.assign(OTHER, 1))
    assert await fires(lambda: cluster.assign(OTHER, 1))
    assert await fires(lambda: cluster.unassign(OTHER, 1))
    assert await fires(lambda: cluster.unassign(SELF, 0))


async def test_a_stopped_resolver_stops_replicas_and_sends_clients_away(cluster: Cluster, resolver: Resolver) -> None:
    cluster.journal()
    cluster.assign(SELF, 0)
    cluster.apply()
    before = await resolver.resolve(J, **PRIMARY)
    resolver.stop()
    assert cluster.log == ["stop"]
    assert before.invalidated is not None
    assert before.invalidated.fired
    assert (await resolver.resolve(J, **PRIMARY)).status == pb.NO_JOURNAL_PRIMARY_BROKER
    assert (await resolver.resolve(J, **ANY)).status == pb.NOT_JOURNAL_BROKER
    assert cluster.apply() == ["stop"], "it no longer follows the key space"


async def test_a_stopped_resolver_answers_from_the_current_key_space(cluster: Cluster, resolver: Resolver) -> None:
    # Found by simulation: an append that waited here for fewer replicas resolved the same old state endlessly.
    cluster.journal()
    cluster.assign(OTHER, 0)
    cluster.apply()
    resolver.stop()
    before = await resolver.resolve(J, **PRIMARY)
    cluster.unassign(OTHER, 0)
    cluster.apply()
    after = await resolver.resolve(J, **PRIMARY)
    assert (before.status, after.status) == (pb.OK, pb.NO_JOURNAL_PRIMARY_BROKER)


async def test_flags_and_suspension_hold_until_the_spec_changes_them(cluster: Cluster, resolver: Resolver) -> None:
    cluster.journal()
    resolution = await resolver.resolve(J, may_proxy=True, require_primary=True)
    assert resolver.permits_hold(resolution)
    cluster.journal(replication=2)
    assert resolver.permits_hold(resolution), "another field changed"
    cluster.journal(flags=pb.JournalSpec.O_RDONLY)
    assert not resolver.permits_hold(resolution)
    cluster.journal(suspend=pb.JournalSpec.Suspend.FULL)
    assert not resolver.permits_hold(resolution)
    cluster.delete(LAYOUT.item_key(J))
    assert resolver.permits_hold(resolution), "a journal that is deleted has none"


async def test_unknown_names_are_not_cached(resolver: Resolver) -> None:
    for number in range(10):
        for options in (PRIMARY, ANY, STRICT_PRIMARY, STRICT_ANY):
            assert (await resolver.resolve(f"no/journal-{number}", **options)).status == pb.JOURNAL_NOT_FOUND
    assert resolver._cache == {}


async def test_calls_say_which_replica_they_need(cluster: Cluster, resolver: Resolver) -> None:
    cluster.journal()
    cluster.assign(OTHER, 0)
    cluster.apply()
    await resolver.resolve(J, **PRIMARY)
    assert cluster.wants == [], "there is none here"
    cluster.assign(SELF, 1)
    cluster.apply()
    await resolver.resolve(J, **ANY)
    assert cluster.wants == [J]


class CountedEntries(Entries):
    """Entries that count how many of them are read."""

    def __init__(self, found: Entries) -> None:
        super().__init__(found._keys, found._entries)
        self.reads = 0

    def get(self, key: str) -> KeySpaceEntry | None:
        self.reads += 1
        return super().get(key)

    def prefixed(self, prefix: str) -> Sequence[KeySpaceEntry]:
        found = super().prefixed(prefix)
        self.reads += 1 + len(found)
        return found


async def test_a_change_costs_the_same_for_any_number_of_journals() -> None:
    def reads(journals: int) -> int:
        cluster = Cluster()
        keyspace: Any = cluster
        resolver = Resolver(keyspace, SELF, cluster)
        names = [f"some/journal-{number:04}" for number in range(journals)]
        for name in names:
            cluster.journal(name)
            cluster.assign(SELF, 0, name)
        assert cluster.apply() == ["start primary"] * journals
        first, second, third = names[:3]
        cluster.assign(OTHER, 1, first)
        cluster.unassign(SELF, 0, second)
        cluster.delete(LAYOUT.item_key(third))
        cluster.journal("new/journal")
        cluster.assign(SELF, 1, "new/journal")
        entries = CountedEntries(cluster.state.entries)
        changed = frozenset({first, second, third, "new/journal"})
        cluster.report(KeySpaceState(cluster.header, entries, LAYOUT, ENTITIES, changed=changed))
        assert sorted(cluster.log) == ["drop", "start replica", "stop"]
        assert len(resolver.local_replicas) == journals - 1
        return entries.reads

    assert 0 < reads(1000) == reads(10)


async def test_a_failed_change_is_completed_with_the_next_one(
    cluster: Cluster, resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (J, "other/journal"):
        cluster.journal(name)
        cluster.assign(SELF, 0, name)
    refusals = [OSError("no folder can be made")]
    start = cluster.start_replica

    def refusing(item: Item[pb.JournalSpec], *, primary: bool) -> Any:
        if refusals:
            raise refusals.pop()
        return start(item, primary=primary)

    monkeypatch.setattr(cluster, "start_replica", refusing)
    with pytest.raises(OSError, match="no folder"):
        cluster.apply()
    cluster.report(KeySpaceState(cluster.header, cluster.state.entries, LAYOUT, ENTITIES, changed=frozenset()))
    assert {replica.journal for replica in resolver.local_replicas} == {J, "other/journal"}
