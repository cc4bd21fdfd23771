"""Lookups of journals in the mirrored key space: their specs, Routes and names."""

from __future__ import annotations

from collections.abc import Callable

from coranto.coordination.headers import process_id
from coranto.coordination.layout import MemberId
from coranto.errors import InvalidInput
from coranto.wire import protocol_pb2 as pb
from coranto_broker.replication.resolver import JournalKeySpace


class SpecLookup:
    """The specs of journals, by name and create revision."""

    def __init__(self, keyspace: JournalKeySpace, member: MemberId) -> None:
        self._keyspace = keyspace
        self._member = member
        self._former: set[tuple[str, int]] = set()

    def present_spec(self, journal: str) -> pb.JournalSpec | None:
        """Return the spec of a journal; None if it does not exist, or its spec is invalid."""
        item = self._keyspace.state.item(journal)
        return item.spec if item is not None else None

    def is_primary(self, journal: str) -> bool:
        """Return True if this broker is the journal's primary in its key space."""
        route = self._keyspace.state.route_of(journal, endpoints=False)
        primary = route.members[route.primary] if route.primary >= 0 else None
        return primary == process_id(self._member)

    def spec_of(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """Return the spec of a journal with that create revision; None if it was deleted.

        Raises InvalidInput if the journal exists but its spec cannot be read.
        """
        state = self._keyspace.state
        entry = state.entries.get(state.layout.item_key(journal))
        if entry is None or entry.kv.create_revision != create_revision:
            return None
        item = state.item(journal)
        if item is None:
            raise InvalidInput(f"the spec of {journal} in etcd cannot be read; apply a valid one", field=journal)
        return item.spec

    def names_below(self, journal: str) -> list[str]:
        """Return the names of journals below this one's name, even if their specs are invalid."""
        state = self._keyspace.state
        items = state.layout.items
        below = state.entries.prefixed(f"{state.layout.item_key(journal)}/")
        return [entry.kv.key.removeprefix(items) for entry in below]

    def spec_to_store(self, journal: str, create_revision: int) -> pb.JournalSpec | None:
        """Return the spec of a journal, or of its successor if that owns the fragments of this journal."""
        spec = self.spec_of(journal, create_revision)
        if spec is None and (journal, create_revision) in self._former:
            successor = self.successor_of(journal)
            return successor[0] if successor is not None else None
        return spec

    def reader(self, journal: str, create_revision: int) -> Callable[[], pb.JournalSpec | None]:
        """Return a function that calls `spec_of`."""
        return lambda: self.spec_of(journal, create_revision)

    def successor_of(self, journal: str) -> tuple[pb.JournalSpec, int] | None:
        """Return spec and create revision of the current journal of that name, if any. Raises like `spec_of`."""
        state = self._keyspace.state
        entry = state.entries.get(state.layout.item_key(journal))
        if entry is None:
            return None
        spec = self.spec_of(journal, entry.kv.create_revision)
        return (spec, entry.kv.create_revision) if spec is not None else None

    def adopt(self, journal: str, create_revision: int) -> None:
        """Let the current journal own the fragments of the former journal with that create revision."""
        self._former.add((journal, create_revision))

    def route_of(self, journal: str) -> list[str]:
        """Return the names of the brokers that the journal is assigned to."""
        return [f"{member.zone}#{member.suffix}" for member in self._keyspace.state.route_of(journal).members]
