"""`Coordinator`, a small interface to etcd, and the data types of its parameters and results.

The rest of Coranto uses etcd only through `Coordinator`: ordered reads of a prefix, conditional transactions, a watch
that survives broken streams, and leases. `coranto.coordination.etcd_client` implements it on a real etcd.

Keys are text. Bytes that are not UTF-8 are kept by surrogate escape, so a stray key of another program is harmless.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coranto.wire import protocol_pb2 as pb

MAX_TXN_OPS = 128
"""etcd's default limit on the operations, and separately on the comparisons, of one transaction."""


@dataclass(frozen=True, slots=True)
class EtcdHeader:
    """The origin of a response, and the store's revision at that time. The ids and the term are uint64."""

    cluster_id: int
    member_id: int
    revision: int
    raft_term: int

    def to_wire(self) -> pb.Header.Etcd:
        return pb.Header.Etcd(
            cluster_id=self.cluster_id, member_id=self.member_id, revision=self.revision, raft_term=self.raft_term
        )


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key with its value and history. `lease` is 0 for a key without one. A deletion keeps key and mod_revision."""

    key: str
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Key-values of a range, in key order. `count` is the number of keys in the range before limits and filters."""

    header: EtcdHeader
    kvs: tuple[KeyValue, ...]
    count: int


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of one key."""

    kv: KeyValue
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """Changes of whole revisions, in order. Without events: everything through `header.revision` was delivered."""

    header: EtcdHeader
    events: tuple[WatchEvent, ...]
    reconnected: bool = False
    """True if the watch has reconnected, and continues after `header.revision`. There are no events."""


class CompareTarget(enum.Enum):
    """The property of a key to compare. The version and the revisions of an absent key are 0."""

    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VALUE = "value"
    LEASE = "lease"


class Relation(enum.Enum):
    EQUAL = "="
    NOT_EQUAL = "!="
    LESS = "<"
    GREATER = ">"


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction. The operand is bytes for VALUE and an integer otherwise.

    With `prefix`, it must hold for each key that begins with `key`; if there is none, for an absent key.
    """

    key: str
    target: CompareTarget
    operand: int | bytes
    relation: Relation = Relation.EQUAL
    prefix: bool = False


def unmodified(kv: KeyValue) -> Compare:
    """Return the condition that the key has not been written or deleted since `kv` was read."""
    return Compare(kv.key, CompareTarget.MOD_REVISION, kv.mod_revision)


def absent(key: str) -> Compare:
    """Return the condition that the key does not exist."""
    return Compare(key, CompareTarget.CREATE_REVISION, 0)


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key under `lease` (0 = none), or with `keep_lease` under its current lease (the key must exist)."""

    key: str
    value: bytes = field(repr=False)
    lease: int = 0
    keep_lease: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key; with `prefix`, all keys that begin with it."""

    key: str
    prefix: bool = False


Op = Put | Delete


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The result of a transaction.

    If the comparisons failed, `found` holds the keys of `otherwise`, with None for a key that does not exist.
    """

    succeeded: bool
    header: EtcdHeader
    found: tuple[KeyValue | None, ...] = ()


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease as granted. `ttl_seconds` may be larger than requested: etcd has a minimum of about two seconds."""

    id: int
    ttl_seconds: int


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """The state of a lease. Times in seconds. `remaining` is 0 when the lease is gone. `keys` are attached to it."""

    remaining: int
    granted: int
    keys: tuple[str, ...] = ()


class Coordinator(Protocol):
    """A linearizable, ordered, leased and watched key-value store: etcd, or a simulation of it.

    Every method raises Unavailable when nothing was applied and a later call may succeed, and CoordinationError when
    the call was refused. A cancelled read leaves nothing behind. A cancelled change may or may not have been applied.
    """

    async def range(
        self, prefix: str, *, revision: int = 0, min_mod_revision: int = 0, limit: int = 0, keys_only: bool = False
    ) -> Snapshot:
        """Return the keys that begin with `prefix`, as of `revision` (0 = now). `limit` 0 = all.

        `header.revision` is the revision of the content. With `min_mod_revision`, only keys modified at or after it are
        returned.
        """
        ...

    async def get(self, key: str) -> tuple[EtcdHeader, KeyValue | None]:
        """Return the current state of one key; None if it does not exist."""
        ...

    async def txn(self, compares: Sequence[Compare], ops: Sequence[Op], *, otherwise: Sequence[str] = ()) -> TxnResult:
        """Apply all of `ops` if all of `compares` hold. Else apply nothing and read the keys of `otherwise`.

        Raises TxnOutcomeUnknown when the connection broke and the transaction may or may not have been applied. The
        same holds for a cancelled call.
        """
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield changes under `prefix` at or after `from_revision`, without gaps or repetitions, across reconnections.

        After each reconnection, it yields a batch with `reconnected`.
        Close the generator (`contextlib.aclosing`) to end the watch.
        Raises WatchReset when the history is gone (compaction) or the revision has decreased: read the prefix again.
        """
        ...

    async def lease_grant(self, ttl_seconds: int) -> GrantedLease:
        """Grant a new lease. A cancelled call may leave a lease, which expires."""
        ...

    async def lease_keepalive(self, lease: int) -> int:
        """Refresh a lease. Return its time to live in seconds; 0 if it is gone."""
        ...

    async def lease_status(self, lease: int) -> LeaseStatus: ...

    async def lease_revoke(self, lease: int) -> None:
        """Delete a lease with all its keys. Does nothing if the lease is gone."""
        ...

    async def bytes_in_use(self) -> int:
        """Return the bytes in use in etcd's database, including history; 0 if this client has no permission."""
        ...

    async def close(self) -> None: ...


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key above all keys that begin with `prefix`; b"\\0" (etcd: no end) if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")
