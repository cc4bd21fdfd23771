"""etcd through one small interface.

`Coordinator` is the only view that the rest of Coranto has of etcd: ordered reads of a prefix, guarded transactions, a
watch that survives broken streams, and leases. `EtcdCoordinator` implements it on the raw v3 stubs, because it needs
the header of every response: peers compare revisions, and a wire Header carries all four of the header's numbers.

Keys are text. Bytes that are not UTF-8 are kept by surrogate escape, so a stray key of another program does no harm.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import grpc
import grpc.aio
import structlog
from aetcd.rpc import kv_pb2, rpc_pb2, rpc_pb2_grpc

from coranto.effects import Clock, SystemClock
from coranto.errors import CoordinationError, InvalidInput, TxnOutcomeUnknown, Unavailable, WatchReset
from coranto.security.certificates import ChannelCertificates
from coranto.security.tls import ClientTls
from coranto.wire import protocol_pb2 as pb

_log = structlog.get_logger(__name__)

MAX_TXN_OPS = 128
"""etcd's default limit on the operations, and separately on the comparisons, of one transaction."""

_PAGE = 10_000  # Keys per page of a range, so that a large prefix does not arrive as one message.
_RETRY_DELAYS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 5000),  # The time limit of one attempt to connect.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # A quiet watch sends nothing else.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


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
    """Write a key under `lease` (0 = none), or with `keep_lease` under its present lease (the key must exist)."""

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
        """Return the present state of one key; None if it does not exist."""
        ...

    async def txn(self, compares: Sequence[Compare], ops: Sequence[Op], *, otherwise: Sequence[str] = ()) -> TxnResult:
        """Apply all of `ops` if all of `compares` hold. Else apply nothing and read the keys of `otherwise`.

        Raises TxnOutcomeUnknown when the connection broke and the transaction may or may not have been applied. The
        same holds for a cancelled call.
        """
        ...

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield changes under `prefix` at or after `from_revision`, without gap or repetition, over broken connections.

        Close the generator (`contextlib.aclosing`) to end the watch.
        Raises WatchReset when the history is gone (compaction) or the store went back in time: read the prefix again.
        """
        ...

    async def lease_grant(self, ttl_seconds: int) -> GrantedLease:
        """Grant a new lease. A cancelled call may leave a lease, which runs out by itself."""
        ...

    async def lease_keepalive(self, lease: int) -> int:
        """Refresh a lease. Return its time to live in seconds; 0 if it is gone."""
        ...

    async def lease_status(self, lease: int) -> LeaseStatus: ...

    async def lease_revoke(self, lease: int) -> None:
        """Delete a lease with all its keys. It is no error if the lease is gone already."""
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


def channel_target(endpoint: str) -> str:
    """Return the gRPC target of an etcd endpoint.

    An endpoint is `host:port`, `http://host:port`, `https://host:port`, `unix:///path`, or several IPv4 `host:port`
    without TLS, separated by commas. Raises InvalidInput.
    """
    parts = [part.strip() for part in endpoint.split(",") if part.strip()]
    addresses = [_address(part, endpoint) for part in parts]
    if not addresses:
        raise InvalidInput("empty etcd endpoint; give host:port")
    if len(addresses) == 1:
        return addresses[0]
    for part, address in zip(parts, addresses, strict=True):
        try:
            ipaddress.IPv4Address(address.rpartition(":")[0])
            usable = not is_secure(part)  # A certificate would have to name all of them.
        except ValueError:
            usable = False
        if not usable:
            raise InvalidInput(
                f"etcd endpoints {endpoint!r}: several endpoints must be IPv4 addresses without TLS; "
                "give one host name that resolves to all of them instead"
            )
    return "ipv4:" + ",".join(addresses)


def is_secure(endpoint: str) -> bool:
    """Return True if an etcd endpoint uses TLS, that is, if it begins with `https://`."""
    return endpoint.strip().lower().startswith("https://")


def etcd_certificates(endpoint: str, tls: ClientTls | None) -> ChannelCertificates | None:
    """Return credentials for an etcd endpoint; None if it uses no TLS. Raises InvalidInput, also for unneeded `tls`."""
    if is_secure(endpoint):
        certificates = ChannelCertificates(tls)
        certificates.get()  # Fail now if a file cannot be read.
        return certificates
    if tls is not None:
        raise InvalidInput(f"etcd endpoint {endpoint!r} is without TLS; write https://host:port", field="etcd")
    return None


def _address(part: str, endpoint: str) -> str:
    if part.startswith("unix:"):
        return part
    url = urlsplit(part if "//" in part else f"//{part}")
    try:
        port = url.port
    except ValueError:
        port = None
    wrong_scheme = url.scheme not in ("", "http", "https")
    if wrong_scheme or not url.hostname or port is None or url.path.strip("/") or url.query:
        raise InvalidInput(f"etcd endpoint {endpoint!r} is not of the form host:port, http://… or https://host:port")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{host}:{port}"


class EtcdCoordinator:
    """`Coordinator` on an etcd v3 server. Use within one event loop; close when done.

    `timeout_seconds` bounds each single call. A server restart within that time goes unnoticed, except by transactions.
    `tls` is for an `https` endpoint: the authority to trust (default: gRPC's), and the client certificate to present.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_seconds: float = 10.0,
        clock: Clock | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._target = channel_target(endpoint)
        self._certificates = etcd_certificates(endpoint, tls)
        self._credentials: grpc.ChannelCredentials | None = None
        self._outdated: list[grpc.aio.Channel] = []
        self._timeout = timeout_seconds
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._channel: grpc.aio.Channel | None = None
        self._kv: Any = None
        self._lease: Any = None
        self._watch: Any = None

    async def __aenter__(self) -> EtcdCoordinator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        outdated, self._outdated = self._outdated, []
        for channel in outdated:
            await channel.close()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        credentials = self._certificates.get() if self._certificates is not None else None
        if self._channel is not None:
            if credentials is self._credentials:
                return
            # Certificates have changed. A watch keeps its old connection while that works, then uses the new channel.
            self._outdated.append(self._channel)
        # The channel belongs to the running loop, so it is made at first use and not at construction.
        self._credentials = credentials
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(self._target, credentials, options=_OPTIONS)
        self._kv = rpc_pb2_grpc.KVStub(self._channel)
        self._lease = rpc_pb2_grpc.LeaseStub(self._channel)
        self._watch = rpc_pb2_grpc.WatchStub(self._channel)

    async def range(
        self, prefix: str, *, revision: int = 0, min_mod_revision: int = 0, limit: int = 0, keys_only: bool = False
    ) -> Snapshot:
        self._connect()
        begin, end = encode_key(prefix), prefix_end(encode_key(prefix))
        kvs: list[KeyValue] = []
        header: EtcdHeader | None = None
        count = 0
        while True:
            page = min(limit - len(kvs), _PAGE) if limit else _PAGE
            request = rpc_pb2.RangeRequest(
                key=begin,
                range_end=end,
                revision=revision,
                min_mod_revision=min_mod_revision,
                limit=page,
                keys_only=keys_only,
            )
            response = await self._call(self._kv.Range, request)
            if header is None:
                header, count = _header(response.header), response.count
                # Later pages must be of the same revision as the first.
                revision = revision or header.revision
                header = EtcdHeader(header.cluster_id, header.member_id, revision, header.raft_term)
            kvs.extend(_key_value(kv) for kv in response.kvs)
            if not response.more or (limit and len(kvs) >= limit):
                return Snapshot(header, tuple(kvs), count)
            begin = response.kvs[-1].key + b"\0"

    async def get(self, key: str) -> tuple[EtcdHeader, KeyValue | None]:
        self._connect()
        response = await self._call(self._kv.Range, rpc_pb2.RangeRequest(key=encode_key(key)))
        return _header(response.header), _key_value(response.kvs[0]) if response.kvs else None

    async def txn(self, compares: Sequence[Compare], ops: Sequence[Op], *, otherwise: Sequence[str] = ()) -> TxnResult:
        self._connect()
        request = rpc_pb2.TxnRequest(
            compare=[_compare(c) for c in compares],
            success=[_operation(op) for op in ops],
            failure=[rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=encode_key(key))) for key in otherwise],
        )
        response = await self._call(self._kv.Txn, request, changes=bool(ops))
        found: tuple[KeyValue | None, ...] = ()
        if not response.succeeded:
            found = tuple(
                _key_value(part.response_range.kvs[0]) if part.response_range.kvs else None
                for part in response.responses
            )
        return TxnResult(response.succeeded, _header(response.header), found)

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        if from_revision < 1:
            raise InvalidInput(f"cannot watch from revision {from_revision}; revisions begin at 1")
        next_revision = from_revision
        failures = 0
        while True:
            problem = "the stream ended"
            try:
                async with aclosing(self._watch_once(prefix, next_revision)) as batches:
                    async for batch in batches:
                        failures = 0
                        next_revision = max(next_revision, batch.header.revision + 1)
                        yield batch
            except grpc.aio.AioRpcError as error:
                if error.code() not in _TRANSIENT:
                    _refused(error, "watch")
                problem = error.details() or error.code().name
            except asyncio.InvalidStateError as error:  # The stream ended before the request was written.
                problem = str(error)
            delay = _RETRY_DELAYS[min(failures, len(_RETRY_DELAYS) - 1)]
            failures += 1
            _log.debug("watch.resume", prefix=prefix, revision=next_revision, problem=problem, delay=delay)
            await self._clock.sleep(delay)

    async def _watch_once(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Watch on one stream. A batch's header revision is that of its last event, or of the progress notification."""
        self._connect()
        # With `hasleader`, a server cut off from its majority ends the stream instead of going quiet.
        call = self._watch.Watch(metadata=(("hasleader", "true"),), wait_for_ready=True)
        try:
            create = rpc_pb2.WatchCreateRequest(
                key=encode_key(prefix),
                range_end=prefix_end(encode_key(prefix)),
                start_revision=from_revision,
                progress_notify=True,
                fragment=True,
            )
            await call.write(rpc_pb2.WatchRequest(create_request=create))
            events: list[WatchEvent] = []
            while True:
                response = await call.read()
                if response is grpc.aio.EOF:
                    return
                header = _header(response.header)
                if response.compact_revision:
                    raise WatchReset(
                        f"revision {from_revision} is compacted (through {response.compact_revision}); "
                        "read the prefix again"
                    )
                if response.canceled:
                    _log.warning("watch.cancelled", prefix=prefix, reason=response.cancel_reason)
                    return
                if response.created:
                    if header.revision + 1 < from_revision:
                        raise WatchReset(f"the store is at revision {header.revision}, before {from_revision}")
                    continue
                events.extend(_event(event) for event in response.events)
                if response.fragment:
                    continue  # More events of this revision follow.
                if events:
                    yield WatchBatch(_at(header, events[-1].kv.mod_revision), tuple(events))
                    events = []
                else:
                    yield WatchBatch(header, ())
        finally:
            call.cancel()

    async def lease_grant(self, ttl_seconds: int) -> GrantedLease:
        self._connect()
        response = await self._call(self._lease.LeaseGrant, rpc_pb2.LeaseGrantRequest(TTL=ttl_seconds))
        if response.error:
            raise CoordinationError(f"etcd granted no lease: {response.error}; see etcd's log")
        return GrantedLease(int(response.ID), int(response.TTL))

    async def lease_keepalive(self, lease: int) -> int:
        self._connect()
        call = self._lease.LeaseKeepAlive(timeout=self._timeout, wait_for_ready=True)
        try:
            await call.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
            response = await call.read()
            if response is grpc.aio.EOF:
                raise Unavailable(f"etcd at {self.endpoint} ended the keep-alive stream without an answer; try again")
            return max(0, int(response.TTL))
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return 0
            self._raise(error, "LeaseKeepAlive", changes=False)
        finally:
            call.cancel()

    async def lease_status(self, lease: int) -> LeaseStatus:
        self._connect()
        request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
        try:
            response = await self._lease.LeaseTimeToLive(request, timeout=self._timeout, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return LeaseStatus(0, 0)
            self._raise(error, "LeaseTimeToLive", changes=False)
        return LeaseStatus(max(0, int(response.TTL)), int(response.grantedTTL), tuple(map(decode_key, response.keys)))

    async def lease_revoke(self, lease: int) -> None:
        self._connect()
        try:
            await self._lease.LeaseRevoke(
                rpc_pb2.LeaseRevokeRequest(ID=lease), timeout=self._timeout, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                self._raise(error, "LeaseRevoke", changes=False)

    async def _call(self, method: Any, request: Any, *, changes: bool = False) -> Any:
        try:
            return await method(request, timeout=self._timeout, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            self._raise(error, type(request).__name__.removesuffix("Request"), changes=changes)

    def _raise(self, error: grpc.aio.AioRpcError, what: str, *, changes: bool) -> NoReturn:
        if error.code() not in _TRANSIENT:
            _refused(error, what)
        detail = f"etcd at {self.endpoint}: {what}: {error.code().name}: {error.details()}"
        raise (TxnOutcomeUnknown if changes else Unavailable)(detail) from error


def _refused(error: grpc.aio.AioRpcError, what: str) -> NoReturn:
    raise CoordinationError(f"etcd refused {what}: {error.code().name}: {error.details()}") from error


def _header(header: Any) -> EtcdHeader:
    return EtcdHeader(header.cluster_id, header.member_id, header.revision, header.raft_term)


def _at(header: EtcdHeader, revision: int) -> EtcdHeader:
    return EtcdHeader(header.cluster_id, header.member_id, revision, header.raft_term)


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(decode_key(kv.key), kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


def _event(event: Any) -> WatchEvent:
    return WatchEvent(_key_value(event.kv), deleted=event.type == kv_pb2.Event.DELETE)


def _compare(compare: Compare) -> Any:
    relation = {
        Relation.EQUAL: rpc_pb2.Compare.EQUAL,
        Relation.NOT_EQUAL: rpc_pb2.Compare.NOT_EQUAL,
        Relation.LESS: rpc_pb2.Compare.LESS,
        Relation.GREATER: rpc_pb2.Compare.GREATER,
    }[compare.relation]
    target, name = {
        CompareTarget.VERSION: (rpc_pb2.Compare.VERSION, "version"),
        CompareTarget.CREATE_REVISION: (rpc_pb2.Compare.CREATE, "create_revision"),
        CompareTarget.MOD_REVISION: (rpc_pb2.Compare.MOD, "mod_revision"),
        CompareTarget.VALUE: (rpc_pb2.Compare.VALUE, "value"),
        CompareTarget.LEASE: (rpc_pb2.Compare.LEASE, "lease"),
    }[compare.target]
    key = encode_key(compare.key)
    end = prefix_end(key) if compare.prefix else b""
    return rpc_pb2.Compare(key=key, range_end=end, result=relation, target=target, **{name: compare.operand})


def _operation(op: Op) -> Any:
    key = encode_key(op.key)
    if isinstance(op, Put):
        put = rpc_pb2.PutRequest(key=key, value=op.value, lease=op.lease, ignore_lease=op.keep_lease)
        return rpc_pb2.RequestOp(request_put=put)
    delete = rpc_pb2.DeleteRangeRequest(key=key, range_end=prefix_end(key) if op.prefix else b"")
    return rpc_pb2.RequestOp(request_delete_range=delete)
