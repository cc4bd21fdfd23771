"""`EtcdCoordinator`: a `Coordinator` on a real etcd.

It uses the raw v3 stubs, because it needs the header of every response: peers compare revisions, and a wire Header
has all fields of etcd's header.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from aetcd.rpc import kv_pb2, rpc_pb2, rpc_pb2_grpc

from coranto.coordination.etcd import (
    Compare,
    CompareTarget,
    EtcdHeader,
    GrantedLease,
    KeyValue,
    LeaseStatus,
    Op,
    Put,
    Relation,
    Snapshot,
    TxnResult,
    WatchBatch,
    WatchEvent,
    decode_key,
    encode_key,
    prefix_end,
)
from coranto.coordination.etcd_endpoints import channel_target, etcd_certificates
from coranto.effects import Clock, SystemClock
from coranto.errors import CoordinationError, EtcdFull, InvalidInput, TxnOutcomeUnknown, Unavailable, WatchReset
from coranto.security.tls import ClientTls

_log = structlog.get_logger(__name__)


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


_NO_SPACE = "database space exceeded"
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
        self._maintenance: Any = None

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
        self._maintenance = rpc_pb2_grpc.MaintenanceStub(self._channel)

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
        failures, again = 0, False
        while True:
            problem = "the stream ended"
            try:
                async with aclosing(self._watch_once(prefix, next_revision, again=again)) as batches:
                    again = True
                    async for batch in batches:
                        failures = failures if batch.reconnected else 0
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

    async def _watch_once(self, prefix: str, from_revision: int, *, again: bool) -> AsyncGenerator[WatchBatch, None]:
        """Watch on one stream. A batch's header has the revision of its last event, or of the progress notification.

        `again` is True after the first attempt.
        """
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
                    if again:
                        yield WatchBatch(_at(header, from_revision - 1), (), reconnected=True)
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

    async def bytes_in_use(self) -> int:
        self._connect()
        try:
            status = await self._maintenance.Status(rpc_pb2.StatusRequest(), timeout=self._timeout, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
                return 0
            self._raise(error, "Status", changes=False)
        return int(status.dbSizeInUse or status.dbSize)

    async def _call(self, method: Any, request: Any, *, changes: bool = False) -> Any:
        try:
            return await method(request, timeout=self._timeout, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            self._raise(error, type(request).__name__.removesuffix("Request"), changes=changes)

    def _raise(self, error: grpc.aio.AioRpcError, what: str, *, changes: bool) -> NoReturn:
        if error.code() not in _TRANSIENT:
            _refused(error, what)
        if _NO_SPACE in (error.details() or ""):
            raise EtcdFull(
                f"etcd at {self.endpoint} refused {what}, and nothing was changed: its database has reached its quota "
                "(alarm NOSPACE). Compact its history, `etcdctl defrag`, then `etcdctl alarm disarm`; `coranto doctor "
                "--etcd` shows its state"
            ) from error
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
