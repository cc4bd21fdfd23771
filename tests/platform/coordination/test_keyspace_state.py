"""The pure merge, compared with a dict; and the decoded entries of a state."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import EtcdHeader, KeyValue, WatchEvent
from coranto.coordination.keyspace_state import Assignment, Entries, Item, KeySpaceState, Member
from coranto.coordination.layout import AssignmentKey, Layout, MemberId
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb

KEYS = [f"k/{name}" for name in ("a", "aa", "b", "b#", "c", "é", "z", "\U0001f600")]


def decode(kv: KeyValue) -> object | None:
    """Decode to the value's length; the empty value does not decode."""
    return len(kv.value) or None


@st.composite
def histories(draw: st.DrawFn) -> list[list[WatchEvent]]:
    """Return batches of events as etcd sends them: revisions grow, and a batch holds complete revisions."""
    revision = draw(st.integers(1, 5))
    batches = []
    for _ in range(draw(st.integers(0, 5))):
        events = []
        for _ in range(draw(st.integers(0, 3))):
            revision += draw(st.integers(1, 3))
            for key in draw(st.sets(st.sampled_from(KEYS), max_size=4)):
                value = draw(st.binary(max_size=3))
                events.append(WatchEvent(KeyValue(key, value, mod_revision=revision), deleted=draw(st.booleans())))
        batches.append(events)
    return batches


@given(st.dictionaries(st.sampled_from(KEYS), st.binary(max_size=3)), histories())
@settings(max_examples=300)
def test_merging_agrees_with_a_dict(start: dict[str, bytes], batches: list[list[WatchEvent]]) -> None:
    model = {key: KeyValue(key, value, mod_revision=1) for key, value in start.items()}
    entries = Entries.load(model.values(), decode)
    for batch in batches:
        before = [entry.kv for entry in entries]
        for event in batch:
            if event.deleted:
                model.pop(event.kv.key, None)
            else:
                model[event.kv.key] = event.kv
        merged = entries.merge(batch, decode)
        assert [entry.kv for entry in entries] == before, "entries are immutable"
        entries = merged
        assert [entry.kv for entry in entries] == [model[key] for key in sorted(model)]
        assert [entry.decoded for entry in entries] == [len(model[key].value) or None for key in sorted(model)]
        assert len(entries) == len(model)
    for key in KEYS:
        found = entries.get(key)
        assert (found.kv if found else None) == model.get(key)
    for prefix in ("k/", "k/a", "k/b", "x"):
        assert [e.kv.key for e in entries.prefixed(prefix)] == [k for k in sorted(model) if k.startswith(prefix)]


@given(histories())
def test_merging_the_same_rows_again_changes_nothing(batches: list[list[WatchEvent]]) -> None:
    entries = Entries.load([], decode)
    for batch in batches:
        entries = entries.merge(batch, decode)
    kept = [e for batch in batches for e in batch if not e.deleted and entries.get(e.kv.key)]
    assert list(entries.merge(kept, decode)) == list(entries)


# --- states of journals and brokers ----------------------------------------------------------------------------------

LAYOUT = Layout("/c")
ENTITIES = JournalEntities(max_replication=3)
ONE, TWO = MemberId("a", "broker-1"), MemberId("b", "broker-2")


def journal(name: str, **fields: object) -> pb.JournalSpec:
    spec = pb.JournalSpec(name=name, replication=2, **fields)  # type: ignore[arg-type]
    spec.fragment.length = 1 << 20
    spec.fragment.compression_codec = pb.NONE
    spec.fragment.refresh_interval.FromSeconds(60)
    return spec


def broker(member: MemberId) -> pb.BrokerSpec:
    id = pb.ProcessSpec.ID(zone=member.zone, suffix=member.suffix)
    return pb.BrokerSpec(process_spec=pb.ProcessSpec(id=id, endpoint=f"http://{member.suffix}:80"), journal_limit=10)


def state_of(values: dict[str, bytes]) -> KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]:
    def decoded(kv: KeyValue) -> object:
        key = LAYOUT.decode(kv.key)
        if isinstance(key, AssignmentKey):
            return Assignment(key, ENTITIES.decode_assignment(key, kv.value), kv)
        if hasattr(key, "item"):
            return Item(key.item, ENTITIES.decode_item(key.item, kv.value), kv)
        return Member(key.member, ENTITIES.decode_member(key.member, kv.value), kv)

    kvs = [KeyValue(key, value, create_revision=9 - i) for i, (key, value) in enumerate(values.items())]
    return KeySpaceState(EtcdHeader(1, 2, 30, 4), Entries.load(kvs, decoded), LAYOUT, ENTITIES)


def test_a_state_has_items_members_assignments_and_routes() -> None:
    route = pb.Route(
        members=[pb.ProcessSpec.ID(zone="a", suffix="broker-1"), pb.ProcessSpec.ID(zone="b", suffix="broker-2")],
        primary=1,
    )
    state = state_of(
        {
            LAYOUT.item_key("journal"): journal("journal").SerializeToString(),
            LAYOUT.item_key("journal-2"): journal("journal-2").SerializeToString(),
            LAYOUT.member_key(ONE): broker(ONE).SerializeToString(),
            LAYOUT.member_key(TWO): broker(TWO).SerializeToString(),
            LAYOUT.assignment_key("journal", ONE, 1): route.SerializeToString(),
            LAYOUT.assignment_key("journal", TWO, 0): route.SerializeToString(),
            LAYOUT.assignment_key("journal-2", TWO, 1): b"",
        }
    )
    assert [item.id for item in state.items] == ["journal", "journal-2"]
    assert [member.id for member in state.members] == [ONE, TWO]
    assert [(a.member, a.slot) for a in state.assignments("journal")] == [(TWO, 0), (ONE, 1)]
    assert state.route_of("journal", endpoints=False) == route
    assert list(state.route_of("journal").endpoints) == ["http://broker-1:80", "http://broker-2:80"]
    assert state.consistent("journal")
    assert state.route_of("journal-2", endpoints=False).primary == -1
    assert not state.consistent("journal-2")
    assert state.route_of("none") == pb.Route(primary=-1)
    assert not state.consistent("none")
    assert [a.item for a in state.by_member[TWO]] == ["journal", "journal-2"]
    assert state.leader is not None
    assert state.leader.id == TWO, "the member whose key is oldest"
    assert state.item("bad name") is None
    assert state.member(MemberId("a", "#")) is None
    assert state.assignments("#") == []


def test_a_route_of_a_vanished_member_has_no_endpoint() -> None:
    state = state_of({LAYOUT.assignment_key("journal", ONE, 0): b""})
    assert list(state.route_of("journal").endpoints) == [""]


def test_consistency_ignores_only_endpoints() -> None:
    key = AssignmentKey("journal", ONE, 0)
    id = pb.ProcessSpec.ID(zone="a", suffix="broker-1")
    assert ENTITIES.consistent([(key, pb.Route(members=[id], primary=0, endpoints=["http://x:1"]))]) == [True]
    assert ENTITIES.consistent([(key, pb.Route(members=[id], primary=-1))]) == [False]
    assert ENTITIES.consistent([(key, pb.Route(primary=-1))]) == [False]


def test_values_that_contradict_their_keys_are_refused() -> None:
    with pytest.raises(InvalidInput, match="other"):
        ENTITIES.decode_item("journal", journal("other").SerializeToString())
    with pytest.raises(InvalidInput, match="broker-1"):
        ENTITIES.decode_member(TWO, broker(ONE).SerializeToString())
    for call in (
        lambda: ENTITIES.decode_item("journal", b"\xff"),
        lambda: ENTITIES.decode_item("journal", pb.JournalSpec(name="journal", replication=99).SerializeToString()),
        lambda: ENTITIES.decode_member(ONE, b"\xff"),
        lambda: ENTITIES.decode_assignment(AssignmentKey("j", ONE, 0), b"\xff"),
        lambda: ENTITIES.decode_assignment(AssignmentKey("j", ONE, 0), pb.Route(primary=3).SerializeToString()),
    ):
        with pytest.raises(InvalidInput):
            call()


def test_suspension_and_the_cap_lower_replication() -> None:
    suspend = pb.JournalSpec.Suspend
    assert ENTITIES.replication(journal("journal")) == 2
    assert JournalEntities(max_replication=1).replication(journal("journal")) == 1
    assert ENTITIES.replication(journal("journal", suspend=suspend(level=suspend.PARTIAL))) == 1
    assert ENTITIES.replication(journal("journal", suspend=suspend(level=suspend.FULL))) == 0
