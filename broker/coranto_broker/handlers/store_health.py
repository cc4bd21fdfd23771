"""FragmentStoreHealth: whether a fragment store does all that a broker will ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coranto.auth import Claims
from coranto.errors import CorantoError, PermissionDenied, StoreError
from coranto.specs import validate
from coranto.wire import protocol_pb2 as pb
from coranto_broker.store_probe import probe, probe_delete

if TYPE_CHECKING:
    from coranto_broker.broker import Broker


async def serve(
    broker: Broker, request: pb.FragmentStoreHealthRequest, claims: Claims
) -> pb.FragmentStoreHealthResponse:
    """Probe the store, and with `check_delete` whether a file under that prefix can be written and removed.

    Whose claims do not cover every journal may ask for the stores of those that they cover.
    """
    validate(request)
    if not claims.covers_all and not any(
        request.fragment_store in item.spec.fragment.stores and claims.covers(item.id, item.spec.labels)
        for item in broker.keyspace.state.items
    ):
        raise PermissionDenied("the token covers no journal of this fragment store")
    response = pb.FragmentStoreHealthResponse(status=pb.OK, header=broker.unrouted_header(broker.keyspace.state))
    try:
        store = broker.stores.get(request.fragment_store)
        await probe(store)
        if request.check_delete:
            await probe_delete(store, request.check_delete_prefix)
        if refused := broker.backlog.refused_by(request.fragment_store):
            raise StoreError(f"it takes probes, but this broker cannot store fragments of {refused} journals there")
    except CorantoError as error:
        response.status = pb.FRAGMENT_STORE_UNHEALTHY
        response.store_health_error = str(error)
    return response
