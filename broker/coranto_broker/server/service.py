"""The gRPC services of a broker, `protocol.Journal` and Coranto's own: passes each call to its handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from coranto.errors import CorantoError
from coranto.security.admission import caller_of
from coranto.security.tokens import Claims
from coranto.wire import append_stream_pb2, append_stream_pb2_grpc, heads_pb2, heads_pb2_grpc
from coranto.wire import protocol_pb2 as pb
from coranto.wire import protocol_pb2_grpc as pb_grpc
from coranto_broker.append.overload import Admission
from coranto_broker.authorization import RULES, UNRESTRICTED
from coranto_broker.handlers import (
    append,
    append_stream,
    apply,
    fragments,
    heads,
    listing,
    notes,
    read,
    replicate,
    store_health,
)
from coranto_broker.handlers.errors import Context, report, reported
from coranto_broker.rpc.batches import batch_reader
from coranto_broker.rpc.content import append_reader, replicate_reader
from coranto_broker.rpc.first_write import GrpcContext, WholeFirstWrite
from coranto_broker.rpc.rolled_back import TooManyAppends
from coranto_broker.rpc.source import Unreadable, require_readable
from coranto_broker.server.frames import FrameMethod

if TYPE_CHECKING:
    from coranto_broker.broker import Broker

MAX_PENDING_CALLS: Final = 20_000
"""The maximum number of calls that gRPC queues for this process (see `make_server`)."""

SERVICES: Final = (
    pb.DESCRIPTOR.services_by_name["Journal"],
    heads_pb2.DESCRIPTOR.services_by_name["Journals"],
    append_stream_pb2.DESCRIPTOR.services_by_name["Appends"],
)

_KINDS: Final[Mapping[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

_OWN_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "Append": append_reader,
    "Replicate": replicate_reader,
    "AppendStream": batch_reader,
}


class JournalService(pb_grpc.JournalServicer, heads_pb2_grpc.JournalsServicer, append_stream_pb2_grpc.AppendsServicer):
    """The service for clients and other brokers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._under_way = {method: broker.metrics.under_way(method) for method in RULES}
        self._admission = Admission(
            broker.settings.max_appends,
            self._under_way["Append"],
            broker.metrics.appends_refused,
            broker.metrics.append_stream_waits,
            broker.clock,
        )

    @asynccontextmanager
    async def _admitted(self, method: str, context: Context, request: Message | None = None) -> AsyncIterator[Claims]:
        """Authorize and count a call during the block. Errors end the call with a status code."""
        with self._under_way[method]:
            async with reported(method, context), self._broker.authorizer.admitted(method, context) as claims:
                require_readable(request)
                yield claims

    def _endable(self, context: Context) -> Context:
        """Return a context for a gRPC call that streams responses, which can be ended when its token expires."""
        if self._broker.authorizer.admits_all:
            return context
        return cast("Context", WholeFirstWrite(context))

    async def List(self, request: pb.ListRequest, context: Context) -> None:  # type: ignore[override]
        context = self._endable(context)
        async with self._admitted("List", context, request) as claims:
            limited = request.watch and self._broker.quotas.apply_to(claims)
            with self._broker.quotas.stream(caller_of(claims, context.peer()) if limited else ""):
                await listing.serve(self._broker, request, context, claims)

    async def Apply(self, request: pb.ApplyRequest, context: Context) -> pb.ApplyResponse:
        async with self._admitted("Apply", context, request) as claims:
            return await apply.serve(self._broker, request, claims, caller_of(claims, context.peer()))

    async def Read(self, request: pb.ReadRequest, context: Context) -> None:  # type: ignore[override]
        context = self._endable(context)
        async with self._admitted("Read", context, request) as claims:
            await read.serve(self._broker, request, context, claims, caller_of(claims, context.peer()))

    async def Append(self, request_iterator: Any, context: Context) -> pb.AppendResponse:
        return pb.AppendResponse.FromString(await self.append_encoded(request_iterator, context))

    async def append_encoded(self, request_iterator: Any, context: Context) -> bytes:
        """Serve the RPC Append, and return the encoded response."""
        # The same as `_admitted`, without its layers, which would add more than half to the time of a small append.
        broker, admission = self._broker, self._admission
        try:
            admission.enter()
        except TooManyAppends as error:
            await report(error, "Append", context)
        try:
            if broker.authorizer.admits_all:
                return await self._append(context, UNRESTRICTED)
            async with broker.authorizer.admitted("Append", context) as claims:
                return await self._append(context, claims)
        except (CorantoError, OSError) as error:
            await report(error, "Append", context)
        finally:
            admission.leave()

    async def _append(self, context: Context, claims: Claims) -> bytes:
        caller, quotas = "", self._broker.quotas
        if quotas.apply_to(claims):
            caller = caller_of(claims, context.peer())
            self._admission.leave()  # A delayed append does not count as under way, so it delays no other caller.
            try:
                await quotas.admit_appends(caller)
            finally:
                self._admission.enter_in_turn()
        return await append.serve_encoded(self._broker, context, claims, caller)

    async def AppendStream(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        await self.append_stream(request_iterator, cast("Context", GrpcContext(context)))

    async def append_stream(self, request_iterator: Any, context: Context) -> None:
        """Serve a stream of appends over gRPC (`GrpcContext`) or frames."""
        # Each append has its own token and is counted by itself, so that a stream may outlive the token of its call.
        with self._under_way["AppendStream"]:
            async with reported("AppendStream", context):
                await append_stream.serve(self._broker, context, self._admission)

    async def Replicate(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        await self.replicate(request_iterator, self._endable(context))

    async def replicate(self, request_iterator: Any, context: Context) -> None:
        """Serve a stream of replication over gRPC or frames."""
        async with self._admitted("Replicate", context) as claims:
            await replicate.serve(self._broker, context, claims)

    async def ListFragments(self, request: pb.FragmentsRequest, context: Context) -> pb.FragmentsResponse:
        async with self._admitted("ListFragments", context, request) as claims:
            return await fragments.serve(self._broker, request, claims)

    async def FragmentStoreHealth(
        self, request: pb.FragmentStoreHealthRequest, context: Context
    ) -> pb.FragmentStoreHealthResponse:
        async with self._admitted("FragmentStoreHealth", context, request) as claims:
            return await store_health.serve(self._broker, request, claims)

    async def Heads(self, request: heads_pb2.HeadsRequest, context: Context) -> None:  # type: ignore[override]
        context = self._endable(context)
        async with self._admitted("Heads", context, request) as claims:
            await heads.serve(self._broker, request, context, claims)

    async def Note(self, request: heads_pb2.NoteRequest, context: Context) -> heads_pb2.NoteResponse:
        async with self._admitted("Note", context, request) as claims:
            return await notes.serve(self._broker, request, claims, caller_of(claims, context.peer()))


def _method_handlers(kind: ServiceDescriptor, service: JournalService) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Return handlers as generated code does, except that they also get unparsable bytes, in order to reject them."""
    handlers = {
        method.name: _KINDS[method.client_streaming, method.server_streaming](
            getattr(service, method.name),
            request_deserializer=_deserializer(method.name, GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in kind.methods
    }
    encoded = handlers.get("Append")
    if encoded is not None:
        handlers["Append"] = grpc.stream_unary_rpc_method_handler(
            service.append_encoded, request_deserializer=encoded.request_deserializer, response_serializer=None
        )
    return handlers


def _deserializer(method: str, kind: type[Message]) -> Callable[[bytes], object]:
    parse = _reader(kind)
    around = _OWN_READERS.get(method)
    return around(parse) if around is not None else parse


def _reader(kind: type[Message]) -> Callable[[bytes], Message | Unreadable]:
    parse = kind.FromString

    def read(data: bytes) -> Message | Unreadable:
        try:
            return parse(data)
        except DecodeError:
            return Unreadable()

    return read


def frame_methods(service: JournalService) -> Mapping[str, FrameMethod]:
    """Return the methods of a broker's services that are also served over frames."""
    return {
        "AppendStream": FrameMethod(
            _deserializer("AppendStream", append_stream_pb2.AppendBatch), service.append_stream
        ),
        "Replicate": FrameMethod(_deserializer("Replicate", pb.ReplicateRequest), service.replicate),
    }


def make_server(broker: Broker, service: JournalService | None = None) -> grpc.aio.Server:
    """Return a server of the broker's services, not yet bound to a port."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", broker.settings.max_message_bytes),
            ("grpc.max_send_message_length", broker.settings.max_message_bytes),
            # By default, gRPC cancels calls while more than 1,000 are queued. Then neither the broker nor the clients
            # know whether they were applied. The broker refuses appends with a clear error instead (`Admission`).
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            # Two brokers must not share a port unnoticed.
            ("grpc.so_reuseport", 0),
            # Clients choose the interval of their keepalive pings.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    service = service or JournalService(broker)
    for kind in SERVICES:
        handlers = _method_handlers(kind, service)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(kind.full_name, handlers),))
        server.add_registered_method_handlers(kind.full_name, handlers)
    return server
