"""The cluster's key space as of one revision. Pure.

`Entries` are its key-values: sorted, immutable, and merged with the changes of a batch in one pass. `KeySpaceState` is
a view of them in terms of items, members and assignments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, cast

from coranto.coordination.entities import AssignT, Entities, ItemT, MemberT, implied_route
from coranto.coordination.etcd import EtcdHeader, KeyValue, Snapshot, WatchEvent
from coranto.coordination.layout import AssignmentKey, Layout, MemberId
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb


@dataclass(frozen=True, slots=True)
class Item(Generic[ItemT]):
    id: str
    spec: ItemT
    kv: KeyValue

    @property
    def create_revision(self) -> int:
        return self.kv.create_revision

    @property
    def mod_revision(self) -> int:
        return self.kv.mod_revision


@dataclass(frozen=True, slots=True)
class Member(Generic[MemberT]):
    id: MemberId
    spec: MemberT
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Assignment(Generic[AssignT]):
    key: AssignmentKey
    value: AssignT
    kv: KeyValue

    @property
    def item(self) -> str:
        return self.key.item

    @property
    def member(self) -> MemberId:
        return self.key.member

    @property
    def slot(self) -> int:
        return self.key.slot


@dataclass(frozen=True, slots=True)
class KeySpaceEntry:
    """A key-value and its decoded value; None if it did not decode."""

    kv: KeyValue
    decoded: object | None


Decode = Callable[[KeyValue], object | None]


class Entries:
    """Key-values in key order, with their decoded values. Immutable."""

    __slots__ = ("_entries", "_keys")

    def __init__(self, keys: list[str], entries: list[KeySpaceEntry]) -> None:
        self._keys = keys
        self._entries = entries

    @staticmethod
    def load(kvs: Iterable[KeyValue], decode: Decode) -> Entries:
        ordered = sorted(kvs, key=lambda kv: kv.key)
        return Entries([kv.key for kv in ordered], [KeySpaceEntry(kv, decode(kv)) for kv in ordered])

    def merge(self, events: Iterable[WatchEvent], decode: Decode) -> Entries:
        """Return these entries with `events` applied in order. An event that is not newer than its entry is dropped."""
        last: dict[str, WatchEvent] = {}
        for event in events:
            last[event.kv.key] = event
        keys: list[str] = []
        entries: list[KeySpaceEntry] = []
        taken = 0  # Entries before this index are copied or replaced.
        for key in sorted(last):
            event = last[key]
            at = bisect_left(self._keys, key, taken)
            keys.extend(self._keys[taken:at])
            entries.extend(self._entries[taken:at])
            taken = at
            if at < len(self._keys) and self._keys[at] == key:
                taken = at + 1
                if self._entries[at].kv.mod_revision >= event.kv.mod_revision:
                    keys.append(key)
                    entries.append(self._entries[at])
                    continue
            if not event.deleted:
                keys.append(key)
                entries.append(KeySpaceEntry(event.kv, decode(event.kv)))
        keys.extend(self._keys[taken:])
        entries.extend(self._entries[taken:])
        return Entries(keys, entries)

    def are_current(self, snapshot: Snapshot, revision: int) -> bool:
        """Return True if a later snapshot shows that nothing changed since these entries were read at `revision`."""
        return len(snapshot.kvs) == len(self) and all(kv.mod_revision <= revision for kv in snapshot.kvs)

    def differences(self, kvs: Sequence[KeyValue], through: int | None = None) -> dict[str, tuple[int, int]]:
        """Return the keys whose revisions differ: the entry's, and the one in `kvs`; 0 where the key is absent.

        `kvs` are all keys of the same prefix as of the same revision. With `through`, they are as of a later one, and
        the entries are as of `through`; only keys that have not changed since are compared.
        """
        ours = {entry.kv.key: entry.kv.mod_revision for entry in self._entries}
        theirs = {kv.key: kv.mod_revision for kv in kvs if through is None or kv.mod_revision <= through}
        keys = ours.keys() | theirs.keys() if through is None else theirs.keys()
        found = ((key, (ours.get(key, 0), theirs.get(key, 0))) for key in sorted(keys))
        return {key: revisions for key, revisions in found if revisions[0] != revisions[1]}

    def get(self, key: str) -> KeySpaceEntry | None:
        at = bisect_left(self._keys, key)
        return self._entries[at] if at < len(self._keys) and self._keys[at] == key else None

    def prefixed(self, prefix: str) -> Sequence[KeySpaceEntry]:
        """Return the entries whose keys begin with `prefix`."""
        begin = bisect_left(self._keys, prefix)
        end = bisect_left(self._keys, prefix + "\U0010ffff", begin)
        return self._entries[begin:end]

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[KeySpaceEntry]:
        return iter(self._entries)


class KeySpaceState(Generic[ItemT, MemberT, AssignT]):
    """The key space as of `header.revision`. Immutable; keep it for as long as one consistent view is needed."""

    def __init__(
        self,
        header: EtcdHeader,
        entries: Entries,
        layout: Layout,
        entities: Entities[ItemT, MemberT, AssignT],
        *,
        changed: frozenset[str] | None = None,
    ) -> None:
        """`changed` are the items whose spec or assignments may differ from the state before. None: any item may.

        An observer needs to examine only these, so the cost of a change does not depend on the size of the key space.
        """
        self.header = header
        self.changed = changed
        self.entries = entries
        self.layout = layout
        self.entities = entities

    @property
    def revision(self) -> int:
        return self.header.revision

    def item(self, name: str) -> Item[ItemT] | None:
        try:
            entry = self.entries.get(self.layout.item_key(name))
        except InvalidInput:  # A name that no key can hold.
            return None
        return cast("Item[ItemT]", entry.decoded) if entry and entry.decoded else None

    def member(self, member: MemberId) -> Member[MemberT] | None:
        try:
            entry = self.entries.get(self.layout.member_key(member))
        except InvalidInput:
            return None
        return cast("Member[MemberT]", entry.decoded) if entry and entry.decoded else None

    @cached_property
    def items(self) -> Sequence[Item[ItemT]]:
        """All items, by name."""
        entries = self.entries.prefixed(self.layout.items)
        return [cast("Item[ItemT]", entry.decoded) for entry in entries if entry.decoded]

    @cached_property
    def members(self) -> Sequence[Member[MemberT]]:
        """All members, by zone and suffix."""
        entries = self.entries.prefixed(self.layout.members)
        return [cast("Member[MemberT]", entry.decoded) for entry in entries if entry.decoded]

    @cached_property
    def all_assignments(self) -> Sequence[Assignment[AssignT]]:
        """All assignments, in key order."""
        entries = self.entries.prefixed(self.layout.assignments)
        return [cast("Assignment[AssignT]", entry.decoded) for entry in entries if entry.decoded]

    @cached_property
    def by_member(self) -> dict[MemberId, list[Assignment[AssignT]]]:
        """The assignments of each member that has any."""
        found: dict[MemberId, list[Assignment[AssignT]]] = {}
        for assignment in self.all_assignments:
            found.setdefault(assignment.member, []).append(assignment)
        return found

    def assignments_in_key_order(self, item: str) -> list[Assignment[AssignT]]:
        """Return an item's assignments by zone, suffix and slot: the order of a Route's members."""
        try:
            prefix = self.layout.assignments_of(item)
        except InvalidInput:
            return []
        return [cast("Assignment[AssignT]", entry.decoded) for entry in self.entries.prefixed(prefix) if entry.decoded]

    def assignments(self, item: str) -> list[Assignment[AssignT]]:
        """Return an item's assignments by slot: the primary first, if there is one."""
        return sorted(self.assignments_in_key_order(item), key=lambda a: (a.slot, a.member))

    def consistent(self, item: str) -> bool:
        """Return True if the item has assignments and all of them are consistent."""
        found = [(a.key, a.value) for a in self.assignments_in_key_order(item)]
        return bool(found) and all(self.entities.consistent(found))

    def route_of(self, item: str, *, endpoints: bool = True) -> pb.Route:
        """Return the Route that the item's assignments imply. A member whose key is missing has an empty endpoint."""
        assignments = self.assignments_in_key_order(item)
        route = implied_route([a.key for a in assignments])
        if endpoints:
            for assignment in assignments:
                member = self.member(assignment.member)
                route.endpoints.append(self.entities.endpoint(member.spec) if member else "")
        return route

    @cached_property
    def leader(self) -> Member[MemberT] | None:
        """The member with the oldest key, which plans for all."""
        return min(self.members, key=lambda m: (m.kv.create_revision, m.id), default=None)
