"""The layout of a cluster's entities in etcd, and the encoding of their keys.

::

    <prefix>/items/<item>                              a journal's (or shard's) spec
    <prefix>/members/<zone>#<suffix>                   a process's spec, under its lease
    <prefix>/assign/<item>#<zone>#<suffix>#<slot>      an assignment, under the member's lease; slot 0 is the primary

`#` sorts below every byte of a name, so the order of keys is the order of entities. The layout is Gazette's,
so both can share a prefix.

Some keys exist only in Coranto. They are outside of any prefix (prefixes begin with a slash), and have no lease::

    coranto/in-sync<prefix>#<item>                     the replicas with all acknowledged content
    coranto/cluster<prefix>                            the cluster's identity, and whether etcd was restored
    coranto/stores<prefix>#<bucket>                    the last time that journals got another prefix in a bucket
    coranto/broker<prefix>#<zone>#<suffix>             a broker's last use of the cluster: time and data directory
    coranto/note<prefix>#<note>                        a note of an observer of journals, such as an audit
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from coranto.errors import InvalidInput

SEPARATOR = "#"

FOLDERS = frozenset({"items", "members", "assign"})
"""The folders that hold all keys below a prefix."""


@dataclass(frozen=True, slots=True, order=True)
class MemberId:
    """A process of the cluster: the failure zone that it runs in, and its name within the zone."""

    zone: str
    suffix: str

    def __str__(self) -> str:
        return f"{self.zone}{SEPARATOR}{self.suffix}"


@dataclass(frozen=True, slots=True)
class ItemKey:
    item: str


@dataclass(frozen=True, slots=True)
class MemberKey:
    member: MemberId


@dataclass(frozen=True, slots=True)
class AssignmentKey:
    item: str
    member: MemberId
    slot: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The key layout below `prefix`, an absolute path without a trailing slash."""

    prefix: str

    def __post_init__(self) -> None:
        clean = posixpath.normpath(self.prefix)
        if not self.prefix.startswith("/") or self.prefix == "/" or clean != self.prefix:
            raise InvalidInput(f"etcd prefix {self.prefix!r} must be a clean absolute path such as /gazette/cluster")

    @property
    def root(self) -> str:
        """The common prefix of all keys of the cluster."""
        return f"{self.prefix}/"

    @property
    def items(self) -> str:
        return f"{self.prefix}/items/"

    @property
    def members(self) -> str:
        return f"{self.prefix}/members/"

    @property
    def assignments(self) -> str:
        return f"{self.prefix}/assign/"

    def item_key(self, item: str) -> str:
        return self.items + _part("item", item)

    def in_sync_key(self, item: str) -> str:
        """Return the key of the in-sync record of `item`. Watches of a prefix do not see it."""
        return f"{self.in_sync_records}{_part('item', item)}"

    @property
    def in_sync_records(self) -> str:
        """The common prefix of the keys of all in-sync records."""
        return f"coranto/in-sync{self.prefix}{SEPARATOR}"

    def bucket_key(self, bucket: str) -> str:
        """Return the key of a bucket of fragment stores, which is written when journals get another prefix in it."""
        return f"coranto/stores{self.prefix}{SEPARATOR}{_part('bucket', bucket)}"

    @property
    def notes(self) -> str:
        """The common prefix of the keys of all notes."""
        return f"coranto/note{self.prefix}{SEPARATOR}"

    def note_key(self, note: str) -> str:
        return f"{self.notes}{_part('note', note)}"

    @property
    def cluster_key(self) -> str:
        """The key of the cluster's identity."""
        return f"coranto/cluster{self.prefix}"

    @property
    def uses(self) -> str:
        """The common prefix of the keys that record brokers' uses of the cluster."""
        return f"coranto/broker{self.prefix}{SEPARATOR}"

    def use_key(self, member: MemberId) -> str:
        """Return the key that records a broker's use of the cluster, with its data directory."""
        return f"{self.uses}{_part('zone', member.zone)}{SEPARATOR}{_part('suffix', member.suffix)}"

    def member_key(self, member: MemberId) -> str:
        return f"{self.members}{_part('zone', member.zone)}{SEPARATOR}{_part('suffix', member.suffix)}"

    def assignments_of(self, item: str) -> str:
        """Return the common prefix of all assignment keys of `item`."""
        return f"{self.assignments}{_part('item', item)}{SEPARATOR}"

    def assignment_key(self, item: str, member: MemberId, slot: int) -> str:
        if slot < 0:
            raise InvalidInput(f"assignment slot {slot} is negative; slots begin at 0, the primary's")
        zone, suffix = _part("zone", member.zone), _part("suffix", member.suffix)
        return f"{self.assignments_of(item)}{zone}{SEPARATOR}{suffix}{SEPARATOR}{slot}"

    def item_of(self, key: str) -> str | None:
        """Return the item of an item key or an assignment key; None for any other key."""
        if key.startswith(self.items):
            return key[len(self.items) :]
        if key.startswith(self.assignments):
            return key[len(self.assignments) :].partition(SEPARATOR)[0]
        return None

    def decode(self, key: str) -> ItemKey | MemberKey | AssignmentKey:
        """Decode a key. Raises InvalidInput for a key that is not of this layout."""
        if key.startswith(self.items):
            (item,) = _split(key, key[len(self.items) :], 1)
            return ItemKey(item)
        if key.startswith(self.members):
            zone, suffix = _split(key, key[len(self.members) :], 2)
            return MemberKey(MemberId(zone, suffix))
        if key.startswith(self.assignments):
            item, zone, suffix, slot = _split(key, key[len(self.assignments) :], 4)
            if not (slot.isascii() and slot.isdigit()):
                raise InvalidInput(f"key {key!r}: {slot!r} is not a slot number")
            return AssignmentKey(item, MemberId(zone, suffix), int(slot))
        raise InvalidInput(f"key {key!r} is neither an item, a member nor an assignment of {self.prefix}")


def _part(kind: str, value: str) -> str:
    if not value or min(value) <= SEPARATOR:
        raise InvalidInput(
            f"{kind} {value!r} must not be empty nor hold {SEPARATOR!r} or characters that sort below it"
        )
    return value


def _split(key: str, rest: str, count: int) -> list[str]:
    parts = rest.split(SEPARATOR)
    if len(parts) != count or not all(parts):
        raise InvalidInput(f"key {key!r} should have {count} parts separated by {SEPARATOR!r}")
    return parts
