"""A cache of facts about journals, computed from etcd.

A call for the heads of ten thousand journals needs all facts, and few change between two calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from coranto import labels
from coranto.coordination.keyspace_state import Item
from coranto.coordination.layout import MemberId
from coranto.specs.validation import may_read
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import JournalHead
from coranto_broker.replication.resolver import JournalKeySpace, JournalState


@dataclass(frozen=True, slots=True)
class EtcdFacts:
    """The facts of one journal. They are shared: copy messages before changing them."""

    item: Item[pb.JournalSpec]
    labels: pb.LabelSet
    """The labels of the spec, and those that selectors see in addition (`labels.with_meta`)."""
    primary: MemberId | None
    head: JournalHead
    """The part of its head that is in etcd. If its status is OK, replicas have the rest."""


class JournalsInEtcd:
    """The facts of all journals, for the broker `member`."""

    def __init__(self, keyspace: JournalKeySpace, member: MemberId) -> None:
        self._keyspace = keyspace
        self._member = member
        self._known: dict[str, EtcdFacts] = {}
        self.cache_misses = 0
        """The number of facts that were not in the cache."""
        keyspace.observe(self._forget)

    def all(self) -> list[EtcdFacts]:
        """Return the facts of all journals in the current key space, ordered by name."""
        state, known = self._keyspace.state, self._known
        return [known.get(item.id) or self._compute(state, item) for item in state.items]

    def _forget(self, state: JournalState) -> None:
        if state.changed is None:
            self._known.clear()
            return
        for journal in state.changed:
            self._known.pop(journal, None)

    def _compute(self, state: JournalState, item: Item[pb.JournalSpec]) -> EtcdFacts:
        spec = item.spec
        assignments = state.assignments_in_key_order(item.id)
        primary = next((each.member for each in assignments if each.slot == 0), None)
        head = JournalHead(
            journal=item.id,
            status=pb.OK,
            create_revision=item.create_revision,
            mod_revision=item.mod_revision,
            replication=max(0, state.entities.replication(spec)),
            replicas=len(assignments),
            in_sync=bool(assignments) and all(state.entities.consistent([(a.key, a.value) for a in assignments])),
            suspended=spec.suspend.level,
            is_primary=any(each.slot == 0 and each.member == self._member for each in assignments),
            broker=pb.ProcessSpec.ID(zone=self._member.zone, suffix=self._member.suffix),
            keeps_forks=True,
        )
        if not may_read(spec):
            head.status, head.problem = pb.NOT_ALLOWED, "its flags do not allow reading"
        elif spec.suspend.level == pb.JournalSpec.Suspend.FULL:
            head.status, head.head = pb.SUSPENDED, spec.suspend.offset
            head.problem = "it is fully suspended; the next append wakes it"
        self.cache_misses += 1
        facts = EtcdFacts(item, labels.with_meta(item.id, spec.labels), primary, head)
        self._known[item.id] = facts
        return facts
