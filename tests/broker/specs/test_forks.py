"""The rules for an Apply that creates, changes or deletes forks and their sources."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coranto import labels
from coranto.coordination.entities import JournalEntities
from coranto.coordination.etcd import EtcdHeader, KeyValue
from coranto.coordination.keyspace_state import Entries, Item, KeySpaceState
from coranto.coordination.layout import Layout
from coranto.errors import InvalidInput, PermissionDenied, Unavailable
from coranto.forks.choosing import SharedSpan, complete, fork_at, new_spec, with_hold
from coranto.security.tokens import Capability, Claims
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import JournalHead
from coranto_broker.specs.forks import fork_guards, new_shared_ends, require_stored

LAYOUT = Layout("/cluster")
ALL = Claims(Capability.ALL)
SOURCE = pb.JournalSpec(name="a/source", flags=pb.JournalSpec.O_RDWR)
SOURCE.fragment.stores.extend(["s3://one/", "s3://two/"])
FORK = fork_at(SOURCE, "b/fork", 30, SharedSpan(0, 20))
HELD = with_hold(SOURCE, FORK)
FORMING = new_spec(SOURCE, FORK)
MADE = complete(FORMING, None)
OTHER = pb.JournalSpec(name="c/other")


def state_of(*specs: pb.JournalSpec) -> KeySpaceState[pb.JournalSpec, pb.BrokerSpec, pb.Route]:
    def decode(kv: KeyValue) -> object:
        name = kv.key.removeprefix(LAYOUT.items)
        return Item(name, pb.JournalSpec.FromString(kv.value), kv)

    kvs = [
        KeyValue(LAYOUT.item_key(spec.name), spec.SerializeToString(), number, number)
        for number, spec in enumerate(sorted(specs, key=lambda spec: spec.name), 1)
    ]
    return KeySpaceState(EtcdHeader(1, 1, 9, 1), Entries.load(kvs, decode), LAYOUT, JournalEntities())


def check(
    present: Sequence[pb.JournalSpec], *changes: pb.JournalSpec | str, claims: Claims = ALL
) -> list[tuple[str, int]]:
    """Check changes (names are deleted), and return the other journals that they depend on, with revisions."""
    request = pb.ApplyRequest(
        changes=[
            pb.ApplyRequest.Change(delete=each) if isinstance(each, str) else pb.ApplyRequest.Change(upsert=each)
            for each in changes
        ]
    )
    found = fork_guards(state_of(*present), request, claims)
    return [(each.key.removeprefix(LAYOUT.items), each.operand) for each in found]


def changed(spec: pb.JournalSpec, **fields: str) -> pb.JournalSpec:
    """A spec with other labels, named like the constants of labels."""
    made = pb.JournalSpec()
    made.CopyFrom(spec)
    for name, value in fields.items():
        made.labels.CopyFrom(labels.with_value(made.labels, getattr(labels, name), value))
    return made


def test_changes_without_forks_depend_on_no_other_journal() -> None:
    assert check([SOURCE, OTHER], SOURCE, "c/other", pb.JournalSpec(name="d/new")) == []


def test_forks_are_created_completed_and_dropped() -> None:
    assert check([SOURCE], FORMING, HELD) == []
    assert check([HELD], FORMING) == [("a/source", 1)]  # An earlier fork of that name was not dropped properly.
    assert check([HELD, FORMING], MADE) == []
    assert check([HELD, MADE], "b/fork", SOURCE) == []
    assert check([HELD, MADE], "b/fork", "a/source") == []
    assert check([HELD], SOURCE) == [("b/fork", 0)]
    assert check([HELD, pb.JournalSpec(name="b/fork")], "a/source") == [("b/fork", 2)]
    unshared = new_spec(SOURCE, fork_at(SOURCE, "b/fork", 30, SharedSpan(20, 20)))
    assert check([SOURCE], unshared) == [("a/source", 1)]


def test_a_change_based_on_an_outdated_listing_is_left_to_etcd() -> None:
    specs = [pb.JournalSpec(name="a/first"), HELD, MADE]  # The source is at revision 2.
    for revision in (2, 3, -1):
        request = pb.ApplyRequest(changes=[pb.ApplyRequest.Change(upsert=SOURCE, expect_mod_revision=revision)])
        with pytest.raises(InvalidInput, match="no longer keep"):
            fork_guards(state_of(*specs), request, ALL)
    request.changes[0].expect_mod_revision = 1
    assert fork_guards(state_of(*specs), request, ALL) == []


@pytest.mark.parametrize(
    ("present", "changes", "match"),
    [
        ([HELD, MADE], ["a/source"], "cannot be deleted: its fork b/fork"),
        ([HELD, MADE], [SOURCE], "no longer keep"),
        ([HELD, MADE], [changed(SOURCE, FORK_HOLD="1/b/fork")], "no longer keep"),
        ([HELD, MADE], [changed(MADE, FORK_OFFSET="31")], "leave them as they are"),
        ([HELD, MADE], [changed(MADE, FORK_SHARES="30/a/source")], "leave them as they are"),
        ([HELD, MADE], [FORMING], "leave them as they are"),
        ([HELD, MADE], [pb.JournalSpec(name="b/fork")], "leave them as they are"),
        ([HELD, pb.JournalSpec(name="b/fork")], [FORMING], "already exists"),
        ([], [FORMING], "does not exist"),
        ([SOURCE], [FORMING], "must keep"),
        ([SOURCE], [FORMING, "a/source"], "does not exist"),
        ([SOURCE], [changed(FORMING, FORK_SHARES="20/c/other"), HELD], "does not share"),
        ([SOURCE], [changed(FORMING, FORK_BEGIN="21"), HELD], "contradict"),
        ([SOURCE], [changed(FORMING, FORK_OFFSET="030"), HELD], "contradict"),
        ([SOURCE], [changed(FORMING, FORK_OFFSET="19"), HELD], "cannot share"),
        ([SOURCE], [changed(FORMING, FORK_BEGIN="x"), HELD], "is not an offset"),
        ([SOURCE], [changed(SOURCE, FORK_HOLD="b/fork")], "is not"),
    ],
)
def test_changes_that_would_break_a_fork_are_refused(
    present: list[pb.JournalSpec], changes: list[pb.JournalSpec | str], match: str
) -> None:
    with pytest.raises(InvalidInput, match=match):
        check(present, *changes)


def test_a_fork_keeps_its_sources_stores_and_its_begin() -> None:
    for spec, present in ((FORMING, [SOURCE]), (MADE, [HELD, MADE])):
        fewer = changed(spec)
        del fewer.fragment.stores[0]
        with pytest.raises(InvalidInput, match="keep s3://one/"):
            check(present, fewer, HELD)
        more = changed(spec)
        more.fragment.stores.insert(0, "s3://zero/")
        check(present, more, HELD)
    early = changed(FORMING)
    early.suspend.offset = 19
    with pytest.raises(InvalidInput, match=r"suspend\.offset"):
        check([SOURCE], early, HELD)


def test_forks_of_forks_hold_each_other_and_are_not_cycles() -> None:
    second = fork_at(MADE, "d/second", 50, SharedSpan(0, 40))
    held, made = with_hold(MADE, second), new_spec(MADE, second)
    assert check([HELD, MADE], held, made) == []
    with pytest.raises(InvalidInput, match="its fork d/second"):
        check([HELD, held, made], "b/fork", SOURCE)
    assert check([HELD, held, made], "b/fork", "d/second", SOURCE) == []
    # Two journals that are forks of each other, in one call.
    x, y = pb.JournalSpec(name="x"), pb.JournalSpec(name="y")
    of_x, of_y = fork_at(x, "y", 9, SharedSpan(0, 9)), fork_at(y, "x", 9, SharedSpan(0, 9))
    with pytest.raises(InvalidInput):
        check([], with_hold(new_spec(x, of_x), of_y), with_hold(new_spec(y, of_y), of_x))


def test_creating_a_fork_requires_read_access_to_its_source() -> None:
    selector = labels.label_selector(include=[("name:prefix", "b/")])
    for claims in (Claims(Capability.APPLY), Claims(Capability.ALL, selector)):
        with pytest.raises(PermissionDenied, match="READ over a/source"):
            check([HELD], FORMING, claims=claims)
    both = labels.label_selector(include=[("name:prefix", "b/"), ("name", "a/source")])
    check([HELD], FORMING, claims=Claims(Capability.APPLY | Capability.READ, both))


def test_a_new_fork_shares_only_what_its_source_has_stored() -> None:
    def ends(present: Sequence[pb.JournalSpec], *changes: pb.JournalSpec) -> dict[str, int]:
        upserts = [pb.ApplyRequest.Change(upsert=each) for each in changes]
        return new_shared_ends(state_of(*present), pb.ApplyRequest(changes=upserts))

    assert ends([SOURCE], FORMING, HELD, OTHER) == {"a/source": 20}
    assert ends([HELD, FORMING], MADE, HELD) == {}  # It is not new.
    assert ends([SOURCE], new_spec(SOURCE, fork_at(SOURCE, "b/fork", 30, SharedSpan(20, 20)))) == {}
    require_stored({"a/source": 20}, {"a/source": JournalHead(status=pb.OK, listed=True, persisted_head=20, head=30)})
    require_stored({"a/source": 20}, {"a/source": JournalHead(status=pb.SUSPENDED, head=20)})
    for head in (
        JournalHead(status=pb.OK, listed=True, persisted_head=19, head=30),
        JournalHead(status=pb.SUSPENDED, head=19),
    ):
        with pytest.raises(InvalidInput, match="have it up to 19"):
            require_stored({"a/source": 20}, {"a/source": head})
    for heads in ({}, {"a/source": JournalHead(status=pb.NOT_JOURNAL_BROKER)}, {"a/source": JournalHead(head=30)}):
        with pytest.raises(Unavailable, match="is unknown"):
            require_stored({"a/source": 20}, heads)
