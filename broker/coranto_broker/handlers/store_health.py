"""The RPC FragmentStoreHealth: a probe of all operations that a broker needs of a fragment store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from coranto.client.store_probe import probe, probe_delete
from coranto.errors import CorantoError, PermissionDenied, StoreError
from coranto.security.tokens import Capability, Claims
from coranto.specs.validation import validate
from coranto.wire import protocol_pb2 as pb

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

_log = structlog.get_logger(__name__)


async def serve(
    broker: Broker, request: pb.FragmentStoreHealthRequest, claims: Claims
) -> pb.FragmentStoreHealthResponse:
    """Probe the store. With `check_delete`, also write and remove a file under `check_delete_prefix`."""
    _authorize(broker, request, claims)
    validate(request)
    response = pb.FragmentStoreHealthResponse(status=pb.OK, header=broker.unrouted_header(broker.keyspace.state))
    try:
        store = broker.stores.get(request.fragment_store)
        await probe(store)
        if request.check_delete:
            await probe_delete(store, request.check_delete_prefix)
        if refused := broker.store_watch.backlog.refused_by(request.fragment_store):
            raise StoreError(f"it accepts probes, but this broker cannot store fragments of {refused} journals there")
    except CorantoError as error:
        response.status = pb.FRAGMENT_STORE_UNHEALTHY
        response.store_health_error = error.public_text
        _log.warning("store.unhealthy", store=request.fragment_store, error=str(error))
    return response


def _authorize(broker: Broker, request: pb.FragmentStoreHealthRequest, claims: Claims) -> None:
    """Check that the caller may probe this store. Raises PermissionDenied.

    A probe writes files at an address from the request. A caller with access to journals may probe their stores, below
    their folders. Other stores require APPLY over all journals, since a spec could use any store.
    """
    if claims.covers_all and Capability.APPLY in claims.capability:
        return
    journals = covered_journals(broker, request.fragment_store, claims)
    if not journals:
        raise PermissionDenied(
            "the token covers no journal of this fragment store, "
            "and lacks the capability APPLY over all journals; use a token that has one of them"
        )
    prefix = request.check_delete_prefix
    if prefix and not any(f"{journal}/".startswith(prefix) for journal in journals):
        raise PermissionDenied("the token covers no journal of this fragment store below check_delete_prefix")


def covered_journals(broker: Broker, fragment_store: str, claims: Claims) -> list[str]:
    """Return the journals of this store that the token covers."""
    return [
        item.id
        for item in broker.keyspace.state.items
        if fragment_store in item.spec.fragment.stores and claims.covers(item.id, item.spec.labels)
    ]
