"""Facts of journals: current in the key space, and recomputed only for journals that changed."""

from __future__ import annotations

from typing import Any

from coranto.coordination.keyspace_state import KeySpaceState
from coranto.wire import protocol_pb2 as pb
from coranto_broker.replication.journal_facts import JournalsInEtcd
from tests.broker.replication.test_resolver import ENTITIES, LAYOUT, OTHER, SELF, Cluster

FULL = pb.JournalSpec.Suspend.FULL


class Mirror(Cluster):
    """A key space whose state is constant until a change is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = super().state

    @property
    def state(self) -> Any:
        return self.seen

    def change(self, *changed: str, loaded: bool = False) -> None:
        state = super().state
        self.seen = KeySpaceState(
            self.header, state.entries, LAYOUT, ENTITIES, changed=None if loaded else frozenset(changed)
        )
        self.report(self.seen)


def facts_of(mirror: Mirror) -> JournalsInEtcd:
    keyspace: Any = mirror
    return JournalsInEtcd(keyspace, SELF)


def test_facts_are_recomputed_only_for_journals_that_changed() -> None:
    mirror = Mirror()
    facts = facts_of(mirror)
    names = [f"some/journal-{number:03}" for number in range(100)]
    for name in names:
        mirror.journal(name)
        mirror.assign(SELF, 0, name)
    mirror.change(*names)
    assert [each.item.id for each in facts.all()] == names
    assert facts.cache_misses == 100
    first = facts.all()[0]
    assert (first.primary, first.head.is_primary, first.head.replicas) == (SELF, True, 1)
    assert facts.cache_misses == 100
    mirror.journal(names[0], suspend=FULL)
    mirror.unassign(SELF, 0, names[1])
    mirror.assign(OTHER, 0, names[1])
    mirror.delete(LAYOUT.item_key(names[2]))
    mirror.journal("some/new")
    mirror.change(*names[:3], "some/new")
    found = {each.item.id: each for each in facts.all()}
    assert list(found) == [names[0], names[1], *names[3:], "some/new"]
    assert facts.cache_misses == 103
    assert found[names[0]].head.status == pb.SUSPENDED
    assert (found[names[1]].primary, found[names[1]].head.is_primary) == (OTHER, False)
    assert found["some/new"].primary is None


def test_facts_of_a_reloaded_key_space_are_all_recomputed() -> None:
    mirror = Mirror()
    facts = facts_of(mirror)
    mirror.journal("some/journal")
    mirror.change("some/journal")
    (before,) = facts.all()
    mirror.journal("some/journal", replication=3)
    mirror.change(loaded=True)
    (after,) = facts.all()
    assert (before.head.replication, after.head.replication, facts.cache_misses) == (1, 3, 2)
