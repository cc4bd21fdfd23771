"""The RPC Note: keeps short texts in etcd, so that auditors detect changes of files in a fragment store.

A caller can change a note only with its current version, which etcd counts.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from coranto.coordination.etcd import Compare, CompareTarget, KeyValue, Put
from coranto.errors import InvalidInput, PermissionDenied
from coranto.fragments.store_urls import parse_store_url
from coranto.security.tokens import Claims
from coranto.wire import protocol_pb2 as pb
from coranto.wire.heads_pb2 import NoteRequest, NoteResponse
from coranto_broker.handlers.store_health import covered_journals

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

MAX_NOTE_BYTES: Final = 16 << 10
MAX_NAME_BYTES: Final = 1024
MAX_NOTES: Final = 4096
"""The maximum number of notes in a cluster, so that callers cannot fill etcd."""


async def serve(broker: Broker, request: NoteRequest, claims: Claims, caller: str) -> NoteResponse:
    """Read or write a note.

    Raises InvalidInput, PermissionDenied if the token covers no journal of the store, and EtcdBudgetExceeded if
    `caller` has written too much to etcd.
    """
    if not claims.covers_all and not covered_journals(broker, request.fragment_store, claims):
        raise PermissionDenied("the token covers no journal of this fragment store, and not all journals")
    _validate(request)
    layout = broker.keyspace.state.layout
    text = f"{request.fragment_store}\n{request.name}"
    key = layout.note_key(hashlib.sha256(text.encode()).hexdigest())
    if not request.write:
        return _response(broker, pb.OK, (await broker.coordinator.get(key))[1])
    if not request.expect_version and await _count(broker, layout.notes) >= MAX_NOTES:
        raise InvalidInput(
            f"the cluster has {MAX_NOTES} notes, and accepts no more. They are etcd keys below {layout.notes}: delete "
            "notes about stores that are no longer audited"
        )
    unchanged = Compare(key, CompareTarget.VERSION, request.expect_version)
    put = Put(key, request.content)
    cost = await broker.etcd_budget.spend(caller, [put])
    result = await broker.coordinator.txn([unchanged], [put], otherwise=[key])
    if not result.succeeded:
        broker.etcd_budget.give_back(caller, cost)
        return _response(broker, pb.ETCD_TRANSACTION_FAILED, result.found[0])
    written = KeyValue(key, request.content, version=request.expect_version + 1)
    return _response(broker, pb.OK, written)


def _validate(request: NoteRequest) -> None:
    parse_store_url(request.fragment_store)
    name_bytes, content_bytes = len(request.name.encode()), len(request.content)
    if not 0 < name_bytes <= MAX_NAME_BYTES:
        raise InvalidInput(f"has {name_bytes} bytes, and may have 1 to {MAX_NAME_BYTES}", field="NoteRequest.name")
    if content_bytes > MAX_NOTE_BYTES:
        raise InvalidInput(f"has {content_bytes} bytes, and may have {MAX_NOTE_BYTES}", field="NoteRequest.content")
    if request.expect_version < 0:
        raise InvalidInput(f"{request.expect_version} is negative", field="NoteRequest.expect_version")


async def _count(broker: Broker, prefix: str) -> int:
    return (await broker.coordinator.range(prefix, limit=1, keys_only=True)).count


def _response(broker: Broker, status: pb.Status.ValueType, kv: KeyValue | None) -> NoteResponse:
    header = broker.unrouted_header(broker.keyspace.state)
    if kv is None:
        return NoteResponse(status=status, header=header)
    return NoteResponse(status=status, header=header, content=kv.value, version=kv.version)
