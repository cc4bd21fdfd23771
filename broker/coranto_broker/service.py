"""The gRPC service `protocol.Journal`: hands each call to its handler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto_broker.handlers import append, fragments, listing, read, replicate, store_health
from coranto_broker.handlers.errors import Context, reported

if TYPE_CHECKING:
    from coranto_broker.broker import Broker


class JournalService(pb_grpc.JournalServicer):
    """Calls of clients and of other brokers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def List(self, request: pb.ListRequest, context: Context) -> None:  # type: ignore[override]
        async with reported("List", context):
            await listing.serve_list(self._broker, request, context)

    async def Apply(self, request: pb.ApplyRequest, context: Context) -> pb.ApplyResponse:
        async with reported("Apply", context):
            return await listing.serve_apply(self._broker, request)

    async def Read(self, request: pb.ReadRequest, context: Context) -> None:  # type: ignore[override]
        async with reported("Read", context):
            await read.serve(self._broker, request, context)

    async def Append(self, request_iterator: Any, context: Context) -> pb.AppendResponse:
        async with reported("Append", context):
            return await append.serve(self._broker, context)

    async def Replicate(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        async with reported("Replicate", context):
            await replicate.serve(self._broker, context)

    async def ListFragments(self, request: pb.FragmentsRequest, context: Context) -> pb.FragmentsResponse:
        async with reported("ListFragments", context):
            return await fragments.serve(self._broker, request)

    async def FragmentStoreHealth(
        self, request: pb.FragmentStoreHealthRequest, context: Context
    ) -> pb.FragmentStoreHealthResponse:
        async with reported("FragmentStoreHealth", context):
            return await store_health.serve(self._broker, request)


def make_server(broker: Broker) -> grpc.aio.Server:
    """A server of the broker's service, not yet bound to a port."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", broker.settings.max_message_bytes),
            ("grpc.max_send_message_length", broker.settings.max_message_bytes),
            # Two brokers must not share a port unnoticed.
            ("grpc.so_reuseport", 0),
            # Clients keep idle connections alive at their own pace.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    pb_grpc.add_JournalServicer_to_server(JournalService(broker), server)
    return server
